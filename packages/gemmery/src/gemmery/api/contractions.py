"""tensordot, vecdot and einsum: contractions of two arrays that are one batch of products."""

# No `from __future__ import annotations` here: help() would show annotations as strings.
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from gemmery import arrays
from gemmery.api import opaque, products, subscripts, sums_of_products
from gemmery.api.one_product import Labels
from gemmery.api.options import check_numpys, in_order, record, single, viewed
from gemmery.api.promote import promoted
from gemmery.api.sums_of_products import Factor, contract, kind_of, merged, sum_of_products, with_transposes
from gemmery.arrays import view
from gemmery.cpu import entry
from gemmery.dtypes import get
from gemmery.errors import GemmeryError, ShapeError, brief, is_one
from gemmery.keywords import NO_OPTIONS, takes_options

if TYPE_CHECKING:
    from typing import Unpack

    from numpy.typing import NDArray

    from gemmery.keywords import ContractionOptions, EinsumOptions, Foreign, Out, Plain, VecdotOptions

Axes = int | tuple[int | Sequence[int], int | Sequence[int]]


@opaque.opaque
@takes_options
def _tensordot(a: Any, b: Any, axes: Any = 2, *, out: Any = None, **keywords: Any) -> Any:
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
        return _tensordot(a, b, axes, out=out, **keywords)
    options = record("tensordot", keywords) if keywords else NO_OPTIONS
    if out is None and options is NO_OPTIONS and sums_of_products.is_plain(a, b):
        try:
            labels = subscripts.of_tensordot(subscripts.pair_of(axes), tuple(a.shape), tuple(b.shape))
            result = sums_of_products.at_once(labels, a, b)
            if result is not None:
                if not _calls() % _SAMPLED:
                    ways = (axes, None) if type(axes) is int and axes == 2 else (axes,)
                    _remember("tensordot", ways, labels, a, b)
                return result
        except GemmeryError:  # which the way below tells in words of the arguments
            pass
    x, y = viewed("a", a), viewed("b", b)
    labels = subscripts.of_tensordot(subscripts.pair_of(axes), x.shape, y.shape)
    return contract(kind_of(a, b), labels, x, y, single(out), keywords)


if TYPE_CHECKING:  # mypy attaches a block to the function after it only if it contains nothing but overloads

    @overload
    def tensordot(
        a: Plain, b: Plain, axes: Axes = 2, *, out: None = None, **options: Unpack[ContractionOptions]
    ) -> NDArray[Any]: ...
    @overload
    def tensordot(
        a: Foreign | Plain, b: Foreign | Plain, axes: Axes = 2, *, out: None = None,
        **options: Unpack[ContractionOptions],
    ) -> Foreign: ...  # fmt: skip
    @overload
    def tensordot(a: Any, b: Any, axes: Axes = 2, *, out: Out, **options: Unpack[ContractionOptions]) -> Out: ...
    @overload
    def tensordot(a: Any, b: Any, axes: Axes = 2, *, out: Any = None, **options: Unpack[ContractionOptions]) -> Any: ...


@opaque.opaque
@functools.wraps(_tensordot)
def tensordot(*arguments: Any, **options: Any) -> Any:  # noqa: D103 # it has that of _tensordot
    return _entries["tensordot"](*arguments, **options)


@opaque.opaque
@takes_options
def _vecdot(a: Any, b: Any, /, out: Any = None, *, axis: int = -1, keepdims: bool = False, **keywords: Any) -> Any:
    """Return the dot products of the vectors of two arrays, as `numpy.vecdot` does.

    >>> import numpy as np, gemmery as gm
    >>> gm.vecdot(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([10.0, 1.0]))
    array([12., 34.])

    The vectors lie along `axis` of each operand; the other dimensions broadcast. Complex vectors of `a` are conjugated,
    which copies them; real operands are not copied. `out`, `dtype`, `threads` and `precision` are as in `matmul`.

    Each pair of vectors is a product of its own. Of many short vectors the first calls are slower than `numpy.vecdot`,
    until a kernel for their shape is compiled in the background.

    Raises the errors of `matmul`; ShapeError for vectors of different lengths, and for an `axis` that an operand does
    not have.
    """
    if opaque.waiting and opaque.settle():
        return _vecdot(a, b, out, axis=axis, keepdims=keepdims, **keywords)
    options = record("vecdot", keywords) if keywords else NO_OPTIONS
    axis = axis if type(axis) is int else subscripts.whole(axis, "axis")
    plain = out is None and axis == -1 and keepdims is False and options is NO_OPTIONS
    if plain and sums_of_products.is_plain(a, b):
        try:
            result = sums_of_products.rows_of(a, b)
            if result is not None:
                if not _calls() % _SAMPLED:
                    _remember("vecdot", (None,), subscripts.of_vecdot(-1, a.ndim, b.ndim), a, b)
                return result
        except (GemmeryError, IndexError):  # of arrays without dimensions, or with 64
            pass
    if type(keepdims) not in (bool, int, np.bool_) or keepdims not in (True, False):
        raise TypeError(f"keepdims={brief(keepdims)}: pass True or False")
    out = single(out)
    x, y = viewed("a", a), viewed("b", b)
    if get(x.dtype).kind == "c":
        arrays.unchanged(a=x)
        a = with_transposes(x, True).conj()
        x = view(a)
    labels = subscripts.of_vecdot(axis, len(x.shape), len(y.shape))
    place = axis % (len(labels.c) + 1)
    target = out
    if keepdims and out is not None:
        shape = viewed("out", out).shape
        if shape[place : place + 1] != (1,):
            raise ShapeError(f"out has shape {shape}: with keepdims=True its dimension {place} has length 1")
        target = out.squeeze(place)
    like = kind_of(a, b)
    result = contract(like, labels, x, y, target, keywords)
    if out is not None or not keepdims:
        return result if out is None else out
    result = np.asarray(result) if isinstance(result, memoryview) else result
    return arrays.wrap(like, result[(slice(None),) * place + (None,)])


if TYPE_CHECKING:

    @overload
    def vecdot(
        a: Plain, b: Plain, /, out: None = None, *, axis: int = -1, **options: Unpack[VecdotOptions]
    ) -> NDArray[Any]: ...
    @overload
    def vecdot(
        a: Foreign | Plain, b: Foreign | Plain, /, out: None = None, *, axis: int = -1, **options: Unpack[VecdotOptions]
    ) -> Foreign: ...
    @overload
    def vecdot(a: Any, b: Any, /, out: Out, *, axis: int = -1, **options: Unpack[VecdotOptions]) -> Out: ...
    @overload
    def vecdot(a: Any, b: Any, /, out: Any = None, *, axis: int = -1, **options: Unpack[VecdotOptions]) -> Any: ...


@opaque.opaque
@functools.wraps(_vecdot)
def vecdot(*arguments: Any, **options: Any) -> Any:  # noqa: D103 # it has that of _vecdot
    return _entries["vecdot"](*arguments, **options)


@opaque.opaque
@takes_options
def _einsum(
    expression: Any, /, *operands: Any, out: Any = None, optimize: Any = None, order: str = "K", casting: str = "safe",
    **keywords: Any,
) -> Any:  # fmt: skip
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
    `optimize` asks for as in `numpy.einsum_path`: "greedy", which is the default, "optimal" or a path; each product in
    between is rounded to the result's element type, in which it may overflow. One operand of which nothing is summed
    gives a view. `opt_einsum.contract(..., backend="gemmery")` calls this function.

    A new result is C-contiguous, unless both operands have a letter innermost that stands elsewhere in the result: it
    is innermost there too, as NumPy's "K" order has it. With `order="C"` or "F" a result of NumPy is in that order.

    Raises the errors of `matmul`, ShapeError for letters whose lengths differ, and ArgumentError for subscripts that
    are malformed.
    """
    if opaque.waiting and opaque.settle():
        return _einsum(expression, *operands, out=out, optimize=optimize, order=order, casting=casting, **keywords)
    options = record("einsum", keywords) if keywords else NO_OPTIONS
    plain = out is None and options is NO_OPTIONS and type(order) is type(casting) is type(expression) is str
    if plain and order == "K" and casting == "safe" and len(operands) == 2:
        a, b = operands
        if sums_of_products.is_plain(a, b):
            try:
                result = sums_of_products.quick(expression, a.ndim, b.ndim, type(a) is np.ndarray)(a, b)
                if result is not None:
                    if not _calls() % _SAMPLED:
                        (left, right), c = subscripts.labels(expression, (a.ndim, b.ndim))
                        _remember("einsum", (expression,), Labels(left, right, c), a, b)
                    return result
            except GemmeryError:  # of lengths that differ, of which one may be 1, among others
                pass
    out = single(out)
    order = str(order).upper() if is_one(order, tuple("KACFkacf")) else order
    check_numpys("einsum", {"casting": casting, "order": "K" if is_one(order, ("F",)) else order})
    if not isinstance(expression, str):
        expression, operands = subscripts.from_lists((expression, *operands))
    views = [viewed(subscripts.called(place), operand) for place, operand in enumerate(operands)]
    arrays.unchanged(**{subscripts.called(place): x for place, x in enumerate(views)})
    terms, letters = subscripts.labels(expression, tuple(len(x.shape) for x in views))
    factors = [Factor(*factor) for factor in zip(terms, operands, views, strict=True)]
    if len(factors) > 2:
        if options.dtype is None and len({x.dtype for x in views}) > 1:
            # Integers first: any two of them must fit in what all become.
            names = sorted((x.dtype for x in views), key=lambda name: get(name).kind in "fc")
            common = get(functools.reduce(promoted, names))
            if common.kind in "iu" or all(x.device == "cpu" for x in views):
                keywords = {**keywords, "dtype": common.numpy}
        steps = iter(subscripts.path(terms, [x.shape for x in views], letters, optimize)[:-1])
        while len(factors) > 2:
            places = next(steps, (0, 1))  # a path may leave several to its last step
            some = [factors[place] for place in places]
            factors = [factor for place, factor in enumerate(factors) if place not in places]
            factors.append(merged(some, {*letters, *itertools.chain(*(factor.labels for factor in factors))}, keywords))
    result = sum_of_products(factors, letters, keywords, out)
    return result if order == "K" or out is not None else in_order(result, order)


if TYPE_CHECKING:

    @overload
    def einsum(
        expression: str, a: Plain, b: Plain, /, *, out: None = None, **options: Unpack[EinsumOptions]
    ) -> NDArray[Any]: ...
    @overload
    def einsum(
        expression: str, a: Foreign | Plain, b: Foreign | Plain, /, *, out: None = None,
        **options: Unpack[EinsumOptions],
    ) -> Foreign: ...  # fmt: skip
    @overload
    def einsum(expression: str, a: Any, b: Any, /, *, out: Out, **options: Unpack[EinsumOptions]) -> Out: ...
    @overload
    def einsum(expression: Any, /, *operands: Any, out: Any = None, **options: Unpack[EinsumOptions]) -> Any: ...


@opaque.opaque
@functools.wraps(_einsum)
def einsum(*arguments: Any, **options: Any) -> Any:  # noqa: D103 # it has that of _einsum
    return _entries["einsum"](*arguments, **options)


_PYTHON: dict[str, Callable[..., Any]] = {"einsum": _einsum, "tensordot": _tensordot, "vecdot": _vecdot}
_entries = dict(_PYTHON)  # or the compiled entry, once a contraction has come often
_calls = itertools.count(1).__next__
_described: dict[str | int | None, str | int | None] = {}  # the last object of each value
_MOST_DESCRIBED = 256
_SAMPLED = 61  # the compiled entry is told of one contraction of so many: a prime, so that no loop of calls escapes it


def _remember(name: str, described: tuple[Any, ...], labels: Labels, a: Any, b: Any) -> None:
    """Let the compiled entry take contractions like this one, which may be described in several ways."""
    text = described[0]
    if type(text) not in (str, int, type(None)):
        return
    if _described.get(text) is not text:
        if len(_described) >= _MOST_DESCRIBED:
            _described.clear()
        _described[text] = text
        return  # the program may make its text anew for each call: then no address comes back
    _compile_entries()
    for way in described:
        with suppress(GemmeryError):  # PyTorch records or transforms operations, among others
            sums_of_products.remember(name, way, labels, a, b)


@functools.cache
def _compile_entries() -> None:
    """Replace gm.einsum, gm.tensordot and gm.vecdot by the compiled entry, where that of gm.matmul is in use."""
    if entry.active():
        _entries.update(zip(_PYTHON, products.compiled(_PYTHON), strict=True))
