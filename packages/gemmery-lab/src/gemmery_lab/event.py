"""The progress of a running command, and the records that it has so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gemmery_lab.measure.record import Measurement, Run

R = TypeVar("R")


@dataclass(frozen=True)
class RunEvent:
    """One step of a command.

    `what` names the step ("packed, 1024x1024x1024 f32"). When a step has ended, `measurement` is its result and
    `run` all results so far. `done` of `total` steps have ended, including this one.
    """

    what: str
    done: int
    total: int
    measurement: Measurement | None = None
    run: Run | None = None


OnEvent = Callable[[RunEvent], None]
OnStep = Callable[[str, int, int, R | None], None]  # what runs, finished and all steps, the record of a finished one


def ignore(_: RunEvent) -> None:
    """A listener that ignores progress."""


class RunSteps(Generic[R]):
    """The records of a run so far, of which `on_step` hears."""

    def __init__(self, total: int, on_step: OnStep[R]) -> None:
        self._what, self._done, self._total, self._on_step = "", 0, total, on_step
        self.records: list[R] = []

    def begin(self, what: str) -> None:
        """Tell the listener what begins."""
        self._what = what
        self._on_step(what, self._done, self._total, None)

    def end(self, *records: R) -> None:
        """End a step and record its results."""
        self._done += 1
        self.add(*records)

    def add(self, *records: R) -> None:
        """Record results, and tell the listener of each."""
        self.records += records
        for record in records:
            self._on_step(self._what, self._done, self._total, record)
