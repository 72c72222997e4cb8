"""The rungs on tensor cores by mma.sync and ldmatrix, in half precision and tf32."""

from __future__ import annotations

from gemmery.cuda import mma
from gemmery.cuda.launch import builder
from gemmery.ladder.rung import Rung
from gemmery.ladder.tensor import cut_off
from gemmery.problem import Problem

_SUMMED_IN_F32 = ("f16", "bf16", "f32")

_WIDE = {
    "bank_conflicts": 0,
    "divergent_branches": 0,
    "local_requests": 0,
    "load_sectors_a_request": 16,
    "load_bytes_a_sector": 32,
}


def _takes(problem: Problem) -> str:
    if problem.dtype == "f32" and problem.precision != "tf32":
        return "tensor cores round f32 to 10 bits of fraction: allow it with precision='tf32' (commands: --dtype tf32)"
    if problem.out not in _SUMMED_IN_F32:
        return f"it sums in f32 and writes {', '.join(_SUMMED_IN_F32)}, not {problem.out}"
    return ""


_TILES = {"bm": (64, 128, 256), "bn": (32, 64, 128, 256), "bk": (32, 64), "wm": (32, 64), "wn": (16, 32, 64)}

MMA = (
    Rung(
        name="mma_ldmatrix",
        idea="mma.sync and ldmatrix on tiles whose 16-byte chunks are swizzled by XOR",
        parent="wmma_f16",
        dtypes=("f16", "bf16", "f32"),
        refuses=_takes,
        bound=cut_off,
        build=builder(mma.ldmatrix),
        geometry=mma.ldmatrix,
        space=_TILES,
        default={"bm": 128, "bn": 128, "bk": 64, "wm": 64, "wn": 64},
        expect={**_WIDE, "store_sectors_a_request": 16, "store_bytes_a_sector": 32},
        lesson=(
            "ldmatrix gives a warp four 8 x 8 matrices, each from eight rows of 16 bytes at addresses the warp "
            "chooses. Rows 128 bytes apart would use the same banks eight times over; storing chunk c of row r at c ^ "
            "r % 8 spreads them, and the stores into the tile are free of conflicts too. But loading a tile, waiting "
            "for it and multiplying it still happen one after the other."
        ),
        source="cuda/kernels/mma_ldmatrix.cu",
    ),
    Rung(
        name="mma_pipelined",
        idea="a ring of tiles filled by cp.async, and fragments read one group of k ahead",
        parent="mma_ldmatrix",
        dtypes=("f16", "bf16", "f32"),
        refuses=_takes,
        bound=cut_off,
        build=builder(mma.pipelined),
        geometry=mma.pipelined,
        settled=mma.chosen,
        space={
            **{key: (0, *values) for key, values in _TILES.items()},
            "stages": (0, 2, 3, 4, 5, 6),
            "splits": (0, 1, 2, 4),
        },
        default=dict.fromkeys(mma.KEYS, 0),  # chosen by the problem's size
        expect=_WIDE,
        lesson=(
            "Three copies are in flight while a fourth tile is multiplied, and the fragments of the next 32 bytes of k "
            "are read while the current ones are used, so the tensor cores rarely wait. The remaining limit is the "
            "rate of mma.sync, about two thirds of wgmma's on Hopper. Operands whose rows are not aligned to 16 bytes "
            "are packed first: one pass over them costs little next to the product."
        ),
        source="cuda/kernels/mma_pipelined.cu",
    ),
)
