"""Time what a call on a CUDA device takes on the host before it returns, beside the same call of PyTorch.

    python benchmarks/host_times.py --to times.jsonl

Each case is a line of JSON with microseconds: medians of runs of 20 calls that take turns, after which the device is
waited for. The results of both are compared first. In "views" every operand is a view that the call makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import gemmery as gm

CALLS, ROUNDS = 20, 25


def cases(n, dtype):
    """Yield the name of a case, our call, and PyTorch's."""
    made = lambda *shape: torch.randn(shape, device="cuda").to(dtype)  # noqa: E731
    a, b, c, out, ours, v, x = made(n, n), made(n, n), made(n, n), made(n, n), made(n, n), made(n), made(n)
    p, q = made(4, n, n), made(4, n, n)
    w, ends = made(4, n, n).mT.contiguous().mT, torch.arange(1, 5, device="cuda", dtype=torch.int32) * (n // 4)
    yield "matmul out", lambda: gm.matmul(a, b, out=ours), lambda: torch.mm(a, b, out=out)
    yield "matmul", lambda: gm.matmul(a, b), lambda: torch.mm(a, b)
    yield "matmul views", lambda: gm.matmul(a[:], b[:]), lambda: torch.mm(a[:], b[:])
    yield "gemm", lambda: gm.gemm(1.0, a, b, 1.0, c, out=ours), lambda: torch.addmm(c, a, b, out=out)
    yield (
        "gemm views",
        lambda: gm.gemm(1.0, a[:], b[:], 1.0, c[:], out=ours[:]),
        lambda: torch.addmm(c[:], a[:], b[:], out=out[:]),
    )
    yield "gemv y", lambda: gm.gemv(a, x, beta=1.0, y=v), lambda: torch.addmv(v, a, x)
    relu = lambda y: y.relu_()  # noqa: E731
    yield (
        "bias relu",
        lambda: gm.matmul(a, b, bias=v, activation="relu"),
        lambda: relu(torch.addmm(v, a, b)),
    )
    yield (
        "bias relu views",
        lambda: gm.matmul(a[:], b[:], bias=v[:], activation="relu"),
        lambda: relu(torch.addmm(v[:], a[:], b[:])),
    )
    yield "batched", lambda: gm.matmul(p, q), lambda: torch.bmm(p, q)
    if dtype == torch.bfloat16:
        yield "grouped", lambda: gm.grouped_matmul(a, w, offsets=ends), lambda: torch._grouped_mm(a, w, offs=ends)


def times(calls):
    """Return the median microseconds of each call."""
    spent = [[] for _ in calls]
    for number in range(ROUNDS + 3):
        for call, found in zip(calls, spent, strict=True):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if number >= 3:
                found.append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
    return [round(statistics.median(found), 2) for found in spent]


def main():
    """Time all cases and write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default="/dev/stdout", help="the file to which lines are appended")
    args = parser.parse_args()
    with open(args.to, "a", encoding="utf-8") as file:
        for dtype in (torch.float32, torch.bfloat16):
            for n in (64, 512):
                for name, ours, theirs in cases(n, dtype):
                    exact, got = theirs().double(), ours().double()
                    error = ((got - exact).norm() / exact.norm()).item()
                    assert error <= (1e-2 if dtype == torch.bfloat16 else 2e-3), (name, n, dtype, error)
                    mine, other = times((ours, theirs))
                    line = {
                        "case": name,
                        "n": n,
                        "dtype": str(dtype).removeprefix("torch."),
                        "gm": mine,
                        "torch": other,
                    }
                    file.write(json.dumps(line) + "\n")
                    file.flush()


if __name__ == "__main__":
    main()
