"""Calls of every kind on small arrays, next to the same in the library that the arrays are of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gemmery
from gemmery.bench import expressions as kinds
from gemmery.bench import libraries
from gemmery.bench.record import Measurement
from gemmery.bench.rival_process import RivalProcess
from gemmery.bench.work import Work
from gemmery.errors import RefusedError
from gemmery.lab import measurements
from gemmery.lab.backend import Runnable
from gemmery.lab.contest import Task, contest
from gemmery.lab.on_cpu import CpuStage, in_force, on
from gemmery.lab.session import Session
from gemmery.problem import Config


class CallStage(CpuStage):
    """The arrays of one kind of call."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def product(self, config: Config, threads: int) -> Runnable:
        """Take gemmery's expression of the call; the note has both."""
        convert = _convert(self.work)

        def error() -> float:
            with in_force(threads):
                return min(kinds.error(self.work, _result(self.work, convert)), measurements.WRONG)

        sample = kinds.sample(self.work, "ours", {"gm": gemmery}, convert)
        note = f"{kinds.text(self.work, 'ours')} against {kinds.text(self.work, self.work.arrays)}"
        return Runnable(lambda: on(threads, sample), error, note)

    def rival(self, opponent: RivalProcess) -> Runnable:
        """Take the library's expression."""
        opponent.prepare(self.work)
        return Runnable(lambda: opponent.sample, note=opponent.runs)


def calls(session: Session, task: Task) -> list[Measurement]:
    """Check one kind of call, time it in turn with the library that its arrays are of, and return the records."""
    library = [rival for rival in task.rivals if rival.name == task.work.arrays]
    return contest(session, replace(task, rivals=library), CallStage(task.work), limits=False)


def _convert(work: Work) -> kinds.Convert:
    """Return what makes an operand of NumPy's array. Raises RefusedError where the library is not installed."""
    if work.arrays == "numpy":
        return lambda array: array
    missing = libraries.find(work.arrays).missing()
    if missing:
        raise RefusedError(missing)
    return libraries.as_tensor


def _result(work: Work, convert: kinds.Convert) -> Any:
    """Return the result of one call as an array of NumPy."""
    arrays = {name: convert(array) for name, array in kinds.operands(work, "ours").items()}
    result = kinds.result(work, "ours", {"gm": gemmery, **arrays})
    return result if work.arrays == "numpy" else result.float().numpy()
