"""tensordot, vecdot and einsum: contractions of two arrays that are one batch of products."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import reduce
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from gemmery import arrays
from gemmery.api import elementwise, opaque, products, quick_contractions, spellings, subscripts
from gemmery.api.one_product import (
    DimensionLabel,
    Dimensions,
    Labels,
    shape_of,
)
from gemmery.api.options import dtype_name, thread_count
from gemmery.api.promote import promoted, widened
from gemmery.arrays import View, view
from gemmery.dtypes import get
from gemmery.errors import DeviceError, GemmeryError, LayoutError, ShapeError, brief
from gemmery.tuples import NamedTuple

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import NDArray

    from gemmery.api.types import ContractionOptions, EinsumOptions, Foreign, Out, Plain, VecdotOptions

Axes = int | tuple[int | Sequence[int], int | Sequence[int]]

if TYPE_CHECKING:  # mypy attaches a block to the function after it only if it contains nothing but overloads

    @overload
    def tensordot(
        a: Plain, b: Plain, axes: Axes = 2, *, out: None = None, **options: Unpack[ContractionOptions]
    ) -> NDArray[Any]: ...
    @overload
    def tensordot(
        a: Plain, b: Foreign, axes: Axes = 2, *, out: None = None, **options: Unpack[ContractionOptions]
    ) -> Foreign: ...
    @overload
    def tensordot(
        a: Foreign, b: Foreign | Plain, axes: Axes = 2, *, out: None = None, **options: Unpack[ContractionOptions]
    ) -> Foreign: ...
    @overload
    def tensordot(a: Any, b: Any, axes: Axes = 2, *, out: Out, **options: Unpack[ContractionOptions]) -> Out: ...
    @overload
    def tensordot(a: Any, b: Any, axes: Axes = 2, *, out: Any = None, **options: Unpack[ContractionOptions]) -> Any: ...


@opaque.opaque
def tensordot(
    a: Any,
    b: Any,
    axes: Any = 2,
    *,
    out: Any = None,
    dtype: Any = None,
    threads: int | None = None,
    precision: Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"] | None = None,
) -> Any:
    """Return the sum of products over several dimensions of two arrays, as `numpy.tensordot` does.

    >>> import numpy as np, gemmery as gm
    >>> a, b = np.ones((2, 3, 4)), np.ones((4, 3, 5))
    >>> gm.tensordot(a, b, axes=([2, 1], [0, 1])).shape
    (2, 5)

    `axes` is the number of dimensions to sum over, the last ones of `a` and the first ones of `b`, in order (0 for the
    outer product); or a pair of lists, the dimensions of `a` and those of `b`. The result has the other dimensions of
    `a`, then those of `b`.

    The sum is one product of `matmul`: its element types, accuracy, determinism, and kinds of arrays. `out`, `dtype`,
    `threads` and `precision` are as there. Operands are not copied, except one in which the dimensions to sum over are
    several and no single stride walks them.

    Raises the errors of `matmul`; ShapeError for dimensions whose lengths differ or that an operand does not have, and
    ArgumentError for `axes` of another form.
    """
    if opaque.waiting and opaque.settle():
        return tensordot(a, b, axes, out=out, dtype=dtype, threads=threads, precision=precision)
    if quick_contractions.is_plain(a, b, out, dtype, threads, precision):
        try:
            labels = subscripts.of_tensordot(subscripts.pair_of(axes), tuple(a.shape), tuple(b.shape))
            result = quick_contractions.at_once(labels, a, b)
            if result is not None:
                return result
        except GemmeryError:  # which the way below tells in words of the arguments
            pass
    x, y = spellings.viewed("a", a), spellings.viewed("b", b)
    labels = subscripts.of_tensordot(subscripts.pair_of(axes), x.shape, y.shape)
    return _contract(arrays.kind(a, b), labels, a, b, x, y, Wanted(spellings.single(out), dtype, threads, precision))


if TYPE_CHECKING:

    @overload
    def vecdot(
        a: Plain, b: Plain, /, out: None = None, *, axis: int = -1, **options: Unpack[VecdotOptions]
    ) -> NDArray[Any]: ...
    @overload
    def vecdot(
        a: Plain, b: Foreign, /, out: None = None, *, axis: int = -1, **options: Unpack[VecdotOptions]
    ) -> Foreign: ...
    @overload
    def vecdot(
        a: Foreign, b: Foreign | Plain, /, out: None = None, *, axis: int = -1, **options: Unpack[VecdotOptions]
    ) -> Foreign: ...
    @overload
    def vecdot(a: Any, b: Any, /, out: Out, *, axis: int = -1, **options: Unpack[VecdotOptions]) -> Out: ...
    @overload
    def vecdot(a: Any, b: Any, /, out: Any = None, *, axis: int = -1, **options: Unpack[VecdotOptions]) -> Any: ...


@opaque.opaque
def vecdot(
    a: Any,
    b: Any,
    /,
    out: Any = None,
    *,
    axis: int = -1,
    keepdims: bool = False,
    dtype: Any = None,
    threads: int | None = None,
    precision: Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"] | None = None,
    **options: Any,
) -> Any:
    """Return the dot products of the vectors of two arrays, as `numpy.vecdot` does.

    >>> import numpy as np, gemmery as gm
    >>> gm.vecdot(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([10.0, 1.0]))
    array([12., 34.])

    The vectors lie along `axis` of each operand; the other dimensions broadcast. Complex vectors of `a` are conjugated,
    which copies them; real operands are not copied. `out`, `dtype`, `threads` and `precision` are as in `matmul`.

    Each pair of vectors is a product of its own. Of NumPy arrays, `numpy.vecdot` is faster for a few vectors, and for
    any number of vectors of 32 to 128 elements.

    Raises the errors of `matmul`; ShapeError for vectors of different lengths, and for an `axis` that an operand does
    not have.
    """
    if opaque.waiting and opaque.settle():
        return vecdot(
            a, b, out, axis=axis, keepdims=keepdims, dtype=dtype, threads=threads, precision=precision, **options
        )
    if (
        axis == -1
        and keepdims is False
        and not options
        and quick_contractions.is_plain(a, b, out, dtype, threads, precision)
    ):
        try:
            result = quick_contractions.rows_of(a, b)
            if result is not None:
                return result
        except GemmeryError:
            pass
    spellings.check("vecdot", options)
    if keepdims not in (True, False):
        raise TypeError(f"keepdims={brief(keepdims)}: pass True or False")
    out = spellings.single(out)
    x, y = spellings.viewed("a", a), spellings.viewed("b", b)
    if get(x.dtype).kind == "c":
        arrays.unchanged(a=x)
        a = _with_transposes(a, x, arrays.allocates(a)).conj()
        x = view(a)
    labels = subscripts.of_vecdot(axis, len(x.shape), len(y.shape))
    place = index(axis) % (len(labels.c) + 1)
    target = out
    if keepdims and out is not None:
        shape = spellings.viewed("out", out).shape
        if shape[place : place + 1] != (1,):
            raise ShapeError(f"out has shape {shape}: with keepdims=True its dimension {place} has length 1")
        target = out.squeeze(place)
    result = _contract(arrays.kind(a, b), labels, a, b, x, y, Wanted(target, dtype, threads, precision))
    if out is not None:
        return out
    return result[(slice(None),) * place + (None,)] if keepdims else result


if TYPE_CHECKING:

    @overload
    def einsum(
        expression: str, a: Plain, b: Plain, /, *, out: None = None, **options: Unpack[EinsumOptions]
    ) -> NDArray[Any]: ...
    @overload
    def einsum(
        expression: str, a: Plain, b: Foreign, /, *, out: None = None, **options: Unpack[EinsumOptions]
    ) -> Foreign: ...
    @overload
    def einsum(
        expression: str, a: Foreign, b: Foreign | Plain, /, *, out: None = None, **options: Unpack[EinsumOptions]
    ) -> Foreign: ...
    @overload
    def einsum(expression: str, a: Any, b: Any, /, *, out: Out, **options: Unpack[EinsumOptions]) -> Out: ...
    @overload
    def einsum(expression: Any, /, *operands: Any, out: Any = None, **options: Unpack[EinsumOptions]) -> Any: ...


@opaque.opaque
def einsum(
    expression: Any,
    /,
    *operands: Any,
    out: Any = None,
    dtype: Any = None,
    threads: int | None = None,
    precision: Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"] | None = None,
    optimize: Any = None,
    order: str = "K",
    casting: str = "safe",
) -> Any:
    """Return the sum of products of arrays that letters describe, as `numpy.einsum` does.

    >>> import numpy as np, gemmery as gm
    >>> queries, keys = np.ones((2, 5, 4, 8)), np.ones((2, 7, 4, 8))  # batch, position, head, feature
    >>> gm.einsum("bqhd,bkhd->bhqk", queries, keys).shape
    (2, 4, 5, 7)

    The expression has the letters of each operand and, after "->", those of the result; without "->" the result has
    the letters that occur once, in alphabetical order. "..." stands for any dimensions, which broadcast, as a letter
    does that has length 1 in an operand. Letters that the result lacks are summed. A letter repeated in one operand is
    its diagonal. Lists of numbers in place of letters are taken too: `einsum(a, [0, 1], b, [1, 2], [0, 2])`.

    Two operands are one batch of products of `matmul`: its element types, accuracy, determinism, and kinds of arrays.
    `out`, `dtype`, `threads` and `precision` are as there. Operands are not copied, except one in which several letters
    are summed and no single stride walks them. Of more operands two at a time are multiplied, in the order that
    `optimize` asks for as in `numpy.einsum_path`: "greedy", which is the default, "optimal" or a path. One operand of
    which nothing is summed gives a view. `opt_einsum.contract(..., backend="gemmery")` calls this function.

    A new result is C-contiguous, unless both operands have a letter innermost that stands elsewhere in the result: it
    is innermost there too, as NumPy's "K" order has it. With `order="C"` or "F" a result of NumPy is in that order.

    Raises the errors of `matmul`, ShapeError for letters whose lengths differ, and ArgumentError for subscripts that
    are malformed.
    """
    if opaque.waiting and opaque.settle():
        return einsum(
            expression, *operands, out=out, dtype=dtype, threads=threads, precision=precision, optimize=optimize,
            order=order, casting=casting,
        )  # fmt: skip
    if len(operands) == 2 and type(expression) is str and order == "K" and casting == "safe":
        a, b = operands
        if quick_contractions.is_plain(a, b, out, dtype, threads, precision):
            try:
                result = quick_contractions.quick(expression, a.ndim, b.ndim, type(a) is np.ndarray)(a, b)
                if result is not None:
                    return result
            except GemmeryError:  # of lengths that differ, of which one may be 1, among others
                pass
    options = Wanted(spellings.single(out), dtype, threads, precision)
    order = str(order).upper()
    spellings.check("einsum", {"casting": casting, "order": "K" if order == "F" else order})
    if not isinstance(expression, str):
        expression, operands = subscripts.from_lists((expression, *operands))
    views = [spellings.viewed(subscripts.called(place), operand) for place, operand in enumerate(operands)]
    arrays.unchanged(**{subscripts.called(place): x for place, x in enumerate(views)})
    terms, letters = subscripts.labels(expression, tuple(len(x.shape) for x in views))
    factors = [Factor(*factor) for factor in zip(terms, operands, views, strict=True)]
    if len(factors) > 2:
        if dtype is None and len({x.dtype for x in views}) > 1 and all(x.device == "cpu" for x in views):
            options = options._replace(dtype=get(reduce(promoted, (x.dtype for x in views))).numpy)
        for places in subscripts.path(terms, [x.shape for x in views], letters, optimize)[:-1]:
            some = [factors[place] for place in places]
            factors = [factor for place, factor in enumerate(factors) if place not in places]
            factors.append(_merged(some, {*letters, *chain(*(factor.labels for factor in factors))}, options))
        while len(factors) > 2:  # a path may leave several to its last step
            some, factors = factors[:2], factors[2:]
            factors.append(_merged(some, {*letters, *chain(*(factor.labels for factor in factors))}, options))
    result = _sum_of_products(factors, letters, options)
    return result if order == "K" or options.out is not None else spellings.in_order(result, order)


class Wanted(NamedTuple):
    """The options of a contraction, as the caller passed them."""

    out: Any = None
    dtype: Any = None
    threads: int | None = None
    precision: Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"] | None = None


class Factor(NamedTuple):
    """An operand: a label for each dimension, the array, and its view."""

    labels: Dimensions
    array: Any
    view: View


def _merged(some: list[Factor], needed: set[DimensionLabel], options: Wanted) -> Factor:
    """Return the product of operands, two at a time, with the labels that are needed: those of all operands first."""
    while len(some) > 2:
        rest = needed | set(chain(*(factor.labels for factor in some[2:])))
        some = [_merged(some[:2], rest, options), *some[2:]]
    every = dict.fromkeys(chain(*(factor.labels for factor in some)))
    retained = [label for label in every if label in needed]
    retained.sort(key=lambda label: not all(label in factor.labels for factor in some))
    array = _sum_of_products(some, tuple(retained), options._replace(out=None))
    return Factor(tuple(retained), array, view(array))


def _sum_of_products(factors: list[Factor], c: Dimensions, options: Wanted) -> Any:
    """Compute a contraction of one or two operands, whatever their labels."""
    (left, a, x), (right, b, y) = factors[0], factors[-1]
    like = arrays.kind(*(factor.array for factor in factors))
    if len(factors) == 2 and quick_contractions.is_product(left, right, c):
        with suppress(ShapeError) if _may_repeat(left, x, right, y) else nullcontext():
            return _contract(like, Labels(left, right, c), a, b, x, y, options)
    own = arrays.allocates(like)
    left, a = elementwise.diagonals(left, _with_transposes(a, x, own))
    if len(factors) == 1:
        right = tuple(label for label in left if label not in c)
        if not right and options.out is None and options.dtype is None:
            return arrays.wrap(like, elementwise.transposed(a, tuple(left.index(label) for label in c)))
        b = elementwise.ones(a, tuple(n for n, label in zip(a.shape, left, strict=True) if label in right))
    else:
        right, b = elementwise.diagonals(right, _with_transposes(b, y, own))
        left, a, right, b = elementwise.repeated_once(left, a, right, b)
        left, a = _reduced(left, a, {*right, *c}, options)
        right, b = _reduced(right, b, {*left, *c}, options)
    x, y = view(a), view(b)
    if quick_contractions.is_product(left, right, c):
        return _contract(like, Labels(left, right, c), a, b, x, y, options)
    product = elementwise.multiplied(Labels(left, right, c), a, b, _result(x, y, options.dtype), options.out)
    return product if options.out is not None else arrays.wrap(like, product)


def _may_repeat(left: Dimensions, x: View, right: Dimensions, y: View) -> bool:
    """Return True if a length of 1 of one operand meets another one, which NumPy broadcasts."""
    lengths = dict(zip(right, y.shape, strict=True))
    return any(label in lengths and 1 in {n, lengths[label]} for label, n in zip(left, x.shape, strict=True))


def _reduced(labels: Dimensions, array: Any, needed: set[DimensionLabel], options: Wanted) -> tuple[Dimensions, Any]:
    """Return an operand summed over the labels that are not needed."""
    retained = tuple(label for label in labels if label in needed)
    if retained == labels:
        return labels, array
    return retained, _sum_of_products([Factor(labels, array, view(array))], retained, options._replace(out=None))


def _contract(like: Any, labels: Labels, a: Any, b: Any, x: View, y: View, options: Wanted) -> Any:
    """Compute a contraction of a and b, with the views x and y, as one batch of products like `like`."""
    own = arrays.allocates(like)
    array, steps, out = None, None, options.out
    target = None if out is None else spellings.viewed("out", out)
    dtype = None if options.dtype is None else get(dtype_name(options.dtype)).numpy
    options = options._replace(dtype=dtype, threads=thread_count(options.threads))
    arrays.unchanged(a=x, b=y, out=target)  # from here on no code of an argument runs
    if target is not None:
        _check_out(target, shape_of(labels, x.shape, y.shape))
        array, steps = _with_transposes(out, target, arrays.allocates(out)), target.strides
    size = get(x.dtype).size if x.dtype == y.dtype and options.dtype is None else 0
    shape, form, lengths, inverse = quick_contractions.form_of(
        labels, x.shape, x.strides, y.shape, y.strides, size, steps
    )
    if array is None and (form.c.moves or inverse):
        array = arrays.empty(like if own else None, lengths, _result(x, y, options.dtype))[0]
        array = elementwise.transposed(array, inverse) if inverse else array
    product = products.matmul(
        quick_contractions.turned(_with_transposes(a, x, own), form.a),
        quick_contractions.turned(_with_transposes(b, y, own), form.b),
        None if array is None else quick_contractions.turned(array, form.c),
        dtype=options.dtype,
        threads=options.threads,
        precision=options.precision,
    )
    if out is not None:
        return out
    return arrays.wrap(like, product.reshape(shape) if array is None else array)


def _check_out(target: View, shape: tuple[int, ...]) -> None:
    """Raise unless `out` has the shape of the result and can be written; `matmul` checks the rest."""
    if target.shape != shape:
        raise ShapeError(f"out has shape {target.shape}, and the result {shape}; pass an out of that shape")
    if not target.writable:
        raise LayoutError("out cannot be written in place: it is read-only, or is not an array")


def _result(x: View, y: View, dtype: Any) -> str:
    """Return the element type of a new result."""
    name = None if dtype is None else dtype_name(dtype)
    if x.device == "cpu":
        common = promoted(x.dtype, y.dtype)
        return common if name is None else widened(common, name)
    from gemmery.api import device_types

    return device_types.types(x, y, name, None)[1]


def _with_transposes(obj: Any, its_view: View, own: bool) -> Any:
    """Return an array whose dimensions can be reordered without a copy: `obj`, or a NumPy array of the same memory.

    With `own` a PyTorch tensor and a CuPy array stay what they are.
    """
    if own and arrays.allocates(obj):
        return obj
    if its_view.device != "cpu":
        raise DeviceError(
            f"a {type(obj).__name__} on {its_view.device}: on a device tensordot, vecdot and einsum take PyTorch "
            "tensors and CuPy arrays; convert with torch.from_dlpack or cupy.from_dlpack, or call gm.matmul"
        )
    return arrays.as_numpy(obj, its_view)
