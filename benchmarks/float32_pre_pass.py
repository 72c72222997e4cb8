"""Time the pre-pass of float32 products on tensor cores, on a GPU, as a share of the bandwidth of a copy.

Run it on a quiet machine: `python benchmarks/float32_pre_pass.py [n ...]`. The pre-pass reads two n x n operands and
writes two or three parts of each element: 8 or 10 bytes an element. A row is a layout of A and B, a cell the share of
what a copy of 1 GiB reaches, its bytes read and written, measured in the same rounds; operands rotate, so that none
are in L2. Before each round the device rests and one sample is dropped: after memory has been freed, as the copies free
theirs, a first sample takes up to a twentieth longer than all that follow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from gemmery.api.prepared import alone
from gemmery.arrays import View, view
from gemmery.cuda import driver
from gemmery.cuda.driver import Memory, Stream
from gemmery.ladder import float32_pre_pass
from gemmery.limits import device_limits
from gemmery.limits.device_limits import replays
from gemmery.problem import Problem
from gemmery_lab.measure.timing import Sample

SIZES = (1024, 2048, 4096, 8192, 16384)
LAYOUTS = {
    "k adjacent in both": ("row", "col"),
    "in A": ("row", "row"),
    "in B": ("col", "col"),
    "in none": ("col", "row"),
}
SCHEMES = {"TwoParts": 8, "ThreeParts": 10}  # bytes an element
L2_TIMES, ROUNDS, CALLS = 3, 7, 20
REST = 0.05  # seconds


def operand(n: int, adjacent: bool, stream: Stream) -> View:
    """Return a random matrix on the device, stored by rows or by columns."""
    x = torch.randn(n, n, device="cuda")
    z = view(x if adjacent else x.T)
    return View(z.pointer, (1, *z.shape), (0, *z.strides), "f32", z.device, stream.handle, True, x)


def sampler(n: int, layouts: tuple[str, str], scheme: str, stream: Stream) -> Sample:
    """Return a sampler of the pre-pass of operands in these layouts."""
    l2 = driver.device(stream.ordinal).l2
    count = max(2, -(-L2_TIMES * l2 // (8 * n * n)))
    pairs = [(operand(n, layouts[0] == "row", stream), operand(n, layouts[1] == "row", stream)) for _ in range(count)]
    a_layout, b_layout = layouts
    problem = Problem(n, n, n, "f32", "f32", a_layout=a_layout, b_layout=b_layout, device=f"cuda:{stream.ordinal}")
    launches = (float32_pre_pass.begin(problem), *float32_pre_pass.split(problem, scheme, asked_for=True))
    workspace = Memory(float32_pre_pass.places(problem)[2], stream.ordinal)
    c = View(0, (1, n, n), (4 * n * n, 4 * n, 4), "f32")
    run = alone(launches, problem, *pairs[0], c)

    def put(index: int) -> None:
        a, b = pairs[index]
        run(a.pointer, b.pointer, 0, stream.handle, 0, workspace.pointer)

    return replays(put, stream, count)


def main(sizes: Sequence[int]) -> None:
    """Print a row for each size and layout."""
    stream = Stream()
    print(torch.cuda.get_device_name())  # noqa: T201
    for n in sizes:
        for name, layouts in LAYOUTS.items():
            samples = {scheme: sampler(n, layouts, scheme, stream) for scheme in SCHEMES}
            torch.cuda.synchronize()
            times: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
            copies = []
            for _ in range(ROUNDS):
                copies.append(device_limits.bandwidth(stream).copy)
                time.sleep(REST)
                samples["TwoParts"](CALLS, 2)
                for scheme, sample in samples.items():
                    times[scheme].append(sample(CALLS, 2) / CALLS)
            copy = statistics.median(copies)
            cells = []
            for scheme, each in times.items():
                ns = statistics.median(each)
                share = 2 * n * n * SCHEMES[scheme] / ns / copy
                cells.append(f"{scheme} {ns / 1e3:.1f} us {share:.3f}")
            print(f"n = {n}, {name}: {', '.join(cells)} of {copy:.0f} GB/s")  # noqa: T201
            del samples


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("n", type=int, nargs="*", default=SIZES, help="sides of the operands")
    main(parser.parse_args().n)
