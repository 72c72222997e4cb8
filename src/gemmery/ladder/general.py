"""The rungs whose images serve every product of their element types."""

from __future__ import annotations

from gemmery.cuda import general
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.ladder.tensor import cut_off
from gemmery.problem import Problem

_SUMMED_IN_F32 = ("f16", "bf16", "f32")


def _halves(problem: Problem) -> str:
    if problem.out not in _SUMMED_IN_F32:
        return f"it sums in f32 and writes {', '.join(_SUMMED_IN_F32)}, not {problem.out}"
    return ""


def _alike(problem: Problem) -> str:
    return "" if problem.out == problem.dtype else f"it does not widen {problem.dtype} to {problem.out}"


GENERAL: tuple[Rung, ...] = (
    Rung(
        name="mma_general",
        idea="one image for all shapes and layouts: a block reads them before its loop",
        parent="mma_pipelined",
        dtypes=general.HALVES,
        refuses=_halves,
        bound=cut_off,
        build=builder(general.mma),
        geometry=general.mma,
        space={"tile": (0, *general.MMA)},
        default={"tile": 0},  # chosen by the number of tiles
        expect={"divergent_branches": 0, "local_requests": 0},
        lesson=(
            "The parent is compiled for each combination of layouts, alignments and tiles: 28 instances for 150 random "
            "shapes, 0.2 s each. Most of what they fix is uniform for a whole block and costs little as a value: a "
            "predicate per ldmatrix, a size per cp.async. One image is there for every shape, and the specialised one "
            "can be compiled while it already works."
        ),
        source="cuda/kernels/mma_general.cu",
    ),
    Rung(
        name="simt_general",
        idea="one image for all shapes and layouts: single elements by cp.async, wherever they are",
        parent="simt_pipelined",
        dtypes=general.SINGLES,
        refuses=_alike,
        build=builder(general.simt),
        geometry=general.simt,
        space={"tile": (0, *general.SIMT)},
        default={"tile": 0},
        expect={"divergent_branches": 0, "local_requests": 0},
        lesson=(
            "cp.async copies as little as four bytes, so a tile can be transposed on its way into shared memory and no "
            "layout needs code of its own. It takes more instructions than copies of 16 bytes, but few next to the "
            "multiply-adds of a tile."
        ),
        source="cuda/kernels/simt_general.cu",
    ),
)
