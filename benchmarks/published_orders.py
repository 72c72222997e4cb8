"""Compare the predicted order of kernels of well-known ladders with the published one; needs NVRTC and no GPU.

    python benchmarks/published_orders.py [LADDER ...] [--cards rtx3090,a100] [--all] [--public FOLDER]

The kernels of published_orders.cu are written anew after the descriptions. Those of the ladders "mma" and "attention"
are the published files themselves: FOLDER holds a checkout of github.com/gau-nernst/learn-cuda (1454f8b), without which
these two are left out. A pair counts as tied where predictions differ by less than 0.5 %, as wrong where they are the
other way round. Published pairs within 1 % are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

import gemmery as gm
from gemmery.errors import GemmeryError
from gemmery_emulator.kernels.prediction import predicted_longer

SOURCE = Path(__file__).with_suffix(".cu")
TIE = 0.005  # of the longer time
SAME = 0.01  # published times that differ by less have no order
N = 4096  # side of the published products, and queries of each of the HEADS
HEADS, WIDE = 8, 128  # of attention, and elements of a head
# By ladder, the length that is summed over, of the shorter of two runs and of the published kernels.
LENGTHS = {"sgemm": (64, N), "gemm": (64, N), "mma": (256, N), "attention": (256, 2 * N)}


@dataclass(frozen=True)
class LadderKernel:
    """A kernel with its launch, and how fast it was."""

    name: str
    instance: str
    published: float  # any unit; more is faster
    grid: tuple[int, ...]
    block: tuple[int, ...]
    count: int = 0  # of reductions and histograms: elements
    file: str = ""  # of the checkout, of a published file
    shared: int = 0  # dynamic shared memory, in bytes


@dataclass(frozen=True)
class PublishedLadder:
    """Kernels in the order of their source, which names the card that they were measured on."""

    name: str
    source: str
    cards: tuple[str, ...]  # predicted for; the first is the nearest to the one in the source
    kernels: tuple[LadderKernel, ...]


def product(name: str, instance: str, published: float, bm: int, bn: int, threads: int) -> LadderKernel:
    """A product of 4096 x 4096 x k by tiles of bm x bn."""
    return LadderKernel(name, instance, published, (N // bn, N // bm), (threads,))


def tiled(name: str, published: float, sides: tuple[int, int, int, int, int], *flags: object) -> LadderKernel:
    """A product by tiles of threads."""
    bm, bn, _, tm, tn = sides
    instance = ", ".join(str(each).lower() for each in (*sides, *flags))
    return product(name, f"product_tiled<{instance}>", published, bm, bn, bm * bn // tm // tn)


def warps(name: str, published: float, sides: tuple[int, ...], *flags: object) -> LadderKernel:
    """A product by tiles of warps."""
    bm, bn, _, wm, wn = sides[:5]
    instance = ", ".join(str(each).lower() for each in (*sides, *flags))
    return product(name, f"product_warps<{instance}>", published, bm, bn, bm // wm * (bn // wn) * 32)


def mma(name: str, published: float, file: str, rest: str, shared: int = 64 << 10) -> LadderKernel:
    """A product in bf16 by tiles of 128 x 128 x 64, of 4 warps."""
    path = f"02b_matmul_sm80/matmul_{file}.cu"
    instance = f"matmul_{file}_kernel<128, 128, 64, 2, 2{rest}>"
    return LadderKernel(name, instance, published, (N // 128 * (N // 128),), (128,), file=path, shared=shared)


def attention(name: str, published: float, version: int, queries: int, keys: int, shared: int) -> LadderKernel:
    """Attention by blocks of so many queries and keys, of 4 warps."""
    path = f"07_attention/attention_v{version}.cu"
    instance = f"attention_v{version}_kernel<{queries}, {keys}, {WIDE}, 4>"
    return LadderKernel(name, instance, published, (HEADS * N // queries,), (128,), file=path, shared=shared)


def moved(name: str, published: float, transposed: bool, pitch: int) -> LadderKernel:
    """A copy or a transpose of 1024 x 1024."""
    return LadderKernel(name, f"moved<{str(transposed).lower()}, {pitch}>", published, (32, 32), (32, 8))


def summed(step: int, milliseconds: float) -> LadderKernel:
    """A sum of 4M elements by blocks of 128 threads.

    The last one has 4 blocks for each multiprocessor: 64 of the published card's 16, 160 of a T4's 40.
    """
    count = 1 << 22
    grid = 160 if step == 7 else count // (128 if step < 4 else 256)
    return LadderKernel(f"reduce {step}", f"summed<{step}, 128>", 1 / milliseconds, (grid,), (128,), count)


SQUARE = (128, 128, 16, 8, 8)
LADDERS = (
    PublishedLadder("sgemm", "siboehm/SGEMM_CUDA, RTX A6000, GFLOP/s", ("a6000", "rtx4090", "a100", "h100"), (
        product("1 naive", "product_plain<false>", 309, 32, 32, 1024),
        product("2 coalesced", "product_plain<true>", 1986.5, 32, 32, 1024),
        tiled("3 shared memory", 2980.3, (32, 32, 32, 1, 1), False, False, 0),
        tiled("4 column a thread", 8474.7, (64, 64, 8, 8, 1), False, False, 0),
        tiled("5 square a thread", 15971.7, (128, 128, 8, 8, 8), False, False, 0),
        tiled("6 float4", 18237.3, (128, 128, 8, 8, 8), True, True, 0),
        tiled("7 banks, apart", 16213.4, (128, 128, 8, 8, 8), True, True, 1),
        tiled("8 banks, padded", 16459.2, (128, 128, 8, 8, 8), True, True, 2),
        tiled("9 tuned", 19721.0, SQUARE, True, True, 0),
        warps("10 tile a warp", 21779.3, (128, 128, 16, 64, 64, 4, 8, 4), True, False),
        warps("11 two buffers", 17278.3, (128, 256, 16, 128, 32, 1, 8, 8), True, True),
    )),
    PublishedLadder("gemm", "leimao/CUDA-GEMM-Optimization, RTX 3090, TFLOP/s", ("rtx3090", "rtx4090", "a100"), (
        product("0 naive", "product_plain<false>", 0.278129, 32, 32, 1024),
        product("1 coalesced", "product_plain<true>", 1.7218, 32, 32, 1024),
        tiled("2 shared memory", 2.66157, (32, 32, 32, 1, 1), False, False, 0),
        tiled("2 float4", 1.90514, (32, 32, 32, 1, 1), True, False, 0),
        tiled("3 column a thread", 8.91318, (64, 64, 8, 8, 1), False, False, 0),
        tiled("3 float4", 4.04796, (64, 64, 8, 8, 1), True, False, 0),
        tiled("4 square a thread", 13.0247, SQUARE, False, False, 0),
        tiled("4 float4", 15.027, SQUARE, True, False, 0),
        tiled("5 A turned", 11.1448, SQUARE, False, True, 0),
        tiled("5 float4", 19.6688, SQUARE, True, True, 0),
        warps("6 tile a warp", 11.0703, (128, 128, 16, 64, 32, 1, 8, 8), False, False),
        warps("6 float4", 20.1649, (128, 128, 16, 64, 32, 1, 8, 8), True, False),
    )),
    PublishedLadder("mma", "gau-nernst/learn-cuda, 02b, A100 of 40 GB, TFLOP/s", ("a100",), (
        mma("1 vector loads", 59.92, "v1", ", 64, false, false", 32 << 10),
        mma("2 cp.async", 64.94, "v1", ", 64, true, false", 32 << 10),
        mma("3 padded", 166.78, "v1", ", 72, true, false", 36 << 10),
        mma("4 swizzled", 190.94, "v1", ", 64, true, true", 32 << 10),
        mma("5 ldmatrix.x4 for B", 160.42, "v5", "", 32 << 10),
        mma("6 two stages", 220.77, "v6", ", 2, 0"),
    )),
    PublishedLadder("attention", "gau-nernst/learn-cuda, 07, RTX 5090 of 400 W, TFLOP/s", ("rtx5090",), (
        attention("1", 142.87, 1, 128, 64, 32 << 10),
        attention("2 swizzled", 181.11, 2, 64, 64, 32 << 10),
        attention("3 two stages", 189.84, 3, 64, 32, 32 << 10),
        attention("4 ldmatrix.x4", 194.33, 4, 64, 32, 32 << 10),
        attention("5 two stages of K alone", 197.74, 5, 64, 64, 48 << 10),
    )),
    PublishedLadder("transpose", "developer.nvidia.com, An Efficient Matrix Transpose in CUDA C/C++, Tesla K20c, GB/s",
                    ("v100", "a100", "h100", "rtx4090"), (
        moved("naive", 55.3, True, 0),
        moved("coalesced", 97.6, True, 32),
        moved("padded", 144.3, True, 33),
        moved("copy", 136.0, False, 0),
        moved("copy through shared memory", 152.3, False, 32),
    )),
    PublishedLadder("reduction", "Harris, Optimizing Parallel Reduction in CUDA, 2007, GeForce 8800 GTX, 1/ms",
                    ("t4", "a100", "h100", "rtx4090"), tuple(
        summed(step, milliseconds)
        for step, milliseconds in enumerate((8.054, 3.456, 1.722, 0.965, 0.536, 0.381, 0.268), 1)
    )),
    PublishedLadder("histogram", "developer.nvidia.com, Fast Histograms Using Shared Atomics on Maxwell, Titan X",
                    ("t4", "a100", "rtx4090"), (
        LadderKernel("global atomics", "counted<false>", 1, (256,), (256,), 1 << 22),
        LadderKernel("shared atomics", "counted<true>", 2, (256,), (256,), 1 << 22),
    )),
    PublishedLadder("stencil", "Micikevicius, 3D Finite Difference Computation on GPUs Using CUDA, 2009",
                    ("t4", "a100", "rtx4090"), (
        LadderKernel("neighbors from global memory", "star<0>", 1, (8, 16, 248), (32, 16), 256),
        LadderKernel("column in registers, plane in shared memory", "star<2>", 2, (8, 16), (32, 16), 256),
    )),
)  # fmt: skip


def arguments(ladder: str, kernel: LadderKernel, k: int) -> list[object]:
    """The arguments of a kernel; zeros, but for the bytes that a histogram counts."""
    if ladder in ("sgemm", "gemm"):
        return [np.zeros(rows * columns, np.float32) for rows, columns in ((N, k), (k, N), (N, N))] + [N, k, 1.0, 0.5]
    if ladder == "mma":
        return [np.zeros(rows * columns, np.uint16) for rows, columns in ((N, k), (N, k), (N, N))] + [N, N, k]
    if ladder == "attention":
        return [np.zeros(HEADS * rows * WIDE, np.uint16) for rows in (N, k, k, N)] + [HEADS, N, k]
    if ladder == "transpose":
        return [np.zeros(1 << 20, np.float32), np.zeros(1 << 20, np.float32), 1024]
    if ladder == "stencil":
        side = kernel.count + 8
        return [np.zeros((side + 64) * side * side, np.float32) for _ in range(2)] + [side]
    if ladder == "histogram":
        values = np.random.default_rng(0).integers(0, 256, kernel.count).astype(np.uint8)
        return [values, np.zeros(256, np.uint32), kernel.count]
    return [np.zeros(kernel.count, np.float32), np.zeros(1 << 16, np.float32), kernel.count]


def predicted(ladder: str, kernel: LadderKernel, cards: Sequence[str], public: Path | None) -> dict[str, float]:
    """The predicted seconds by card; a block alone runs first, of two of LENGTHS, from which the whole follows.

    The times of both would not do: memory takes longest of short products, and hides what multiprocessors take.
    """
    source = public / kernel.file if public and kernel.file else SOURCE
    step, length = LENGTHS.get(ladder, (0, 0))
    runs = []
    for k in (step, 2 * step) if step else (0,):
        one = (1,) * len(kernel.grid)
        given = arguments(ladder, kernel, k)
        run = gm.emulate(source, kernel.instance, one, kernel.block, given, shared=kernel.shared, check=False)
        grid = (*kernel.grid, 1, 1)[:3]
        runs.append(replace(run, launch=replace(run.launch, grid=grid)))
    if not step:
        return {card: runs[0].predict(card).seconds for card in cards}
    size = float(sum(each.nbytes for each in arguments(ladder, kernel, length) if isinstance(each, np.ndarray)))
    return {card: predicted_longer(*runs, card, length / step - 1, size).seconds for card in cards}


def pairs(kernels: Sequence[LadderKernel], seconds: Sequence[float]) -> tuple[int, int, int, list[str]]:
    """The pairs that are right, tied and wrong, and the names of those that are not right."""
    right = tied = wrong = 0
    others = []
    for (one, first), (two, second) in combinations(zip(kernels, seconds, strict=True), 2):
        if abs(one.published - two.published) < SAME * max(one.published, two.published):
            continue
        if abs(first - second) < TIE * max(first, second):
            tied += 1
            others.append(f"tied: {one.name}, {two.name}")
        elif (first < second) == (one.published > two.published):
            right += 1
        else:
            wrong += 1
            ratios = f"{second / first:.2f}, published {one.published / two.published:.2f}"
            others.append(f"wrong: {one.name}, {two.name} ({ratios})")
    return right, tied, wrong, others


def main() -> None:
    """Print a table for each ladder and card, then the counts of the cards nearest to the published ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ladders", nargs="*", choices=[[], *(each.name for each in LADDERS)], default=[])
    parser.add_argument("--all", action="store_true", help="predict for every card of a ladder")
    parser.add_argument("--public", type=Path, help="a checkout of learn-cuda")
    parser.add_argument("--cards", type=lambda text: tuple(text.split(",")), default=())
    options = parser.parse_args()
    total = [0, 0, 0]
    for ladder in LADDERS:
        if options.ladders and ladder.name not in options.ladders:
            continue
        if any(kernel.file for kernel in ladder.kernels) and not options.public:
            sys.stdout.write(f"{ladder.name}: left out, as its files are those of --public\n")
            continue
        cards = options.cards or ladder.cards[: None if options.all else 1]
        sys.stdout.write(f"{ladder.name}: {ladder.source}\n")
        by_kernel = []
        for kernel in ladder.kernels:
            try:
                by_kernel.append(predicted(ladder.name, kernel, cards, options.public))
            except GemmeryError as error:
                raise SystemExit(f"{kernel.name}: {error}") from None
            times = ", ".join(f"{card} {seconds * 1e6:,.2f}" for card, seconds in by_kernel[-1].items())
            sys.stdout.write(f"  {kernel.name:44} {kernel.published:10.3f} published; us: {times}\n")
            sys.stdout.flush()
        for card in cards:
            *counts, others = pairs(ladder.kernels, [each[card] for each in by_kernel])
            sys.stdout.write(f"  {card}: {counts[0]} right, {counts[1]} tied, {counts[2]} wrong\n")
            sys.stdout.write("".join(f"    {other}\n" for other in others))
            if card == cards[0]:
                total = [sum(each) for each in zip(total, counts, strict=True)]
    sys.stdout.write(f"all, each on its first card: {total[0]} right, {total[1]} tied, {total[2]} wrong\n")


if __name__ == "__main__":
    main()
