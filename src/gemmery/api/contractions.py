"""tensordot, vecdot and einsum: contractions of two arrays that are one batch of products."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any, Literal, overload

from gemmery import arrays
from gemmery.api import opaque, products, subscripts
from gemmery.api.one_product import Labels, Turn, one_product, shape_of
from gemmery.api.options import dtype_name, thread_count
from gemmery.api.promote import promoted, widened
from gemmery.arrays import View, view
from gemmery.dtypes import get
from gemmery.errors import ArgumentError, DeviceError, LayoutError, ShapeError, brief

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import NDArray

    from gemmery.api.types import ContractionOptions, Foreign, Out, Plain

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
    x, y = view(a), view(b)
    labels = _tensordot(_pair(axes), x.shape, y.shape)
    return _contract(labels, a, b, x, y, out, dtype, threads, precision)


if TYPE_CHECKING:

    @overload
    def vecdot(
        a: Plain, b: Plain, /, out: None = None, *, axis: int = -1, **options: Unpack[ContractionOptions]
    ) -> NDArray[Any]: ...
    @overload
    def vecdot(
        a: Plain, b: Foreign, /, out: None = None, *, axis: int = -1, **options: Unpack[ContractionOptions]
    ) -> Foreign: ...
    @overload
    def vecdot(
        a: Foreign, b: Foreign | Plain, /, out: None = None, *, axis: int = -1, **options: Unpack[ContractionOptions]
    ) -> Foreign: ...
    @overload
    def vecdot(a: Any, b: Any, /, out: Out, *, axis: int = -1, **options: Unpack[ContractionOptions]) -> Out: ...
    @overload
    def vecdot(a: Any, b: Any, /, out: Any = None, *, axis: int = -1, **options: Unpack[ContractionOptions]) -> Any: ...


@opaque.opaque
def vecdot(
    a: Any,
    b: Any,
    /,
    out: Any = None,
    *,
    axis: int = -1,
    dtype: Any = None,
    threads: int | None = None,
    precision: Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"] | None = None,
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
        return vecdot(a, b, out, axis=axis, dtype=dtype, threads=threads, precision=precision)
    x, y = view(a), view(b)
    if get(x.dtype).kind == "c":
        arrays.unchanged(a=x)
        a = _with_transposes(a, x, arrays.allocates(a)).conj()
        x = view(a)
    labels = _vecdot(axis, len(x.shape), len(y.shape))
    return _contract(labels, a, b, x, y, out, dtype, threads, precision)


if TYPE_CHECKING:

    @overload
    def einsum(
        expression: str, a: Plain, b: Plain, /, *, out: None = None, **options: Unpack[ContractionOptions]
    ) -> NDArray[Any]: ...
    @overload
    def einsum(
        expression: str, a: Plain, b: Foreign, /, *, out: None = None, **options: Unpack[ContractionOptions]
    ) -> Foreign: ...
    @overload
    def einsum(
        expression: str, a: Foreign, b: Foreign | Plain, /, *, out: None = None, **options: Unpack[ContractionOptions]
    ) -> Foreign: ...
    @overload
    def einsum(expression: str, a: Any, b: Any, /, *, out: Out, **options: Unpack[ContractionOptions]) -> Out: ...
    @overload
    def einsum(expression: str, /, *operands: Any, out: Any = None, **options: Unpack[ContractionOptions]) -> Any: ...


@opaque.opaque
def einsum(
    expression: str,
    /,
    *operands: Any,
    out: Any = None,
    dtype: Any = None,
    threads: int | None = None,
    precision: Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"] | None = None,
) -> Any:
    """Return the contraction of two arrays that letters describe, as `numpy.einsum` does, where it is a product.

    >>> import numpy as np, gemmery as gm
    >>> queries, keys = np.ones((2, 5, 4, 8)), np.ones((2, 7, 4, 8))  # batch, position, head, feature
    >>> gm.einsum("bqhd,bkhd->bhqk", queries, keys).shape
    (2, 4, 5, 7)

    The expression has the letters of both operands and, after "->", those of the result; without "->" the result has
    the letters that occur once, in alphabetical order. "..." stands for any dimensions, which broadcast. A letter in
    both operands is summed, or a batch if it is in the result too.

    The contraction is one batch of products of `matmul`: its element types, accuracy, determinism, and kinds of arrays.
    `out`, `dtype`, `threads` and `precision` are as there. Operands are not copied, except one in which several letters
    are summed and no single stride walks them.

    Raises the errors of `matmul`, ShapeError for letters whose lengths differ, and ArgumentError for all that is no
    product of two arrays: one operand or three, a letter repeated in one operand (a diagonal), a letter summed in one
    operand alone, a product element by element. `opt_einsum.contract` computes those.
    """
    if opaque.waiting and opaque.settle():
        return einsum(expression, *operands, out=out, dtype=dtype, threads=threads, precision=precision)
    if not isinstance(expression, str):
        raise ArgumentError(
            f"the subscripts of einsum are {brief(expression)}: pass a string such as 'ij,jk->ik', then two arrays"
        )
    if len(operands) != 2:
        raise subscripts.count_refused(len(operands))
    a, b = operands
    x, y = view(a), view(b)
    labels = subscripts.labels(expression, len(x.shape), len(y.shape))
    return _contract(labels, a, b, x, y, out, dtype, threads, precision)


def _contract(
    labels: Labels,
    a: Any,
    b: Any,
    x: View,
    y: View,
    out: Any,
    dtype: Any,
    threads: int | None,
    precision: Literal["tf32", "f32_tensor", "f32_strict", "f32_plus", "f64_normwise"] | None,
) -> Any:
    """Compute a contraction of a and b, with the views x and y, as one batch of products."""
    like = arrays.kind(a, b)
    own = arrays.allocates(like)
    shape = shape_of(labels, x.shape, y.shape)
    array, steps, target = None, None, None if out is None else view(out)
    threads, dtype = thread_count(threads), None if dtype is None else get(dtype_name(dtype)).numpy
    arrays.unchanged(a=x, b=y, out=target)  # from here on no code of an argument runs
    if target is not None:
        _check_out(target, shape)
        array, steps = _with_transposes(out, target, arrays.allocates(out)), target.strides
    form = one_product(labels, x.shape, x.strides, y.shape, y.strides, shape, steps)
    if array is None and form.c.moves:
        array = arrays.empty(like if own else None, shape, _result(x, y, dtype))[0]
    product = products.matmul(
        _turned(_with_transposes(a, x, own), form.a),
        _turned(_with_transposes(b, y, own), form.b),
        None if array is None else _turned(array, form.c),
        dtype=dtype,
        threads=threads,
        precision=precision,
    )
    if out is not None:
        return out
    return arrays.wrap(like, product.reshape(shape) if array is None else array)


def _check_out(target: View, shape: tuple[int, ...]) -> None:
    """Raise unless `out` has the shape of the result and can be written; `matmul` checks the rest."""
    if target.shape != shape:
        raise ShapeError(f"out of shape {target.shape} is non-broadcastable; the result has shape {shape}")
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


def _turned(array: Any, turn: Turn) -> Any:
    """Reorder and merge dimensions; a view of the same memory where the strides allow it."""
    if turn.moves:
        array = array.permute(turn.axes) if hasattr(array, "permute") else array.transpose(turn.axes)
    return array if array.shape == turn.shape else array.reshape(turn.shape)


@lru_cache(maxsize=256)
def _vecdot(axis: Any, a: int, b: int) -> Labels:
    """Return the labels of a vecdot: 0 for the vectors, -1, -2, ... from the last for the other dimensions."""
    sides = []
    for count in (a, b):
        place = _dimension(axis, count, "axis")
        sides.append((*range(1 - count, place - count + 1), 0, *range(place - count + 1, 0)))
    left, right = sides
    return Labels(left, right, tuple(sorted({*left, *right} - {0})))


def _pair(axes: Any) -> int | tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the axes of tensordot as a number, or as two tuples."""
    with suppress(TypeError):  # of what is no number: an array has __index__ too
        return index(axes)
    try:
        ours, theirs = map(_side, axes)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"axes={brief(axes)}: pass a number of dimensions, or the dimensions of a and of b as a pair of lists"
        ) from error
    return ours, theirs


def _side(axes: Any) -> tuple[Any, ...]:
    """Return the dimensions of one operand, of which there may be one alone, not in a list."""
    with suppress(TypeError):
        return (index(axes),)
    return tuple(axes)


@lru_cache(maxsize=256)
def _tensordot(
    axes: int | tuple[tuple[Any, ...], tuple[Any, ...]], a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> Labels:
    """Return the labels of a tensordot: the numbers of the dimensions of a, then of those of b that are its own."""
    a, b = len(a_shape), len(b_shape)
    if isinstance(axes, int):
        if not 0 <= axes <= min(a, b):
            raise ShapeError(f"axes={axes} of operands of shapes {a_shape} and {b_shape}: it must be 0 to {min(a, b)}")
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


def _dimension(axis: Any, count: int, name: str) -> int:
    """Return a dimension counted from 0."""
    try:
        place = index(axis)
    except TypeError as error:
        raise ArgumentError(f"{name} contains {brief(axis)}, which is no dimension; pass integers") from error
    if not -count <= place < count:
        raise ShapeError(f"{name} contains dimension {place}, and the operand has {count}; the first is 0, the last -1")
    return place % count
