"""Time products of float32 on tensor cores with operands that are split before, on a GPU; cuBLAS is next to them.

Run it on a quiet machine: `python benchmarks/float32_prepared.py [n ...]`. A cell is TFLOP/s, and the ratio to cuBLAS.
Kinds take turns, and each has operands that rotate, so that none are in L2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gemmery as gm

ROUNDS, CALLS = 5, 12
SIZES = (1024, 2048, 4096, 8192)
Multiply = Callable[[int], Any]


def kinds(n: int) -> dict[str, Multiply]:
    """Return what is compared, each as a function of the number of the call."""
    count = 3
    a, b, c = (torch.randn(count, n, n, device="cuda").unbind() for _ in range(3))
    of_a, of_b = [gm.split(x, "a") for x in a], [gm.split(x) for x in b]

    def by(left: Any, right: Any, precision: str) -> Multiply:
        return lambda i: gm.matmul(left[i % count], right[i % count], out=c[i % count], precision=precision)

    return {
        "cublas": lambda i: torch.matmul(a[i % count], b[i % count], out=c[i % count]),
        "f32_tensor": by(a, b, "f32_tensor"),
        "b split": by(a, of_b, "f32_tensor"),
        "a split": by(of_a, b, "f32_tensor"),
        "both split": by(of_a, of_b, "f32_tensor"),
        "f32_strict": by(a, b, "f32_strict"),
        "strict, b split": by(a, of_b, "f32_strict"),
    }


def milliseconds(multiply: Multiply) -> float:
    """Return the time of a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(CALLS):
        multiply(i)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS


def main(sizes: Sequence[int]) -> None:
    """Print a row for each size."""
    for n in sizes:
        multiplies = kinds(n)
        for multiply in multiplies.values():
            for i in range(3):
                multiply(i)
        rounds = [{name: milliseconds(multiply) for name, multiply in multiplies.items()} for _ in range(ROUNDS)]
        times = {name: statistics.median(each[name] for each in rounds) for name in multiplies}
        cells = [f"{name} {2 * n**3 / time / 1e9:.1f} ({times['cublas'] / time:.2f})" for name, time in times.items()]
        print(f"n = {n}: {', '.join(cells)}")  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", type=int, nargs="*", default=SIZES, help="sides of the operands")
    sizes = parser.parse_args().n
    torch.backends.cuda.matmul.allow_tf32 = False
    main(sizes)
