"""The rungs on tensor cores by wmma, and by mma in float64."""

from __future__ import annotations

from gemmery.cuda import tensor
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem


def _takes(problem: Problem) -> str:
    """Every problem of these element types is served."""
    return ""


_TILE = {"bm": (32, 64, 128, 256), "bn": (32, 64, 128, 256), "bk": (16, 32), "wm": (16, 32, 64), "wn": (16, 32, 64)}

TENSOR: tuple[Rung, ...] = (
    Rung(
        name="mma_f64",
        idea="mma.sync in double from a swizzled ring of tiles, 16 x 8 x 8 where there is such",
        parent="wmma_f64",
        dtypes=("f64",),
        refuses=_takes,
        build=builder(tensor.mma_f64),
        geometry=tensor.mma_f64,
        space={**_TILE, "stages": (2, 3, 4, 5), "blocks": (1, 2, 3, 4)},
        default={"bm": 128, "bn": 128, "bk": 16, "wm": 64, "wn": 32, "stages": 4, "blocks": 1},
        expect={"bank_conflicts": 0},
        lesson="",
        source="cuda/kernels/mma_f64.cu",
    ),
)
