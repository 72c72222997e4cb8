"""The rungs on CUDA cores that keep tiles in registers."""

from __future__ import annotations

from gemmery.ladder.rung import Rung

TILED: tuple[Rung, ...] = ()
