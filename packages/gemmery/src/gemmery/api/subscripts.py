"""The labels of contractions: which letter or number names which dimension, and which operands are multiplied first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from operator import index
from string import ascii_letters
from typing import Any

import numpy as np

from gemmery.api.one_product import DimensionLabel, Dimensions, Labels
from gemmery.arrange import Ints
from gemmery.errors import ArgumentError, ShapeError, brief

_FORM = (
    "use letters, a comma between the operands, one '...' an operand and '->' before the result, as in "
    "'...ij,jk->...ik'"
)


@lru_cache(maxsize=1024)
def labels(subscripts: str, counts: Ints) -> tuple[tuple[Dimensions, ...], Dimensions]:
    """Return the labels of operands with so many dimensions, and those of the result.

    Dimensions of the ellipsis are -1, -2, ... from the last, so that those of all operands broadcast.

    >>> labels("ij,jk", (2, 2))
    ((('i', 'j'), ('j', 'k')), ('i', 'k'))
    >>> labels("...i,...i->...", (3, 2))[1]
    (-2, -1)

    Raises ArgumentError for subscripts that are malformed, and ShapeError if they name another number of dimensions
    than an operand has.
    """
    text = subscripts.replace(" ", "")
    if any(text.count(sign) != subscripts.count(sign) for sign in ("->", "...")):
        raise ArgumentError(f"a space inside '->' or '...' of subscripts {brief(subscripts)}: {_FORM}")
    inputs, arrow, output = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(counts):
        raise ArgumentError(
            f"{brief(subscripts)} describes {len(terms)} operand{'s' * (len(terms) != 1)}, and {len(counts)} are "
            "passed: write a comma between the letters of two operands, as in 'ij,jk->ik'"
        )
    for letter in "".join(term.replace("...", "", 1) for term in (*terms, output)):
        if not (letter.isascii() and letter.isalpha()):
            raise ArgumentError(f"{letter!r} in subscripts {brief(subscripts)}: {_FORM}")
    sides = tuple(
        _dimensions(term, count, place) for place, (term, count) in enumerate(zip(terms, counts, strict=True))
    )
    every = [label for side in sides for label in side]
    ellipsis = tuple(sorted({label for label in every if isinstance(label, int)}))
    if arrow:
        return sides, _output(output, every, ellipsis, subscripts)
    return sides, (*ellipsis, *sorted(label for label in every if isinstance(label, str) and every.count(label) == 1))


def from_lists(arguments: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the subscripts and the operands of NumPy's other form: x, [0, 1], y, [1, 2], [0, 2].

    >>> from_lists(["x", [0, 1], "y", [1, ...], [0, ...]])
    ('AB,B...->A...', ('x', 'y'))
    """
    *_, last = (None, *arguments)
    output = f"->{_listed(last)}" if len(arguments) % 2 else ""
    pairs = arguments[: len(arguments) // 2 * 2]
    if not pairs:
        raise ArgumentError("einsum needs subscripts and operands: pass a string such as 'ij,jk->ik', then two arrays")
    return ",".join(_listed(numbers) for numbers in pairs[1::2]) + output, tuple(pairs[::2])


def path(terms: Sequence[Dimensions], shapes: Sequence[Ints], result: Dimensions, optimize: Any) -> list[Ints]:
    """Return the places of the operands that are multiplied in each step, as `numpy.einsum_path` does.

    A result stands last among those that are left.
    """
    names = dict(zip(dict.fromkeys(label for term in terms for label in term), ascii_letters, strict=False))
    text = [*("".join(names[label] for label in term) for term in terms), "".join(names[label] for label in result)]
    empty = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    strategy = "greedy" if optimize is None or isinstance(optimize, bool) else optimize
    try:
        steps = np.einsum_path(f"{','.join(text[:-1])}->{text[-1]}", *empty, optimize=strategy)[0]
    except Exception as error:  # TypeError, ValueError, KeyError, RecursionError, or what an object raises
        why = f"optimize={brief(optimize)} of {len(terms)} operands: {error!s:.200}; leave it out"
        raise ArgumentError(why) from error
    return [tuple(step) for step in steps[1:]]


def _listed(numbers: Any) -> str:
    """Return the letters of a list of numbers and Ellipsis."""
    try:
        return "".join("..." if number is Ellipsis else _LETTERS[index(number)] for number in numbers)
    except (TypeError, KeyError) as error:
        raise ArgumentError(
            f"the subscripts of einsum are {brief(numbers)}: pass a string such as 'ij,jk->ik', then the arrays, or "
            "after each array a list of numbers from 0 to 51"
        ) from error


_LETTERS = dict(enumerate(sorted(ascii_letters)))  # a dict, for which -1 is no place


def called(place: int) -> str:
    """Return how messages call an operand."""
    return f"the {('first', 'second', 'third')[place]} operand" if place < 3 else f"operand {place + 1}"


def _dimensions(term: str, count: int, place: int) -> Dimensions:
    """Return the labels of an operand's dimensions."""
    letters = len(term.replace("...", ""))
    if letters > count or ("." not in term and letters != count):
        raise ShapeError(
            f"{term!r} names {letters} dimensions, and {called(place)} has {count}; pass a letter for each, or '...'"
        )
    before, _, after = term.partition("...")
    return (*before, *range(letters - count, 0), *after)


def _output(term: str, inputs: list[DimensionLabel], ellipsis: Ints, subscripts: str) -> Dimensions:
    before, dots, after = term.partition("...")
    for letter in before + after:
        if letter not in inputs:
            raise ArgumentError(f"letter {letter!r} of the result is in no operand of {brief(subscripts)}")
        if term.count(letter) > 1:
            raise ArgumentError(
                f"letter {letter!r} is repeated in {term!r}: that is a diagonal to write: set it afterwards with "
                "numpy.fill_diagonal"
            )
    if ellipsis and not dots:
        raise ArgumentError(
            f"the result of {brief(subscripts)} has no '...': the dimensions of the ellipsis are not summed; write "
            "'...' there too, or a letter for each of them"
        )
    return (*before, *ellipsis, *after)


@lru_cache(maxsize=256)
def of_vecdot(axis: Any, a: int, b: int) -> Labels:
    """Return the labels of a vecdot: 0 for the vectors, -1, -2, ... from the last for the other dimensions."""
    sides = []
    for count in (a, b):
        place = _dimension(axis, count, "axis")
        sides.append((*range(1 - count, place - count + 1), 0, *range(place - count + 1, 0)))
    left, right = sides
    return Labels(left, right, tuple(sorted({*left, *right} - {0})))


def pair_of(axes: Any) -> int | tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the axes of tensordot as a number, or as two tuples."""
    with suppress(Exception):  # of what is no number: an array has __index__ too
        return index(axes)
    try:
        ours, theirs = map(_side, axes)
    except Exception as error:  # TypeError, ValueError, or what an object's own methods raise
        raise ArgumentError(
            f"axes={brief(axes)}: pass a number of dimensions, or the dimensions of a and of b as a pair of lists"
        ) from error
    return tuple(whole(axis, "axes") for axis in ours), tuple(whole(axis, "axes") for axis in theirs)


def _side(axes: Any) -> tuple[Any, ...]:
    """Return the dimensions of one operand, of which there may be one alone, not in a list."""
    with suppress(TypeError):
        return (index(axes),)
    return tuple(axes)


@lru_cache(maxsize=256)
def of_tensordot(
    axes: int | tuple[tuple[Any, ...], tuple[Any, ...]], a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> Labels:
    """Return the labels of a tensordot: the numbers of the dimensions of a, then of those of b that are its own."""
    a, b = len(a_shape), len(b_shape)
    if isinstance(axes, int):
        if not 0 <= axes <= min(a, b):
            raise ShapeError(f"axes={brief(axes)} of shapes {a_shape} and {b_shape}: it must be 0 to {min(a, b)}")
        axes = tuple(range(a - axes, a)), tuple(range(axes))
    if len(axes[0]) != len(axes[1]):
        raise ArgumentError(f"axes={axes}: the lists have {len(axes[0])} and {len(axes[1])} dimensions; pair them")
    ours, theirs = [_dimension(i, a, "axes") for i in axes[0]], [_dimension(i, b, "axes") for i in axes[1]]
    if len(set(ours)) < len(ours) or len(set(theirs)) < len(theirs):
        raise ArgumentError(f"axes={axes} names a dimension twice; name each once")
    left, right = list(range(a)), list(range(a, a + b))
    for mine, other in zip(ours, theirs, strict=True):
        if a_shape[mine] != b_shape[other]:
            raise ShapeError(
                f"dimension {mine} of a, of shape {a_shape}, has length {a_shape[mine]}, and dimension {other} of "
                f"b, of shape {b_shape}, has length {b_shape[other]}; tensordot sums over both, so they must be equal"
            )
        right[other] = left[mine]
    free = [label for label in left + right if (label in left) != (label in right)]
    return Labels(tuple(left), tuple(right), tuple(free))


def whole(axis: Any, name: str) -> int:
    """Return a dimension as an int. Raises ArgumentError for what is none."""
    try:
        return index(axis)
    except Exception as error:  # TypeError, or what an object's own methods raise
        raise ArgumentError(f"{name} contains {brief(axis)}, which is no dimension; pass integers") from error


def _dimension(place: int, count: int, name: str) -> int:
    """Return a dimension counted from 0."""
    if not -count <= place < count:
        raise ShapeError(f"{name} contains dimension {brief(place)}, and the operand has {count}; the last is -1")
    return place % count
