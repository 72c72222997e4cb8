"""The tree of rungs: each under its parent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gemmery.ladder.rung import Rung


class Branch(NamedTuple):
    """A rung and the branches below it."""

    rung: Rung
    below: tuple[Branch, ...]


def tree(rungs: Sequence[Rung]) -> tuple[Branch, ...]:
    """Return the rungs as a tree, in their order; a rung whose parent is missing is at the top."""
    names = {rung.name for rung in rungs}
    children: dict[str, list[Rung]] = {}
    for rung in rungs:
        children.setdefault(rung.parent if rung.parent and rung.parent in names else "", []).append(rung)

    def under(name: str) -> tuple[Branch, ...]:
        return tuple(Branch(rung, under(rung.name)) for rung in children.get(name, ()))

    return under("")


def walk(branches: Sequence[Branch], depth: int = 0) -> Iterator[tuple[int, Rung]]:
    """Yield each rung after its parent, with its depth in the tree."""
    for branch in branches:
        yield depth, branch.rung
        yield from walk(branch.below, depth + 1)
