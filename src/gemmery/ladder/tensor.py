"""The rungs on tensor cores by wmma, and by mma in float64."""

from __future__ import annotations

from gemmery.cuda import tensor
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

_SUMMED_IN_F32 = ("f16", "bf16", "f32")
_SPACE = {
    "bm": (32, 64, 128, 256),
    "bn": (32, 64, 128, 256),
    "bk": (16, 32, 64),
    "wm": (16, 32, 64),
    "wn": (16, 32, 64),
    "blocks": (1, 2, 3, 4),
}
_RING = {key: (0, *values) for key, values in {**_SPACE, "stages": (2, 3, 4, 5)}.items()}  # 0: chosen by the rung

_WIDE = {
    "divergent_branches": 0,
    "local_requests": 0,
    "load_sectors_a_request": 16,
    "load_bytes_a_sector": 32,
    "store_sectors_a_request": 16,
    "store_bytes_a_sector": 32,
}


def _doubles(problem: Problem) -> str:
    """Refuse nothing."""
    return ""


def _halves(problem: Problem) -> str:
    if problem.dtype == "f32" and problem.precision != "tf32":
        return "tensor cores round f32 to 10 bits of fraction: allow it with precision='tf32' (commands: --dtype tf32)"
    if problem.out not in _SUMMED_IN_F32:
        return f"it sums in f32 and writes {', '.join(_SUMMED_IN_F32)}, not {problem.out}"
    return ""


def cut_off(k: int) -> float:
    """Return f(k) for tensor cores, which align 4 products and a sum to the largest of them and truncate each.

    A truncation is worth two roundings, and there are 5 for every 4 products (Fasi, Higham, Mikaitis and Pranesh 2021).
    """
    return 2.5 * k + 2


TENSOR: tuple[Rung, ...] = (
    Rung(
        name="wmma_f64",
        idea="a warp multiplies fragments of 8 x 4 and 4 x 8 in one instruction",
        parent="simt_smem",
        dtypes=("f64",),
        refuses=_doubles,
        build=builder(tensor.wmma_f64),
        geometry=tensor.wmma_f64,
        space=_SPACE,
        default={"bm": 128, "bn": 128, "bk": 16, "wm": 64, "wn": 32, "blocks": 1},
        expect=_WIDE,
        lesson=(
            "One warp instruction does the work of eight multiply-adds per thread, on fragments distributed over the "
            "lanes. The limit moves: shared memory and tile loads must keep up, so a warp computes a tile of 64 x 32. "
            "This instruction runs at half the rate that Hopper's tensor cores reach in float64."
        ),
        source="cuda/kernels/wmma_f64.cu",
    ),
    Rung(
        name="wmma_f16",
        idea="fragments of 16 x 16 x 16 in half precision, with sums in f32",
        parent="wmma_f64",
        dtypes=("f16", "bf16", "f32"),
        refuses=_halves,
        build=builder(tensor.wmma_f16),
        bound=cut_off,
        geometry=tensor.wmma_f16,
        space={**_SPACE, "bk": (0, 16, 32, 64)},
        default={"bm": 128, "bn": 128, "bk": 0, "wm": 64, "wn": 32, "blocks": 2},  # bk 0: 64 bytes
        expect=_WIDE,
        lesson=(
            "The same program with another element type is four to eight times as fast: the easy way to use tensor "
            "cores. It reaches a third of the vendor's speed: arithmetic no longer hides the wait for tiles, and the "
            "compiler chooses the layout of fragments, so they cannot be loaded in a better way."
        ),
        source="cuda/kernels/wmma_f16.cu",
    ),
    Rung(
        name="mma_f64",
        idea="mma.sync in f64 from a swizzled ring of tiles, 16 x 8 x 4 per instruction where available",
        parent="wmma_f64",
        dtypes=("f64",),
        refuses=_doubles,
        build=builder(tensor.mma_f64),
        geometry=tensor.mma_f64,
        space=_RING,
        default=dict.fromkeys(_RING, 0),  # chosen by the number of tiles
        expect={**_WIDE, "bank_conflicts": 0},
        lesson=(
            "mma.sync defines which lane holds which element, so the tile can be laid out for it: no bank conflicts, "
            "and no registers needed to store tiles. A ring of tiles hides the latency of memory, and reading "
            "fragments one step ahead hides that of shared memory. Which instruction shape reaches the peak depends on "
            "the architecture: measure it first."
        ),
        source="cuda/kernels/mma_f64.cu",
    ),
)
