"""What a running command tells whoever shows its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gemmery.bench.record import Measurement


@dataclass(frozen=True)
class Event:
    """One step of a command.

    `what` says what begins ("packed, 1024x1024x1024 f32"); `measurement` is set when a step has ended, and
    then holds its result. `done` of `total` steps are behind, this one included when it has ended.
    """

    what: str
    done: int
    total: int
    measurement: Measurement | None = None


OnEvent = Callable[[Event], None]


def ignore(_: Event) -> None:
    """The listener of a caller who wants the records alone."""
