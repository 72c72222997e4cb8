"""How many threads a product may use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from gemmery import config
from gemmery.cpu.target import cores
from gemmery.errors import ArgumentError

_chosen: int | None = None
at_change: list[Callable[[], None]] = []  # called when the number changes: what was prepared for the old one is stale


def get() -> int:
    """Threads in force: what set_ was given, else GEMMERY_NUM_THREADS, else the cores this process may use."""
    return _chosen or _allowed()


@cache
def _allowed() -> int:
    """Read once: reading the affinity mask and the cgroup takes 10 us, a small product 1 us."""
    return config.num_threads() or cores()


def set_(count: Any) -> None:
    """Use `count` threads from now on; None goes back to the default. Raises ArgumentError below 1."""
    global _chosen
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ArgumentError(f"{count!r} threads: it must be a whole number >= 1, or None for every core allowed")
    _chosen = count
    for forget in at_change:
        forget()
