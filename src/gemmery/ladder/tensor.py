"""The rungs on tensor cores by wmma, and by mma in float64."""

from __future__ import annotations

from gemmery.ladder.rung import Rung

TENSOR: tuple[Rung, ...] = ()
