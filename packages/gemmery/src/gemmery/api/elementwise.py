"""The parts of a contraction that are no product of matrices: diagonals, sums of one operand, products by elements."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery import arrays
from gemmery.api.compute import writable
from gemmery.api.one_product import Dimensions, Labels, shape_of
from gemmery.arrays import view
from gemmery.arrays.reading import SHORT
from gemmery.errors import ShapeError


def diagonals(labels: Dimensions, array: Any) -> tuple[Dimensions, Any]:
    """Return an operand in which each label stands once: a view of the diagonals of those that are repeated."""
    while len(set(labels)) < len(labels):
        label = next(label for label in labels if labels.count(label) > 1)
        first, second = [place for place, other in enumerate(labels) if other == label][:2]
        lengths = array.shape[first], array.shape[second]
        if 1 in lengths and lengths[0] != lengths[1]:  # NumPy repeats the one element
            labels, array = without(labels, array, second if lengths[1] == 1 else first)
            continue
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


def without(labels: Dimensions, array: Any, place: int) -> tuple[Dimensions, Any]:
    """Return an operand without a dimension, of which the first element is taken."""
    return labels[:place] + labels[place + 1 :], array[(slice(None),) * place + (0,)]


def repeated_once(
    left: Dimensions, a: Any, right: Dimensions, b: Any
) -> tuple[Dimensions, Any, Dimensions, Any]:  # fmt: skip
    """Return two operands without the dimensions of length 1 of which the other one has more elements."""
    for label in set(left) & set(right):
        i, j = left.index(label), right.index(label)
        if a.shape[i] != b.shape[j] and a.shape[i] == 1:
            left, a = without(left, a, i)
        elif a.shape[i] != b.shape[j] and b.shape[j] == 1:
            right, b = without(right, b, j)
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
        arrays.as_numpy(out, target)[...] = product
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
