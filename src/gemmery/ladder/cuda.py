"""The GPU ladder: CUDA cores, tensor cores, and a matrix times a vector."""

from __future__ import annotations

from gemmery.ladder.rung import Rung
from gemmery.ladder.simt import SIMT

CUDA: tuple[Rung, ...] = (*SIMT,)
