"""Which rung runs a problem, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmery.errors import RefusedError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Config, Kernel, Rung, find
from gemmery.problem import Problem


@dataclass(frozen=True)
class Plan:
    """A rung chosen for a problem, built and ready to call."""

    rung: Rung
    config: Config
    kernel: Kernel
    reason: str


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """The rung that runs this problem.

    Raises RefusedError, with the rung's reason, for a problem that no rung takes.
    """
    rung = find(CPU, "packed")
    refusal = rung.refuses(problem)
    if refusal:
        raise RefusedError(f"{rung.name} refuses {problem}: {refusal}")
    config = rung.default
    return Plan(rung, config, rung.build(problem, config), "packed panels read in order reach the FMA peak")
