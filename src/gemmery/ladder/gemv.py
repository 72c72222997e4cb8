"""The rungs for a matrix times a vector."""

from __future__ import annotations

from gemmery.ladder.rung import Rung

GEMV: tuple[Rung, ...] = ()
