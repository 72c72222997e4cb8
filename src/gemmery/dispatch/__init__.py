"""Which rung runs a problem, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gemmery.dispatch import cpu
from gemmery.dispatch.candidate import Candidate
from gemmery.errors import RefusedError
from gemmery.ladder.rung import Config, Kernel, Rung
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
    """The rung that runs this problem, built.

    Raises what `choice` raises, and DeviceError or CompileError where a kernel cannot be made.
    """
    rung, config, reason = choice(problem)
    return Plan(rung, config, rung.build(problem, config), reason)


def choice(problem: Problem) -> Candidate:
    """The first rung that takes this problem of those that suit it, best first.

    Nothing is compiled, so a CUDA device may be one that is only named:

    >>> choice(Problem(4096, 4096, 4096, "f64", "f64", device="a100")).rung.name
    'mma_f64'

    Raises RefusedError, with each rung's reason, for a problem that no rung takes.
    """
    if problem.device == "cpu":
        candidates, refuses = cpu.candidates(problem), cpu.refusal
    else:
        from gemmery.dispatch import cuda

        candidates, refuses = cuda.candidates(problem), cuda.refusal
    refusals = []
    for candidate in candidates:
        refusal = refuses(problem, candidate)
        if not refusal:
            return candidate
        refusals.append(f"{candidate.rung.name}: {refusal}")
    raise RefusedError(f"no rung takes {problem}: {'; '.join(refusals)}")
