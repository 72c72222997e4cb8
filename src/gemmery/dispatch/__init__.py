"""The choice of the rung that runs a problem."""

from __future__ import annotations

from functools import lru_cache

from gemmery.dispatch import cpu
from gemmery.dispatch.candidate import Candidate
from gemmery.errors import RefusedError
from gemmery.ladder.rung import Config, Kernel, Rung
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple


class Plan(NamedTuple):
    """The rung chosen for a problem, built and ready to call."""

    rung: Rung
    config: Config
    kernel: Kernel
    reason: str


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """Return the rung that runs this problem, built.

    Raises the errors of `choice`, and DeviceError or CompileError where the kernel cannot be built.
    """
    rung, config, reason = choice(problem)
    return Plan(rung, config, rung.build(problem, config), reason)


@lru_cache(maxsize=1024)
def specialised(problem: Problem) -> Plan | None:
    """Return the plan with a kernel compiled for this problem's shape, where it is faster than that of `plan`."""
    candidate = cpu.specialised(problem) if problem.device == "cpu" else None
    if candidate is None:
        return None
    rung, config, reason = candidate
    return Plan(rung, config, rung.build(problem, config), reason)


def choice(problem: Problem) -> Candidate:
    """Return the best rung that does not refuse this problem.

    Nothing is compiled, so the CUDA device need not be present:

    >>> choice(Problem(4096, 4096, 4096, "f64", "f64", device="a100")).rung.name
    'mma_f64'

    Raises RefusedError with the reason of each rung where all refuse.
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
    raise RefusedError(f"no rung supports {problem}: {'; '.join(refusals)}")
