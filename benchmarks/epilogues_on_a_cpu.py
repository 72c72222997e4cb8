"""Time bias, silu and residual after a product on the CPU: one call with an epilogue, against NumPy in steps.

    python benchmarks/epilogues_on_a_cpu.py [--sizes 64,512,2048] [--seconds 2] [--threads 1]

They take turns with the bare product. A line has the median time of each, the median of the ratios, and that of the
steps to the bare product: no epilogue can have a larger ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from threadpoolctl import threadpool_limits

import gemmery as gm


@gm.epilogue
def layer(c, bias, residual):
    """The function that is timed."""
    return residual + gm.silu(c + bias)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="64,512,2048")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    gm.set_num_threads(options.threads)
    draw = np.random.default_rng(0)
    with threadpool_limits(options.threads):
        for n in map(int, options.sizes.split(",")):
            x, w, residual = (draw.standard_normal((n, n), np.float32) for _ in range(3))
            w, bias = w / np.sqrt(n).astype(np.float32), draw.standard_normal(n, np.float32)

            def in_steps(x=x, w=w, bias=bias, residual=residual):
                c = x @ w
                c += bias
                return residual + c / (1 + np.exp(-c))

            def fused(x=x, w=w, bias=bias, residual=residual):
                return gm.matmul(x, w, epilogue=layer(bias=bias, residual=residual))

            def bare(x=x, w=w):
                return gm.matmul(x, w)

            assert np.allclose(fused(), in_steps(), rtol=1e-3, atol=1e-3)
            time.sleep(1)  # until the kernel of tiles has been compiled
            pairs, end = [], time.perf_counter() + options.seconds
            while time.perf_counter() < end or len(pairs) < 5:
                pairs.append((seconds(in_steps), seconds(fused), seconds(bare)))
            steps, ours, product = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio, most = (statistics.median(row[0] / row[i] for row in pairs) for i in (1, 2))
            print(  # noqa: T201 # it is a program
                f"n = {n}: in steps {steps * 1e6:.1f} us, with an epilogue {ours * 1e6:.1f} us, ratio {ratio:.2f}; "
                f"bare product {product * 1e6:.1f} us, at most {most:.2f}"
            )


if __name__ == "__main__":
    main()
