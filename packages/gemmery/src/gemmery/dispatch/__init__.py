"""The choice of the rung that runs a problem."""

from __future__ import annotations

from functools import lru_cache

from gemmery import config
from gemmery.dispatch import cpu
from gemmery.dispatch.cpu import Candidate
from gemmery.errors import RefusedError
from gemmery.ladder.rung import Kernel, Rung
from gemmery.problem import Config, Problem
from gemmery.tuples import NamedTuple


class Plan(NamedTuple):
    """The rung chosen for a problem, built and ready to call."""

    rung: Rung
    config: Config
    kernel: Kernel
    reason: str


@lru_cache(maxsize=4096)
def plan(problem: Problem) -> Plan:
    """Return the rung that runs this problem, built: on the CPU with a kernel for every shape.

    With GEMMERY_TIERS=off it is the one of `specialized`, if there is one.

    Raises the errors of `choice`, and DeviceError or CompileError where the kernel cannot be built.
    """
    special = None if config.tiers() else specialized(problem)
    return special or _built(problem, choice(problem))


@lru_cache(maxsize=1024)
def specialized(problem: Problem) -> Plan | None:
    """Return the plan with a kernel compiled for this problem, where it is faster than that of `plan`; else None.

    Its bits are those of `plan`'s kernel, except in a batch of products with a vector, which `gemv` sums in another
    order, and of bfloat16, of which `packed` adds pairs on some CPUs.
    """
    candidate = cpu.specialized(problem) if problem.device == "cpu" else None
    return candidate and _built(problem, candidate)


def _built(problem: Problem, candidate: Candidate) -> Plan:
    rung, settings, reason = candidate
    return Plan(rung, settings, rung.build(problem, settings), reason)


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
