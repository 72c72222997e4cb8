"""Which rank holds which part of a matrix, and what ranks must send each other for another distribution.

Pure functions of shapes and placements: every rank computes the same answer, so no rank has to ask another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from numbers import Integral
from typing import Any, NamedTuple

from gemmery.errors import ArgumentError, ShapeError, brief


@dataclass(frozen=True)
class Shard:
    """The ranks along this dimension of the mesh hold parts of the matrix: of its rows (0) or columns (1)."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Each rank along this dimension of the mesh holds a copy."""


@dataclass(frozen=True)
class Partial:
    """The matrix is the sum of what the ranks along this dimension of the mesh hold."""


Placement = Shard | Replicate | Partial


class Part(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return self.bottom - self.top, self.right - self.left

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def meet(self, other: Part) -> Part:
        """Return the part that both have, which may be empty."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        return Part(top, max(top, min(self.bottom, other.bottom)), left, max(left, min(self.right, other.right)))


@dataclass(frozen=True)
class Distribution:
    """How a matrix lies on the ranks of a mesh: a placement for each dimension of it, and each rank's part."""

    shape: tuple[int, int]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    boxes: tuple[Part, ...]  # by rank; the last dimension of the mesh varies first

    @cached_property
    def partial(self) -> bool:
        """Whether ranks hold summands."""
        return any(isinstance(placement, Partial) for placement in self.placements)


def coordinates(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's place in the mesh.

    >>> coordinates(5, (2, 4))
    (1, 1)
    """
    place = []
    for size in reversed(mesh):
        rank, last = divmod(rank, size)
        place.append(last)
    return tuple(reversed(place))


def rank_at(place: Sequence[int], mesh: Sequence[int]) -> int:
    """Return the rank at a place of the mesh."""
    rank = 0
    for coordinate, size in zip(place, mesh, strict=True):
        rank = rank * size + coordinate
    return rank


def even(shape: tuple[int, int], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> Distribution:
    """Return the layout that DTensor gives: parts of ceil(length / ranks), of which the last are shorter or empty.

    >>> [box[:2] for box in even((5, 2), (4,), (Shard(0),)).boxes]
    [(0, 2), (2, 4), (4, 5), (5, 5)]

    Raises ArgumentError unless there is a placement for each dimension of the mesh, ShapeError for what is no matrix.
    """
    arguments: dict[str, Any] = {"shape": shape, "mesh": mesh}
    for name, sides in arguments.items():
        whole = isinstance(sides, list | tuple) and all(isinstance(side, Integral) for side in sides)
        if not whole or min(sides, default=0) < 0:
            raise ArgumentError(f"{name}={brief(sides)}: pass a tuple of whole numbers")
    if not isinstance(placements, list | tuple):
        raise ArgumentError(f"placements={brief(placements)}: pass a tuple, such as (gd.Shard(0),)")
    check_placements(tuple(mesh), tuple(placements))
    if len(shape) != 2:
        raise ShapeError(f"shape {tuple(shape)}: a matrix has two dimensions; reshape it")
    return _even((shape[0], shape[1]), tuple(mesh), tuple(placements))


@lru_cache(maxsize=4096)
def _even(shape: tuple[int, int], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> Distribution:
    boxes = []
    for rank in range(math.prod(mesh)):
        ends = [[0, shape[0]], [0, shape[1]]]
        for coordinate, size, placement in zip(coordinates(rank, mesh), mesh, placements, strict=True):
            if isinstance(placement, Shard):
                start, stop = ends[placement.dim]
                step = -(-(stop - start) // size)
                ends[placement.dim] = [min(start + coordinate * step, stop), min(start + (coordinate + 1) * step, stop)]
        boxes.append(Part(*ends[0], *ends[1]))
    return Distribution(shape, mesh, placements, tuple(boxes))


def check_placements(mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    """Raise ArgumentError unless there is a known placement for each dimension of the mesh."""
    if len(placements) != len(mesh):
        raise ArgumentError(
            f"{len(placements)} placements for a mesh of {len(mesh)} dimensions: give one for each dimension"
        )
    if any(size < 1 for size in mesh):
        raise ArgumentError(f"mesh {mesh}: each dimension has at least one rank")
    for placement in placements:
        if not isinstance(placement, Placement):
            raise ArgumentError(
                f"placement {placement!r}: it is gd.Shard(0), gd.Shard(1), gd.Replicate() or gd.Partial()"
            )
        if isinstance(placement, Shard) and placement.dim not in (0, 1):
            raise ArgumentError(f"{placement}: a matrix has dimensions 0 (rows) and 1 (columns)")


def of_parts(
    shapes: Sequence[tuple[int, int]], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Distribution:
    """Return the layout of a matrix from the shape of each rank's part, of any sizes.

    Raises ShapeError if the parts do not fit together.
    """
    check_placements(mesh, placements)
    cut: tuple[list[int], list[int]] = ([], [])
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            cut[placement.dim].append(dim)
    boxes, wholes = [], set()
    for rank in range(math.prod(mesh)):
        place, ends, whole = coordinates(rank, mesh), [], []
        for axis, dims in enumerate(cut):
            start = total = 0
            for other in product(*(range(mesh[dim]) for dim in dims)):
                there = list(place)
                for dim, coordinate in zip(dims, other, strict=True):
                    there[dim] = coordinate
                length = shapes[rank_at(there, mesh)][axis]
                start += length if other < tuple(place[dim] for dim in dims) else 0
                total += length
            ends += [start, start + shapes[rank][axis]]
            whole.append(total)
        boxes.append(Part(*ends))
        wholes.add((whole[0], whole[1]))
    if len(wholes) != 1:
        raise ShapeError(
            f"the ranks' parts {list(shapes)} with placements {words(placements)} make no one matrix, but "
            f"{sorted(wholes)}: pass parts of one matrix, or other placements"
        )
    return Distribution(wholes.pop(), mesh, placements, tuple(boxes))


def words(placements: Sequence[Placement]) -> str:
    """Return placements in words.

    >>> words((Shard(0), Replicate()))
    'rows x copies'
    """
    names = {Replicate(): "copies", Partial(): "summands", Shard(0): "rows", Shard(1): "columns"}
    return " x ".join(names.get(placement, str(placement)) for placement in placements)


def sources(
    source: Distribution, placements: Sequence[Placement], target: Part, receiver: int
) -> Iterator[tuple[int, Part]]:
    """Yield which rank (itself too) has which box of what `receiver` wants, in the order of ranks.

    Along a dimension of copies a rank takes its own, so that no copy is asked twice as much as another. Boxes of
    several summands of one place must be added.
    """
    ranges: list[Sequence[int]] = []
    place = coordinates(receiver, source.mesh)
    for coordinate, size, has, wants in zip(place, source.mesh, source.placements, placements, strict=True):
        if isinstance(wants, Partial) and not isinstance(has, Partial):
            if coordinate:
                return  # the first rank along this dimension has all, the others zeros
            ranges.append((0,) if isinstance(has, Replicate) else range(size))
        elif isinstance(has, Replicate) or isinstance(wants, Partial):
            ranges.append((coordinate,))
        else:
            ranges.append(range(size))
    for there in product(*ranges):
        sender = rank_at(there, source.mesh)
        box = source.boxes[sender].meet(target)
        if box.size:
            yield sender, box


def traffic(source: Distribution, target: Distribution) -> dict[tuple[int, int], int]:
    """Return how many elements each rank sends to each other one: {(sender, receiver): elements}.

    >>> rows = even((4, 3), (2,), (Shard(0),))
    >>> traffic(rows, even((4, 3), (2,), (Replicate(),)))
    {(1, 0): 6, (0, 1): 6}
    """
    sent: dict[tuple[int, int], int] = {}
    for receiver, box in enumerate(target.boxes):
        for sender, part in sources(source, target.placements, box, receiver):
            if sender != receiver:
                sent[sender, receiver] = sent.get((sender, receiver), 0) + part.size
    return sent
