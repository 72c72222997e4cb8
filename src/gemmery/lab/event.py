"""The progress of a running command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gemmery.bench.record import Measurement, Run


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


def ignore(_: RunEvent) -> None:
    """A listener that ignores progress."""


T = TypeVar("T")


def followed(
    steps: Sequence[tuple[str, Callable[[], T]]], on_step: Callable[[str, int, int, T | None], None]
) -> tuple[T, ...]:
    """Take the steps, each with its name, and return their results.

    `on_step` receives what runs, the numbers of finished and of all steps, and the result of the last one.
    """
    results: list[T] = []
    for done, (what, run) in enumerate(steps):
        on_step(what, done, len(steps), None)
        results.append(run())
        on_step(what, done + 1, len(steps), results[-1])
    return tuple(results)
