"""A product of two views into CPU memory: the part that every public function shares."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from gemmery import arrays, dispatch, dtypes
from gemmery.api import repeats
from gemmery.api.promote import can_cast, kernel_types, mixed
from gemmery.api.repeats import PLAIN, Call, Prepared, Terms
from gemmery.arrange import Ints, arrange, layout, result_shape
from gemmery.arrays import View, view
from gemmery.cpu import entry
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.cpu.packed_once import PackedView
from gemmery.dispatch import cpu
from gemmery.errors import DTypeError, LayoutError, ShapeError
from gemmery.problem import Problem

_COUNTED = 2**32 - 1  # pairs of bools that 32 bits can count
_ONCE = ((0, 0, 0),)
_ZEROS = np.zeros(2)  # 16 bytes: one zero of any element type


def product(a: Any, b: Any, x: View, y: View, common: str, result: str, out: Any, terms: Terms) -> Any:
    """Return the product of the views x and y of a and b, in `out` or in a new array of their kind.

    `common` is the element type to which x and y promote, `result` that of the product.
    """
    shape = result_shape(x.shape, y.shape)
    call = Call(a, b, x, y, common, result, terms)
    if isinstance(y, PackedView):
        b.check(y.dtype if mixed(x.dtype, y.dtype, result) else common, result, terms.semiring)
        call = call._replace(b=b.array, y=y._replace(owner=b.array))
    if out is None:
        like = arrays.kind(a, b)
        target = arrays.empty(like, shape, result)
        arrays.unchanged(a=x, b=y, c=terms.old, bias=terms.bias_view)
        _compute(call, target)
        return arrays.wrap(like, target.owner)
    target = view(out)
    if not x.device == y.device == target.device:
        arrays.together(a=x, b=y, out=target)
    writable(target, shape, result)
    arrays.unchanged(a=x, b=y, c=terms.old, bias=terms.bias_view, out=target)
    casts = target.dtype != result
    if casts or _overlaps(target, x, y, terms):  # another `out` like this one may not overlap
        _compute_aside(call, target, out if casts else None)
    else:
        _compute(call, target, out)
    arrays.written(out)
    return out


def _overlaps(target: View, x: View, y: View, terms: Terms) -> bool:
    """Return True if writing to `target` would change an input before it is read."""
    if arrays.overlap(x, target) or arrays.overlap(y, target):
        return True
    if terms is PLAIN:
        return False
    others = (terms.bias, None if terms.old is None or arrays.same(terms.old, target) else terms.old)
    return any(z is not None and arrays.overlap(z, target) for z in others)


@lru_cache(maxsize=4096)
def prepare(
    source: str,
    out: str,
    x_shape: Ints,
    x_strides: Ints,
    y_shape: Ints,
    y_strides: Ints,
    shape: Ints,
    strides: Ints,
    epilogue: str,
    scaled: bool,
    invariant: bool = False,
    packed: bool = False,
    other: str = "",
    semiring: str = "",
) -> Prepared | None:
    """Return the kernel and the form of a product; cached for each combination of shapes and strides.

    `other` is the element type of B where it is not `source`. Kernels store vectors: the result is None where C's
    elements are adjacent neither in rows nor in columns, and where they are in columns and there is an epilogue
    or a packed B.
    """
    size, out_size, by_rows = dtypes.get(source).size, dtypes.get(out).size, packed or bool(epilogue)
    form = arrange(x_shape, x_strides, y_shape, y_strides, shape, strides, out_size, more_columns=not by_rows)
    c_layout = layout(form.m, form.n, form.c[1], form.c[2], out_size)
    problem = Problem(
        form.m,
        form.n,
        form.k,
        source,
        out,
        form.batch,
        layout(form.m, form.k, form.a[1], form.a[2], size),
        "packed" if packed else layout(form.k, form.n, form.b[1], form.b[2], size),
        c_layout,
        epilogue,
        scaled,
        invariant=invariant,
        semiring=semiring,
        b_dtype=other,
        interleaved=not semiring and source == out and size == form.a[0] == form.b[0] == form.c[0],
    )
    if problem.interleaved and not cpu.along_batch(problem):
        problem = problem._replace(interleaved=False)
    if not problem.interleaved and (c_layout == "any" or (by_rows and c_layout == "col")):
        return None
    return Prepared(dispatch.plan(problem), problem, form)


def _compute(call: Call, target: View, out: Any = None) -> None:
    """Write the product to `target`, the memory of `out` or of a new array, which overlaps no input."""
    if 0 in target.shape:
        return
    if call.result == "bool":
        _compute_any(call, target)
        return
    x, y, terms = call.x, call.y, call.terms
    source, kernel_out, other = types_of(x, y, call.common, call.result)
    if terms.alpha == 0:  # BLAS then reads neither A nor B
        x, y = _zero(x, source, -1), _zero(y, other or source, max(-2, -len(y.shape)))
    x = x if x.dtype == source else arrays.converted(x, source)
    y = y if y.dtype == (other or source) or isinstance(y, PackedView) else arrays.converted(y, source)
    scaled = terms.alpha != 1 or terms.beta != 0
    prepared = prepared_for(
        source, kernel_out, x, y, target, terms.epilogue, scaled, terms.invariant, other, terms.semiring
    )
    if prepared is None:
        _compute_aside(call, target, out)
        return
    _launch(call, prepared, x, y, target, out)


_WORTH = 64 * 64  # elements of a matrix in a batch, below which converting is faster than a product by itself


def types_of(x: View, y: View, common: str, result: str) -> tuple[str, str, str]:
    """Return the element types of the kernel for two operands: of A, of C, and of B if it is not that of A."""
    batch = max(len(x.shape), len(y.shape)) > 2 and not isinstance(y, PackedView)  # panels cannot be converted
    if mixed(x.dtype, y.dtype, result) and not (batch and min(math.prod(z.shape[-2:]) for z in (x, y)) < _WORTH):
        return x.dtype, result, y.dtype
    return *kernel_types(common, result), ""


def prepared_for(
    source: str,
    out: str,
    x: View,
    y: View,
    target: View,
    epilogue: str = "",
    scaled: bool = False,
    invariant: bool = False,
    other: str = "",
    semiring: str = "",
) -> Prepared | None:
    """Return `prepare` of these views."""
    terms = epilogue, scaled, invariant, isinstance(y, PackedView), other, semiring
    return prepare(source, out, x.shape, x.strides, y.shape, y.strides, target.shape, target.strides, *terms)


def _compute_aside(call: Call, target: View, out: Any) -> None:
    """Compute the product in scratch memory, then copy it: for a `target` that no kernel can write directly."""
    scratch = arrays.scratch(target.shape, call.result)
    _compute(call, scratch)
    arrays.store(scratch, target)
    repeats.remember_aside(call, target, out)


def _compute_any(call: Call, target: View) -> None:
    """Write the product of bools: true where any pair is true, so where a count of such pairs is not 0."""
    source, out = kernel_types("bool", "bool")
    if call.x.shape[-1] > _COUNTED:  # a count in 32 bits could wrap around to 0; a sum of floats stops at 2**24
        source = out = "f32"
    counts = arrays.scratch(target.shape, out)
    _compute(call._replace(common=source, result=out, terms=call.terms._replace(widens=True)), counts)
    arrays.store(counts, target)


def _launch(call: Call, prepared: Prepared, x: View, y: View, target: View, out: Any) -> None:
    """Run the kernel for every offset of the form, and tell the compiled entry."""
    kernel, terms = prepared.plan.kernel, call.terms
    generation, threads = cpu_threads.generation, terms.threads or cpu_threads.get()
    if terms.old is not None and not arrays.same(terms.old, target):
        if isinstance(kernel, Launch):  # `target` keeps its values when there is no memory for the product
            kernel.reserve(*prepared.operands(x, y, target), threads)
        arrays.store(terms.old, target)
    form, job = prepared.form, b""
    for offset in form.offsets() if form.loops else _ONCE:
        a, b, c = prepared.operands(x, y, target, offset)
        if isinstance(kernel, Launch):
            job = kernel.job(a, b, c, terms.alpha, terms.beta, terms.bias, threads)
            kernel.run(job, a, b)
        else:
            kernel(a, b, c, alpha=terms.alpha, beta=terms.beta, bias=terms.bias, threads=threads)
    if job and (x is call.x or not isinstance(y, PackedView)):  # compiled code converts both operands, or none
        repeats.remember(call, prepared, (x, y, target), out, threads, job)
    if cpu_threads.generation != generation:  # set_num_threads was called meanwhile, perhaps by another thread
        entry.forget()


def _zero(x: View, dtype: str, axis: int) -> View:
    """Return a view of zeros with the shape of x, but length 1 along `axis`."""
    shape = list(x.shape)
    shape[axis] = 1
    return View(_ZEROS.ctypes.data, tuple(shape), (0,) * len(shape), dtype, owner=_ZEROS)


def writable(target: View, shape: Ints, result: str) -> None:
    """Raise unless `out` can be written and takes a result of this shape and element type."""
    if target.shape != shape:
        raise ShapeError(
            f"out has shape {target.shape}, and the product {shape}, to which it is non-broadcastable; pass an out of "
            "that shape"
        )
    if not can_cast(result, target.dtype, "same_kind"):
        have, want = dtypes.get(result).numpy, dtypes.get(target.dtype).numpy
        raise DTypeError(
            f"Cannot cast ufunc 'matmul' output from {have} to {want} with casting rule 'same_kind'; pass an out of "
            f"{have}"
        )
    if not target.writable:
        raise LayoutError(
            "out cannot be written in place: it is read-only, has a foreign byte order, or is not an array"
        )
    if arrays.repeats(target):
        raise LayoutError(
            f"out has strides {target.strides}, so its elements share memory; pass one whose elements do not overlap"
        )
