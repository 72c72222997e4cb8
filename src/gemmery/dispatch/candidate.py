"""A rung that might run a problem."""

from __future__ import annotations

from gemmery.ladder.rung import Rung
from gemmery.problem import Config
from gemmery.tuples import NamedTuple


class Candidate(NamedTuple):
    """A rung with a config, and the reason for it."""

    rung: Rung
    config: Config
    reason: str
