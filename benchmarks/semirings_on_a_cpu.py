"""Time products in a semiring on the CPU against the product of the same float32 matrices.

    python benchmarks/semirings_on_a_cpu.py [--sizes 32,64,128,256,512,1024] [--semiring min_plus] [--threads 1]

Both take turns; a line has the best time of each, and the median of their ratios: the share of the product's rate.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import gemmery as gm


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="32,64,128,256,512,1024")
    parser.add_argument("--semiring", default="min_plus")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    gm.set_num_threads(options.threads)
    for n in map(int, options.sizes.split(",")):
        a, b = (np.random.default_rng(i).standard_normal((n, n), np.float32) for i in range(2))
        c, pairs = np.empty((n, n), np.float32), []
        for _ in range(15 if n <= 1024 else 7):
            start = time.perf_counter()
            gm.matmul(a, b, out=c)
            middle = time.perf_counter()
            gm.matmul(a, b, out=c, semiring=options.semiring)
            pairs.append((middle - start, time.perf_counter() - middle))
        share = statistics.median(product / ring for product, ring in pairs)
        best = [min(times) * 1e3 for times in zip(*pairs, strict=True)]
        print(f"n = {n}: product {best[0]:.2f} ms, {options.semiring} {best[1]:.2f} ms, share {share:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
