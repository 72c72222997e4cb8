"""The rungs on tensor cores by mma.sync and ldmatrix, in half precision and tf32."""

from __future__ import annotations

from gemmery.ladder.rung import Rung

MMA: tuple[Rung, ...] = ()
