"""A rival: what is known of a library before it runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gemmery.errors import ArgumentError


@dataclass(frozen=True)
class Rival:
    """A library to compare with: its name, why it cannot run here, and what it is."""

    name: str
    missing: Callable[[], str]  # "" or why it cannot run here
    runs: Callable[[], str]  # library, version and kernels


R = TypeVar("R", bound=Rival)


def by_name(rivals: Sequence[R], name: str, where: str = "") -> R:
    """Return the rival called `name`. Raises ArgumentError for an unknown one; `where` is " on a GPU"."""
    for rival in rivals:
        if rival.name == name:
            return rival
    known = ", ".join(rival.name for rival in rivals)
    raise ArgumentError(f"rival {name!r} is not known{where}; known: {known}")


def not_found(package: str) -> str:
    """Return "" for a package that is installed, else why there is no rival."""
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"
