"""Groups of rows on a Hopper GPU, each way by itself: gemmery, torch._grouped_mm, a loop of torch.mm and cublasLt.

    python benchmarks/grouped_ways.py --seconds 1

The suite hopper_grouped compares with the faster of PyTorch's two ways; this prints the time of each for the same
products, by the same protocol, and its ratio to gemmery's. What cublasLt computes is checked against a reference.
Before version 13.4 it has no such products.
"""

from __future__ import annotations

import argparse
import random
import sys

import cublaslt_groups

from gemmery.cuda import driver
from gemmery.cuda.driver import Stream
from gemmery.errors import RefusedError
from gemmery.ladder import cuda, rung
from gemmery.limits.device_limits import replays
from gemmery_lab import on_cuda
from gemmery_lab.measure import cublas, suite, timing, torch_operands
from gemmery_lab.measure.timing import Contestant
from gemmery_lab.measure.torch_operands import Put, Resident

SUITE = "hopper_grouped"


def main() -> None:
    """Print a line for each product and way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for one product")
    options = parser.parse_args()
    plan, stream = suite.load(suite.find(SUITE)), Stream()
    bound = rung.find(cuda.CUDA, "wgmma_grouped").bound_of("bf16")
    sys.stdout.write(f"{driver.device(0).name}; {cublas.find('cublas').runs}\n")
    for work in plan.works:
        resident = Resident(work, stream)
        own = torch_operands.own(resident, on_cuda.product(work, **torch_operands.own_options(resident)))
        by_lt = by_cublaslt(resident)
        errors = [on_cuda.error(resident, lambda put=put: put(0), bound) for put in by_lt.values()]
        ways = {"gm.grouped_matmul": own, **cublas.grouped_ways(resident), **by_lt}
        contestants = [Contestant(name, replays(put, stream, len(resident.sets))) for name, put in ways.items()]
        comparison = timing.compare(contestants, options.seconds, plan.rest, draw=random.Random(0))
        for name, times in comparison.timings.items():
            ratio = comparison.versus.get(name)
            versus = f" {ratio.median:.3f} ± {ratio.spread:.3f}" if ratio else ""
            sys.stdout.write(f"{work}; {name}: {times.seconds * 1e6:.1f} us{versus}\n")
        sys.stdout.write(
            f"{work}; error of cublasLt over its bound: {', '.join(f'{x:.3f}' for x in errors) or 'none'}\n"
        )
        sys.stdout.flush()


def by_cublaslt(resident: Resident) -> dict[str, Put]:
    """Return cublasLt's own product of groups, if the version that is loaded has one."""
    try:
        return {"cublasLtMatmul of groups": cublaslt_groups.grouped(resident)}
    except RefusedError:
        return {}


if __name__ == "__main__":
    main()
