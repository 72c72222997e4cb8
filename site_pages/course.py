"""The course: rungs in the order of the ladders, in parts that each begin with a rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung

RUNGS: tuple[Rung, ...] = (*CPU, *CUDA)
BEGINNINGS = {  # part -> its first rung; its introduction is text/LANGUAGE/parts/PART.md
    "memory-order": "scalar_naive",
    "registers-and-packing": "simd_tile",
    "special-shapes": "gemv",
    "gpu-memory": "simt_single_block",
    "shared-tiles": "simt_smem",
    "register-tiles": "simt_threadtile",
    "bank-conflicts": "simt_padded",
    "pipelines": "simt_warptile",
    "tensor-cores": "wmma_f64",
    "hopper": "wgmma_tma",
    "every-shape": "mma_general",
    "gpu-vectors": "gemv_thread",
}


@dataclass(frozen=True)
class Part:
    """A part of the course, with its rungs in the order of the ladder."""

    name: str  # of its folder
    rungs: tuple[Rung, ...]

    @property
    def on_gpu(self) -> bool:
        """True for rungs that run on a GPU."""
        return self.rungs[0].geometry is not None


def course(rungs: Sequence[Rung] = RUNGS) -> tuple[Part, ...]:
    """Return the parts; each has the rungs from its first one to the next part's.

    A rung that is added to a ladder belongs to the part of the rung before it.
    """
    places = [[rung.name for rung in rungs].index(first) for first in BEGINNINGS.values()]
    ends = [*places[1:], len(rungs)]
    return tuple(Part(name, tuple(rungs[begin:end])) for name, begin, end in zip(BEGINNINGS, places, ends, strict=True))
