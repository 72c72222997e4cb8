"""A contraction of two arrays as one batch of products, and the parts of contractions that are no product of matrices.

Dimensions are named by labels: the letters of `einsum`, or integers. A label in both operands and in the result is a
batch, one in both operands alone is summed, and one in a single operand is of the rows or of the columns. No dimension
is copied where strides allow it: rows and columns that one stride does not walk become a batch in which the other
operand is repeated. The other parts are diagonals, sums of one operand, and products by elements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from gemmery import arrays
from gemmery.api.checked import writable
from gemmery.arrange import Ints
from gemmery.arrays import view
from gemmery.arrays.reading import SHORT
from gemmery.errors import ShapeError
from gemmery.tuples import NamedTuple

DimensionLabel: TypeAlias = str | int
Dimensions: TypeAlias = tuple[DimensionLabel, ...]


class Labels(NamedTuple):
    """The labels of the dimensions of A, B and C, in order."""

    a: Dimensions
    b: Dimensions
    c: Dimensions


class Turn(NamedTuple):
    """How an array becomes a batch of matrices: a new order of its dimensions, then a new shape."""

    axes: Ints
    shape: Ints
    moves: bool  # whether the order is another than before


class OneProduct(NamedTuple):
    """The batches of matrices whose product is a contraction."""

    a: Turn
    b: Turn
    c: Turn
    copied: str  # the operands that must be copied because no stride walks the summed dimensions: "", "a", "b" or "ab"


_Steps: TypeAlias = dict[DimensionLabel, tuple[int, int]]  # the length and the stride in bytes of each dimension


@lru_cache(maxsize=4096)
def shape_of(labels: Labels, a_shape: Ints, b_shape: Ints) -> Ints:
    """Return the shape of the result.

    >>> shape_of(Labels(("i", "j"), ("j", "k"), ("k", "i")), (2, 3), (3, 5))
    (5, 2)

    Raises ShapeError for a label whose lengths differ; those of a batch may differ if one of them is 1.
    """
    a, b = dict(zip(labels.a, a_shape, strict=True)), dict(zip(labels.b, b_shape, strict=True))
    for label in a.keys() & b.keys():
        if a[label] != b[label] and (label not in labels.c or 1 not in (a[label], b[label])):
            raise ShapeError(
                f"{_called(label)} has length {a[label]} in the first operand, of shape {a_shape}, and {b[label]} in "
                f"the second, of shape {b_shape}; the two must be equal{', or one of them 1' * (label in labels.c)}"
            )
    return tuple(b[label] if a.get(label, 1) == 1 and label in b else a[label] for label in labels.c)


def _called(label: DimensionLabel) -> str:
    if isinstance(label, str):
        return f"letter {label!r}"
    return f"dimension {label} of those that broadcast" if label < 0 else "the dimension to sum over"


@lru_cache(maxsize=4096)
def innermost(labels: Labels, a_strides: Ints, b_strides: Ints, size: int, shape: Ints) -> Ints:
    """Return the order in memory of the dimensions of a new result, or () for that of the labels.

    It is another one where elements along a batch are adjacent in both operands: they are adjacent in the result too,
    since the kernel's vectors then run along the batch.

    >>> innermost(Labels(("a", "c"), ("a", "b", "c"), ("c", "b")), (32, 4), (96, 32, 4), 4, (8, 3))
    (1, 0)
    """
    a, b = dict(zip(labels.a, a_strides, strict=True)), dict(zip(labels.b, b_strides, strict=True))
    for place, label in enumerate(labels.c[:-1]):
        if shape[place] > 1 and a.get(label) == size and b.get(label) == size:
            return (*range(place), *range(place + 1, len(shape)), place)
    return ()


@lru_cache(maxsize=4096)
def one_product(
    labels: Labels, a_shape: Ints, a_strides: Ints, b_shape: Ints, b_strides: Ints, c_shape: Ints,
    c_strides: Ints | None = None,
) -> OneProduct:  # fmt: skip
    """Return the products that make up a contraction; strides are in bytes, and C without strides is C-contiguous.

    >>> labels = Labels(("i", "j"), ("j", "k"), ("k", "i"))
    >>> one_product(labels, (2, 3), (24, 8), (3, 5), (40, 8), (5, 2)).c
    Turn(axes=(1, 0), shape=(2, 5), moves=True)
    """
    if c_strides is None:
        c_strides = tuple(math.prod(c_shape[axis + 1 :]) for axis in range(len(c_shape)))
    a = dict(zip(labels.a, zip(a_shape, a_strides, strict=True), strict=True))
    b = dict(zip(labels.b, zip(b_shape, b_strides, strict=True), strict=True))
    c = dict(zip(labels.c, zip(c_shape, c_strides, strict=True), strict=True))
    batch = [label for label in labels.c if label in a and label in b]
    rows, more_rows = _longest(_runs([label for label in labels.c if label not in b], a, c), labels.c, c)
    columns, more_columns = _longest(_runs([label for label in labels.c if label not in a], b, c), labels.c, c)
    summed, copied = _summed([label for label in labels.a if label in b and label not in c], a, b)
    m, n, k = _length(rows, c), _length(columns, c), _length(summed, a)
    left, right = [_length(run, c) for run in more_rows], [_length(run, c) for run in more_columns]
    alone_left, alone_right = [1] * len(left), [1] * len(right)
    return OneProduct(
        _turn(labels.a, [*batch, *chain(*more_rows), *rows, *summed], a, batch, [*left, *alone_right, m, k]),
        _turn(labels.b, [*batch, *chain(*more_columns), *summed, *columns], b, batch, [*alone_left, *right, k, n]),
        _turn(labels.c, [*batch, *chain(*more_rows, *more_columns), *rows, *columns], c, batch, [*left, *right, m, n]),
        copied,
    )


def _turn(
    labels: Sequence[DimensionLabel], order: list[DimensionLabel], steps: _Steps, batch: list[DimensionLabel],
    matrices: list[int],
) -> Turn:  # fmt: skip
    axes = tuple(labels.index(label) for label in order)
    return Turn(axes, (*(steps[label][0] for label in batch), *matrices), axes != tuple(range(len(axes))))


def _length(labels: list[DimensionLabel], steps: _Steps) -> int:
    return math.prod(steps[label][0] for label in labels)


def _runs(labels: list[DimensionLabel], *operands: _Steps) -> list[list[DimensionLabel]]:
    """Cut a sequence of dimensions into the fewest that one stride walks in every operand."""
    runs: list[list[DimensionLabel]] = []
    inner: DimensionLabel | None = None  # the last label of the run whose length is not 1
    for label in labels:
        length = operands[0][label][0]
        if not runs or not (inner is None or length == 1 or all(z[inner][1] == math.prod(z[label]) for z in operands)):
            runs.append([])
        runs[-1].append(label)
        if length != 1:
            inner = label
    return runs


def _longest(
    runs: list[list[DimensionLabel]], c: tuple[DimensionLabel, ...], steps: _Steps
) -> tuple[list[DimensionLabel], list[list[DimensionLabel]]]:
    """Return the run that becomes the rows or columns, and the others: the longest, or the one that ends C."""
    if not runs:
        return [], []
    best = max(runs, key=lambda run: (c[-1] in run, _length(run, steps)))
    return best, [run for run in runs if run is not best]


def _summed(labels: list[DimensionLabel], a: _Steps, b: _Steps) -> tuple[list[DimensionLabel], str]:
    """Return the summed dimensions in the order for which the fewest elements are copied, and who is copied."""
    choices = []
    for steps in (a, b):
        order = sorted(labels, key=lambda label: -abs(steps[label][1]))
        copied = "".join(name for name, z in (("a", a), ("b", b)) if len(_runs(order, z)) > 1)
        choices.append((sum(_length(list(z), z) for name, z in (("a", a), ("b", b)) if name in copied), order, copied))
    _, order, copied = min(choices, key=lambda choice: choice[0])
    return order, copied


def diagonals(labels: Dimensions, array: Any) -> tuple[Dimensions, Any]:
    """Return an operand in which each label stands once: a view of the diagonals of those that are repeated."""
    while len(set(labels)) < len(labels):
        label = next(label for label in labels if labels.count(label) > 1)
        first, second = [place for place, other in enumerate(labels) if other == label][:2]
        lengths = array.shape[first], array.shape[second]
        if lengths[0] != lengths[1]:
            raise ShapeError(
                f"letter {label!r} is repeated in an operand of shape {array.shape}, in dimensions of {lengths[0]} and "
                f"{lengths[1]}: a diagonal needs equal lengths"
            )
        writes = getattr(getattr(array, "flags", None), "writeable", None)
        array = array.diagonal(0, first, second)
        if writes is not None:
            array.flags.writeable = writes
        labels = (*(other for place, other in enumerate(labels) if place not in (first, second)), label)
    return labels, array


def repeated_once(
    left: Dimensions, a: Any, right: Dimensions, b: Any
) -> tuple[Dimensions, Any, Dimensions, Any]:  # fmt: skip
    """Return two operands without the dimensions of length 1 of which the other one has more elements."""
    for label in set(left) & set(right):
        i, j = left.index(label), right.index(label)
        if a.shape[i] != b.shape[j] and a.shape[i] == 1:
            left, a = left[:i] + left[i + 1 :], a.squeeze(i)
        elif a.shape[i] != b.shape[j] and b.shape[j] == 1:
            right, b = right[:j] + right[j + 1 :], b.squeeze(j)
    return left, a, right, b


def ones(like: Any, shape: tuple[int, ...]) -> Any:
    """Return an array of ones of the kind and type of another one, which all are one element."""
    if hasattr(like, "new_ones"):
        return like.new_ones(()).expand(shape)
    library = np if isinstance(like, np.ndarray | np.generic) else sys.modules["cupy"]
    return library.broadcast_to(library.ones((), like.dtype), shape)


def multiplied(labels: Labels, a: Any, b: Any, result: str, out: Any) -> Any:
    """Return the product of two operands by elements, of type `result`, as a new array or in `out`."""
    shape = shape_of(labels, a.shape, b.shape)
    if out is not None:
        target = view(out)
        writable(target, shape, result)
    with np.errstate(all="ignore"):
        product = _aligned(labels.a, a, labels.c, result) * _aligned(labels.b, b, labels.c, result)
    if out is None:
        return product
    if arrays.allocates(out) and arrays.allocates(product):
        arrays.assign(out, product)
    else:
        arrays.as_numpy(target)[...] = product
        arrays.written(out)
    return out


def multiplier(labels: Labels) -> Callable[[Any, Any], Any]:
    """Return the function that multiplies by elements two arrays of NumPy of one type of numbers; None for others."""
    (first, i), (second, j) = ((_places(own, labels.c), _index(own, labels.c)) for own in labels[:2])
    plain = labels.a == labels.b == labels.c

    def product(a: Any, b: Any) -> Any:
        if a.dtype is not b.dtype or a.dtype not in SHORT:
            return None
        if not plain:
            a, b = a.transpose(first)[i], b.transpose(second)[j]
        try:
            with np.errstate(all="ignore"):
                return np.multiply(a, b)
        except ValueError:  # `shape_of` says which lengths differ
            return None

    return product


def transposed(array: Any, axes: tuple[int, ...]) -> Any:
    """Return a view of an array with its dimensions in another order."""
    return array.permute(axes) if hasattr(array, "permute") else array.transpose(axes)


def _aligned(labels: Dimensions, array: Any, order: Dimensions, dtype: str) -> Any:
    """Return an operand with the dimensions of the result, those that it lacks of length 1, in another type."""
    array = transposed(array, _places(labels, order))
    if view(array).dtype != dtype:
        own = arrays.allocates(array)
        array = arrays.astype(array, dtype) if own else array.astype(arrays.numpy_dtype(dtype))
    return array[_index(labels, order)]


def _places(labels: Dimensions, order: Dimensions) -> tuple[int, ...]:
    return tuple(labels.index(label) for label in order if label in labels)


def _index(labels: Dimensions, order: Dimensions) -> tuple[slice | None, ...]:
    return tuple(slice(None) if label in labels else None for label in order)
