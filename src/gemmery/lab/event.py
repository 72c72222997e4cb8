"""The progress of a running command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemmery.bench.record import Measurement, Run


@dataclass(frozen=True)
class Event:
    """One step of a command.

    `what` names the step ("packed, 1024x1024x1024 f32"). When a step has ended, `measurement` is its result and
    `run` all results so far. `done` of `total` steps have ended, including this one.
    """

    what: str
    done: int
    total: int
    measurement: Measurement | None = None
    run: Run | None = None


OnEvent = Callable[[Event], None]


def ignore(_: Event) -> None:
    """A listener that ignores progress."""
