"""Time integers, complex numbers and semirings on a CUDA device, complex ones beside PyTorch's product (cuBLAS).

    python benchmarks/types_on_gpu.py --sides 4096,8192 --to times.jsonl

Each case is computed by `gm.matmul` into an array that exists, and, for complex types, by `torch.matmul` in turn;
semirings take turns with float32 by the rung `simt_pipelined`. Times are medians of turns between events, after a
warm-up. Values are not compared: tests and `gemmery verify` do so. Each case is a line of JSON in the file `--to`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

os.environ["GEMMERY_TIERS"] = "off"  # no kernel is replaced while it is timed

import torch

import gemmery as gm
from gemmery.arrays import view
from gemmery.keywords import SEMIRINGS
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
COMPLEX = (("complex64", None), ("complex64", "f32_tensor"), ("complex64", "f32_strict"), ("complex128", None))
TURNS, SECONDS = 5, 0.05  # of a case, and of a turn at most


def numbers(n, name):
    """Return random numbers: of integers the whole range."""
    dtype = getattr(torch, name)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(n, n, device="cuda", dtype=dtype)
    whole = torch.randint(-(2**63), 2**63 - 1, (n, n), device="cuda")
    return whole % 8 == 0 if dtype is torch.bool else whole.to(dtype)


def seconds(*calls):
    """Return the median time of each call, which take turns."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def turn(call, count):
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    counts = []
    for call in calls:
        turn(call, 2)
        counts.append(max(1, int(SECONDS / turn(call, 1))))
    times = [[turn(call, count) for call, count in zip(calls, counts, strict=True)] for _ in range(TURNS)]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def on_cuda_cores(a, b, c):
    """Return the product of float32 by the rung simt_pipelined, as a call."""
    rung, n = find(CUDA, "simt_pipelined"), len(a)
    run = rung.build(Problem(n, n, n, "f32", "f32", device="cuda:0"), rung.default)
    views = [view(x)._replace(shape=(1, n, n), strides=(0, 4 * n, 4), device="cuda:0") for x in (a, b, c)]
    return lambda: run(*views)


def cases(n):
    """Yield the name of each case, its operations, and the times of gemmery and of what it is divided by, if any."""
    for name in INTEGERS:
        a, b = numbers(n, name), numbers(n, name)
        c = torch.empty_like(a)
        yield name, 2 * n**3, *seconds(lambda a=a, b=b, c=c: gm.matmul(a, b, out=c)), None
    for name, precision in COMPLEX:
        a, b = numbers(n, name), numbers(n, name)
        c = torch.empty_like(a)
        own = lambda a=a, b=b, c=c, precision=precision: gm.matmul(a, b, out=c, precision=precision)  # noqa: E731
        yield (
            f"{name} {precision or ''}".strip(),
            8 * n**3,
            *seconds(own, lambda a=a, b=b, c=c: torch.matmul(a, b, out=c)),
        )
    a, b = numbers(n, "float32"), numbers(n, "float32")
    c = torch.empty_like(a)
    plain = on_cuda_cores(a, b, c)
    for name in SEMIRINGS:
        if name != "or_and":
            yield name, 2 * n**3, *seconds(lambda name=name: gm.matmul(a, b, out=c, semiring=name), plain)


def main():
    """Time the cases of each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="4096,8192")
    parser.add_argument("--to", default="")
    arguments = parser.parse_args()
    for n in map(int, arguments.sides.split(",")):
        for name, work, own, other in cases(n):
            row = {"n": n, "case": name, "us": own * 1e6, "tops": work / own / 1e12, "ratio": other and other / own}
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            if arguments.to:
                with Path(arguments.to).open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
