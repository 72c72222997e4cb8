"""The rungs on tensor cores by mma.sync and ldmatrix, in half precision and tf32."""

from __future__ import annotations

from gemmery.cuda import mma
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

_SUMMED_IN_F32 = ("f16", "bf16", "f32")


def _takes(problem: Problem) -> str:
    if problem.dtype == "f32" and problem.precision != "tf32":
        return "tensor cores round f32 to 10 bits of fraction: allow it with precision='tf32'"
    if problem.out not in _SUMMED_IN_F32:
        return f"sums are f32: it writes {', '.join(_SUMMED_IN_F32)}, not {problem.out}"
    return ""


_SPACE = {"bm": (64, 128, 256), "bn": (64, 128, 256), "bk": (32, 64), "wm": (32, 64), "wn": (32, 64)}

MMA = (
    Rung(
        name="mma_ldmatrix",
        idea="mma.sync and ldmatrix on tiles whose 16-byte chunks are swizzled by XOR",
        parent="wmma_f16",
        dtypes=("f16", "bf16", "f32"),
        refuses=_takes,
        build=builder(mma.ldmatrix),
        geometry=mma.ldmatrix,
        space=_SPACE,
        default={"bm": 128, "bn": 128, "bk": 64, "wm": 64, "wn": 64},
        expect={"bank_conflicts": 0},
        source="cuda/kernels/mma_ldmatrix.cu",
    ),
    Rung(
        name="mma_pipelined",
        idea="a ring of tiles filled by cp.async, and fragments read one group of k ahead",
        parent="mma_ldmatrix",
        dtypes=("f16", "bf16", "f32"),
        refuses=_takes,
        build=builder(mma.pipelined),
        geometry=mma.pipelined,
        space={**_SPACE, "stages": (2, 3, 4, 5)},
        default={"bm": 128, "bn": 256, "bk": 64, "wm": 64, "wn": 64, "stages": 4},
        expect={"bank_conflicts": 0},
        source="cuda/kernels/mma_pipelined.cu",
    ),
)
