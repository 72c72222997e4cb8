"""A contraction of any operands as batches of products: by their labels, and a short way for two plain arrays.

The short way is for arrays of NumPy, or tensors of PyTorch, without options: a contraction takes 1 to 5 us there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np

from gemmery import arrays
from gemmery.api import products, repeats, subscripts
from gemmery.api.one_product import (
    DimensionLabel,
    Dimensions,
    Labels,
    OneProduct,
    Turn,
    diagonals,
    innermost,
    multiplied,
    multiplier,
    one_product,
    ones,
    repeated_once,
    shape_of,
    transposed,
)
from gemmery.api.options import dtype_name, result_types, thread_count, viewed
from gemmery.arrange import Ints
from gemmery.arrays import View, view
from gemmery.cpu import entry
from gemmery.dtypes import get
from gemmery.errors import DeviceError, LayoutError, ShapeError
from gemmery.tuples import NamedTuple


class Factor(NamedTuple):
    """An operand: a label for each dimension, the array, and its view."""

    labels: Dimensions
    array: Any
    view: View


def merged(some: list[Factor], needed: set[DimensionLabel], options: dict[str, Any]) -> Factor:
    """Return the product of operands, two at a time, with the labels that are needed: those of all operands first."""
    while len(some) > 2:
        rest = needed | set(chain(*(factor.labels for factor in some[2:])))
        some = [merged(some[:2], rest, options), *some[2:]]
    every = dict.fromkeys(chain(*(factor.labels for factor in some)))
    retained = [label for label in every if label in needed]
    retained.sort(key=lambda label: not all(label in factor.labels for factor in some))
    array = sum_of_products(some, tuple(retained), options)
    return Factor(tuple(retained), array, view(array))


def sum_of_products(factors: list[Factor], c: Dimensions, options: dict[str, Any], out: Any = None) -> Any:
    """Compute a contraction of one or two operands, whatever their labels."""
    (left, _, x), (right, _, y) = factors[0], factors[-1]
    like = kind_of(*(factor.array for factor in factors))
    if len(factors) == 2 and is_product(left, right, c):
        with suppress(ShapeError) if _may_repeat(left, x, right, y) else nullcontext():
            return contract(like, Labels(left, right, c), x, y, out, options)
    own = all(arrays.allocates(factor.array) for factor in factors)
    result, wide = _result(x, y, options.get("dtype")), options
    left, a = diagonals(left, with_transposes(x, own))
    if len(factors) == 1:
        right = tuple(label for label in left if label not in c)
        if not right and out is None and options.get("dtype") is None:
            return arrays.wrap(like, transposed(a, tuple(left.index(label) for label in c)))
        b = ones(a, tuple(n for n, label in zip(a.shape, left, strict=True) if label in right))
    else:
        right, b = diagonals(right, with_transposes(y, own))
        left, a, right, b = repeated_once(left, a, right, b)
        # Sums neither wrap nor, on a CPU, round where the result would not: float32 takes a GPU longer.
        if x.device == "cpu" or get(result).kind in "iu":
            wide = {**options, "dtype": get(result).accumulator if get(result).kind == "f" else result}
        reduced = [_reduced(left, a, {*right, *c}, wide), _reduced(right, b, {*left, *c}, wide)]
        wide = wide if {left, right} - {labels for labels, _ in reduced} else options
        (left, a), (right, b) = reduced
    x, y, labels = view(a), view(b), Labels(left, right, c)
    target, between = out, _result(x, y, wide.get("dtype"))
    if out is None and (between != result or own != arrays.allocates(like)):
        target = arrays.empty(like, shape_of(labels, x.shape, y.shape), result).owner
    if is_product(left, right, c):
        product = contract(like, labels, x, y, target, wide)
    else:
        product = multiplied(labels, a, b, between, target)
    return product if out is not None else arrays.wrap(like, product)


def kind_of(*operands: Any) -> Any:
    """Return the operand whose kind a contraction has: np.matrix, which has two dimensions always, is a plain array."""
    like = arrays.kind(*operands)
    return np.asarray(like) if isinstance(like, np.matrix) else like


def _may_repeat(left: Dimensions, x: View, right: Dimensions, y: View) -> bool:
    """Return True if a length of 1 of one operand meets another one, which NumPy broadcasts."""
    lengths = dict(zip(right, y.shape, strict=True))
    return any(label in lengths and 1 in {n, lengths[label]} for label, n in zip(left, x.shape, strict=True))


def _reduced(
    labels: Dimensions, array: Any, needed: set[DimensionLabel], options: dict[str, Any]
) -> tuple[Dimensions, Any]:
    """Return an operand summed over the labels that are not needed."""
    retained = tuple(label for label in labels if label in needed)
    if retained == labels:
        return labels, array
    return retained, sum_of_products([Factor(labels, array, view(array))], retained, options)


def contract(like: Any, labels: Labels, x: View, y: View, out: Any, options: dict[str, Any]) -> Any:
    """Compute a contraction of two arrays by their views, as one batch of products like `like`."""
    own = arrays.allocates(like)
    array, steps = None, None
    target = None if out is None else viewed("out", out)
    if options:
        dtype, threads = options.get("dtype"), thread_count(options.get("threads"))
        options = {**options, "dtype": None if dtype is None else get(dtype_name(dtype)).numpy, "threads": threads}
    arrays.unchanged(a=x, b=y, out=target)  # from here on no code of an argument runs
    if target is not None:
        lengths = shape_of(labels, x.shape, y.shape)  # `matmul` checks the rest
        if target.shape != lengths:
            raise ShapeError(f"out has shape {target.shape}, and the result {lengths}; pass an out of that shape")
        if not target.writable:
            raise LayoutError("out cannot be written in place: it is read-only, or is not an array")
        array, steps = with_transposes(target, True), target.strides
    size = get(x.dtype).size if x.dtype == y.dtype and options.get("dtype") is None else 0
    shape, form, lengths, inverse = form_of(labels, x.shape, x.strides, y.shape, y.strides, size, steps)
    if array is None and (form.c.moves or inverse):
        array = arrays.empty(like if own else None, lengths, _result(x, y, options.get("dtype"))).owner
        array = transposed(array, inverse) if inverse else array
    product = products.matmul(
        turned(with_transposes(x, own), form.a),
        turned(with_transposes(y, own), form.b),
        None if array is None else turned(array, form.c),
        **options,
    )
    if out is not None:
        return out
    return arrays.wrap(like, product.reshape(shape) if array is None else array)


def _result(x: View, y: View, dtype: Any) -> str:
    """Return the element type of a new result."""
    if x.device == "cpu":
        return result_types(x, y, dtype)[1]
    from gemmery.api import device_operands

    return device_operands.types(x, y, dtype)[1]


def with_transposes(x: View, own: bool) -> Any:
    """Return an array whose dimensions can be reordered without a copy: that of x, or NumPy's of the same memory.

    With `own` a PyTorch tensor and a CuPy array stay what they are.
    """
    if own and arrays.allocates(x.array):
        return x.array
    if x.device != "cpu":
        raise DeviceError(
            f"a {type(x.array).__name__} on {x.device}: on a device tensordot, vecdot and einsum take PyTorch "
            "tensors and CuPy arrays; convert with torch.from_dlpack or cupy.from_dlpack, or call gm.matmul"
        )
    return arrays.as_numpy(x)


# A vector as a row and as a column, and the number that their product is.
_ROW, _COLUMN, _NUMBER = (..., None, slice(None)), (..., None), (..., 0, 0)


def is_plain(a: Any, b: Any) -> bool:
    """Return True for two arrays of NumPy, or two dense tensors of PyTorch."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is np.ndarray or (kind.__module__, kind.__name__) != ("torch", "Tensor"):
        return kind is np.ndarray
    return a.layout is b.layout is sys.modules["torch"].strided and not (a.is_nested or b.is_nested)


def rows_of(a: Any, b: Any) -> Any:
    """Return the dot products of the rows of two plain arrays; None for complex ones."""
    numpys = type(a) is np.ndarray
    if a.dtype.kind == "c" if numpys else a.is_complex():
        return None
    if a.ndim == 1 or b.ndim == 1:
        return products.multiply(b, a) if b.ndim > 1 else products.multiply(a, b)
    if not numpys:
        return products.multiply(a.unsqueeze(-2), b.unsqueeze(-1)).squeeze((-2, -1))
    return products.multiply(a[_ROW], b[_COLUMN])[_NUMBER]


def is_product(a: Dimensions, b: Dimensions, c: Dimensions) -> bool:
    """Return True for a product of matrices: each label of one operand once and in the result, and not by elements."""
    alone = set(a) ^ set(b)
    once = len(set(a)) == len(a) and len(set(b)) == len(b)
    return once and alone <= set(c) and (not set(a) & set(b) <= set(c) or not (set(a) <= set(b) or set(b) <= set(a)))


@lru_cache(maxsize=1024)
def quick(expression: str, a: int, b: int, numpys: bool) -> Callable[[Any, Any], Any]:
    """Return a function that takes two arrays of NumPy, or two tensors of PyTorch, to `matmul`, or returns None.

    Of NumPy, where one letter is summed, and at most one is of the rows and one of the columns, no shape or stride is
    looked at: 1 us in place of 4.
    """
    if expression.count(",") != 1:
        return lambda a, b: None
    (left, right), c = subscripts.labels(expression, (a, b))
    labels = Labels(left, right, c)
    batch = [label for label in c if label in left and label in right]
    summed = [label for label in left if label in right and label not in c]
    if not numpys:
        return partial(at_once, labels) if is_product(left, right, c) else lambda a, b: None
    if not is_product(left, right, c):
        once = len({*left}) == len(left) and len({*right}) == len(right) and {*left, *right} == {*c}
        return multiplier(labels) if once else lambda a, b: None
    if left == right and not c:
        return partial(_dot, labels)
    swaps = c[len(batch) :] != tuple(label for label in (*left, *right) if label in c and label not in batch)
    if swaps:
        left, right = right, left
    rows = [label for label in left if label in c and label not in batch]
    columns = [label for label in right if label in c and label not in batch]
    if c != (*batch, *rows, *columns) or len(rows) > 1 or len(columns) > 1 or len(summed) != 1:
        return partial(at_once, labels)
    before = _order(left, [*batch, *rows, *summed])
    after = _order(right, [*batch, *summed, *columns])
    row = (..., None, slice(None)) if batch and not rows else None
    column = (..., None) if batch and not columns else None
    flat = (..., *((0,) if row else ()), *((slice(None),) if columns and row else ()), *((0,) if column else ()))
    apart = [(left.index(label), right.index(label)) for label in batch if label != c[-1]]

    def product(a: Any, b: Any) -> Any:
        for i, j in apart:
            if (b if swaps else a).strides[i] == (a if swaps else b).strides[j] == a.itemsize:
                return at_once(labels, a, b)  # `innermost` says where it belongs in the result
        if swaps:
            a, b = b, a
        if before is not None:
            a = a.transpose(before)
        if after is not None:
            b = b.transpose(after)
        if row is None and column is None:
            return products.multiply(a, b)
        return products.multiply(a if row is None else a[row], b if column is None else b[column])[flat]

    return product


def _dot(labels: Labels, a: Any, b: Any) -> Any:
    """Return the sum of all products of two arrays of NumPy."""
    if a.shape == b.shape and a.flags.c_contiguous and b.flags.c_contiguous:
        return products.multiply(a.reshape(-1), b.reshape(-1))
    return at_once(labels, a, b)


def at_once(labels: Labels, a: Any, b: Any) -> Any:
    """Compute a contraction of two plain arrays of one type; None for others."""
    numpys = type(a) is np.ndarray
    if a.dtype is not b.dtype:
        return None
    shape, form, lengths, inverse = _form(labels, a, b, numpys)
    x, y = turned(a, form.a), turned(b, form.b)
    if not (form.c.moves or inverse):
        product = products.multiply(x, y)
        return product if product.shape == shape else arrays.wrap(a, product.reshape(shape))
    if not numpys and a.element_size() == 1:  # a device has results of another type
        return None
    array = _empty(a, lengths, inverse)
    products.multiply(x, y, turned(array, form.c))
    return array


def _form(labels: Labels, a: Any, b: Any, numpys: bool) -> tuple[Ints, OneProduct, Ints, Ints]:
    if numpys:
        return form_of(labels, a.shape, a.strides, b.shape, b.strides, a.itemsize)
    return form_of(labels, a.shape, a.stride(), b.shape, b.stride(), 1)


def _empty(like: Any, lengths: Ints, inverse: Ints) -> Any:
    """Return a new array of the type of another one, with its dimensions in the order of the result."""
    array = np.empty(lengths, like.dtype) if type(like) is np.ndarray else like.new_empty(lengths)
    return transposed(array, inverse) if inverse else array


def remember(builtin: str, described: str | int | None, labels: Labels, a: Any, b: Any) -> None:
    """Let the compiled entry take contractions of arrays like these, which come often: 0.2 us in place of 1 to 5.

    `described` is the expression or the axes, which the entry knows by its address. What needs a copy or a result in
    another order than C and Fortran stays Python's, as do long products: they would not gain.
    """
    if a.dtype is not b.dtype or not is_product(*labels):
        return
    shape, form, lengths, inverse = _form(labels, a, b, type(a) is np.ndarray)
    in_order = not inverse or inverse == tuple(reversed(range(len(inverse))))
    if form.copied or not in_order or not 0 < math.prod(shape) * form.a.shape[-1] < _SHORT:
        return
    kind = repeats.kind_of(a, b, None, builtin, described)
    if kind is None or not _worth_another_time(kind.key().hash):
        return
    x, y = turned(a, form.a), turned(b, form.b)
    out = turned(_empty(a, lengths, inverse), form.c) if form.c.moves or inverse else None
    product = repeats.kind_of(x, y, out)
    if product is not None:
        entry.come_often(product.key())
        products.by_python(x, y, out)
        entry.remember_contraction(product.key(), kind, shape, bool(inverse))


_SHORT = 1 << 20  # multiply-adds
_MOST_TIMES = 4096
_times: dict[int, int] = {}  # of a contraction, by the hash of its key


def _worth_another_time(contraction: int) -> bool:
    """Return True at powers of two: what the entry is told takes 100 us, and each change of threads makes it forget."""
    if len(_times) >= _MOST_TIMES:
        _times.clear()
    _times[contraction] = times = _times.get(contraction, 0) + 1
    return times & (times - 1) == 0


def _order(labels: Dimensions, order: list[DimensionLabel]) -> tuple[int, ...] | None:
    """Return the places of labels in another order, or None if they are in that order."""
    places = tuple(labels.index(label) for label in order)
    return None if places == tuple(range(len(places))) else places


@lru_cache(maxsize=4096)
def form_of(
    labels: Labels, a_shape: Ints, a_strides: Ints, b_shape: Ints, b_strides: Ints, size: int, out: Ints | None = None
) -> tuple[Ints, OneProduct, Ints, Ints]:
    """Return the shape of a result, the products that it is, the shape to allocate, and how that becomes the result.

    The last is () where the result's dimensions lie in memory in their order: see `innermost`. `size` is that of the
    operands' elements in bytes, or 0 if it is two, and `out` the strides of the caller's array.
    """
    shape = shape_of(labels, a_shape, b_shape)
    memory = innermost(labels, a_strides, b_strides, size, shape) if out is None and size else ()
    lengths = tuple(shape[place] for place in memory) or shape
    inverse = tuple(memory.index(place) for place in range(len(memory)))
    if memory:
        steps = arrays.contiguous(lengths, size)
        out = tuple(steps[place] for place in inverse)
    return shape, one_product(labels, a_shape, a_strides, b_shape, b_strides, shape, out), lengths, inverse


def turned(array: Any, turn: Turn) -> Any:
    """Reorder and merge dimensions; a view of the same memory where the strides allow it."""
    if turn.moves:
        array = array.transpose(turn.axes) if type(array) is np.ndarray else transposed(array, turn.axes)
    return array if array.shape == turn.shape else array.reshape(turn.shape)
