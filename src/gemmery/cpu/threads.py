"""The number of threads that a product may use."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from gemmery import config
from gemmery.cpu.layout import WORKERS
from gemmery.cpu.target import cores
from gemmery.errors import ArgumentError, brief

_override: int | None = None
generation = 0  # incremented by `set_`: a product keeps its plan only if this has not changed meanwhile
at_change: list[Callable[[], None]] = []  # called when the number changes, to drop plans made for the old one


def get() -> int:
    """Return the current number: set by `set_`, else GEMMERY_NUM_THREADS, else the cores this process may use."""
    return _override or _allowed()


@cache
def _allowed() -> int:
    """Return the default, read once: reading affinity mask and cgroup takes 10 us, a small product 1 us."""
    number, most = config.num_threads() or cores(), _most()
    if number > most:
        raise ArgumentError(
            f"GEMMERY_NUM_THREADS={brief(number)}: it must be at most {most}; unset it to use every core"
        )
    return number


@cache
def _most() -> int:
    """Return the largest number of threads that a caller may ask for, read once: it takes 8 us."""
    return max(WORKERS + 1, cores())


def checked(count: Any) -> int:
    """Return a number of threads that a caller passed as an int; raise ArgumentError for anything else."""
    try:
        number = None if isinstance(count, bool) else operator.index(count)
    except Exception:  # TypeError, or what an object's own __index__ raises
        number = None
    most = _most()
    if number is None or not 1 <= number <= most:
        raise ArgumentError(
            f"threads={brief(count)} must be an integer from 1 to {most}, or None for every core allowed"
        )
    return number


def set_(count: Any) -> None:
    """Use `count` threads from now on; None restores the default. Raises ArgumentError below 1."""
    global _override, generation
    _override = None if count is None else checked(count)
    generation += 1
    for forget in at_change:
        forget()
