"""A checked call on the CPU: its kernel is prepared, runs, and is kept for the compiled entry; and log_sum_exp."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from gemmery import arrays, dispatch, dtypes
from gemmery.api import repeats
from gemmery.api.checked import bias_shape, checked_call
from gemmery.api.device_call import CheckedCall
from gemmery.api.promote import kernel_types, mixed
from gemmery.api.repeats import Prepared
from gemmery.arrange import Ints, arrange, layout
from gemmery.arrays import View, view
from gemmery.cpu import entry
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.cpu.packed_once import PackedView
from gemmery.dispatch import cpu
from gemmery.dtypes import Array
from gemmery.keywords import NO_OPTIONS
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

_COUNTED = 2**32 - 1  # pairs of bools that 32 bits can count
_ONCE = ((0, 0, 0),)
_ZEROS = np.zeros(2)  # 16 bytes: one zero of any element type


class KernelTypes(NamedTuple):
    """The element types of a kernel."""

    a: str
    b: str
    c: str


def product(call: CheckedCall, out: Any) -> Any:
    """Return the product of a call on the CPU, in `out` or in a new array of the operands' kind."""
    if call.options.semiring == "log_sum_exp":
        return _log_sum_exp_product(call, out)
    arrays.unchanged(a=call.a, b=call.b, c=call.old, bias=call.bias, out=None if out is None else call.c)
    if isinstance(call.b, PackedView):
        a, b = call.operands
        own = call.b.dtype if mixed(call.a.dtype, call.b.dtype, call.result) else call.common
        b.check(own, call.result, call.options.semiring or "")
        call = call._replace(operands=(a, b.array), b=call.b._replace(owner=b.array))
    if out is None:
        like = arrays.kind(*call.operands)
        c = arrays.empty(like, call.c.shape, call.result)
        _compute(with_accumulators(call), c)
        return arrays.wrap(like, c.owner)
    call = with_accumulators(call)
    casts = call.c.dtype != call.result
    old = None if call.old is None or arrays.same(call.old, call.c) else call.old
    # C would change before all is read; another `out` like this one may not overlap.
    if casts or any(z is not None and arrays.overlap(z, call.c) for z in (call.a, call.b, call.bias, old)):
        _compute_aside(call, call.c, out if casts else None)
    else:
        _compute(call, call.c, out)
    arrays.written(out)
    return out


def with_accumulators(call: CheckedCall) -> CheckedCall:
    """Return a call whose bias is n contiguous accumulators for kernels, or one with stride 0."""
    bias = call.bias
    if bias is None:
        return call
    row = arrays.converted(bias, dtypes.get(call.result).accumulator)
    step = 0 if bias.shape in ((), (1,)) else row.strides[0]
    return call._replace(bias=row._replace(shape=bias_shape(call.b), strides=(step,)))


@lru_cache(maxsize=4096)
def prepare(
    types: KernelTypes, shapes: tuple[Ints, Ints, Ints], strides: tuple[Ints, Ints, Ints], epilogue: str = "",
    scaled: bool = False, invariant: bool = False, semiring: str | None = None, packed: bool = False,
) -> Prepared | None:  # fmt: skip
    """Return the kernel and the form of a product; cached for each combination of types, shapes and strides.

    Kernels store vectors: the result is None where C's elements are adjacent neither in rows nor in columns, and where
    they are in columns and there is an epilogue or a `packed` B.
    """
    size, out_size, by_rows = dtypes.get(types.a).size, dtypes.get(types.c).size, packed or bool(epilogue)
    (a, b, c), (a_strides, b_strides, c_strides) = shapes, strides
    form = arrange(a, a_strides, b, b_strides, c, c_strides, out_size, more_columns=not by_rows)
    c_layout = layout(form.m, form.n, form.c[1], form.c[2], out_size)
    a_layout, b_layout = layout(form.m, form.k, *form.a[1:], size), layout(form.k, form.n, *form.b[1:], size)
    problem = Problem(
        *(form.m, form.n, form.k, types.a, types.c, form.batch, a_layout, "packed" if packed else b_layout, c_layout),
        *(epilogue, scaled),
        invariant=invariant,
        semiring=semiring or "",
        b_dtype=types.b if types.b != types.a else "",
        interleaved=not semiring and types.a == types.c and size == form.a[0] == form.b[0] == form.c[0],
    )
    if problem.interleaved and not cpu.along_batch(problem):
        problem = problem._replace(interleaved=False)
    if not problem.interleaved and (c_layout == "any" or (by_rows and c_layout == "col")):
        return None
    return Prepared(dispatch.plan(problem), problem, form)


def _compute(call: CheckedCall, c: View, out: Any = None) -> None:
    """Write the product to `c`, the memory of `out` or of a new array, which overlaps no input."""
    if 0 in c.shape:
        return
    if call.result == "bool":
        _compute_any(call, c)
        return
    a, b = call.a, call.b
    types = types_of(call)
    if call.options.alpha == 0:  # BLAS then reads neither A nor B
        a, b = _zero(a, types.a, -1), _zero(b, types.b, max(-2, -len(b.shape)))
    a = a if a.dtype == types.a else arrays.converted(a, types.a)
    b = b if b.dtype == types.b or isinstance(b, PackedView) else arrays.converted(b, types.b)
    prepared = prepared_for(call, types, a, b, c)
    if prepared is None:
        _compute_aside(call, c, out)
        return
    _launch(call, prepared, (a, b, c), out)


_WORTH = 64 * 64  # elements of a matrix in a batch, below which converting is faster than a product by itself


def types_of(call: CheckedCall) -> KernelTypes:
    """Return the element types of the kernel for a call."""
    a, b = call.a, call.b
    batch = max(len(a.shape), len(b.shape)) > 2 and not isinstance(b, PackedView)  # panels cannot be converted
    if mixed(a.dtype, b.dtype, call.result) and not (batch and min(math.prod(z.shape[-2:]) for z in (a, b)) < _WORTH):
        return KernelTypes(a.dtype, b.dtype, call.result)
    source, out = kernel_types(call.common, call.result)
    return KernelTypes(source, source, out)


def prepared_for(call: CheckedCall, types: KernelTypes, a: View, b: View, c: View) -> Prepared | None:
    """Return what `prepare` returns for a call, with A, B and C as kernels of these types take them."""
    options, packed = call.options, isinstance(b, PackedView)
    shapes, strides = (a.shape, b.shape, c.shape), (a.strides, b.strides, c.strides)
    return prepare(
        types, shapes, strides, call.epilogue, call.scaled, bool(options.batch_invariant), options.semiring, packed
    )


def _compute_aside(call: CheckedCall, c: View, out: Any) -> None:
    """Compute the product in scratch memory, then copy it: for a `c` that no kernel can write directly."""
    scratch = arrays.scratch(c.shape, call.result)
    _compute(call, scratch)
    arrays.store(scratch, c)
    repeats.remember_aside(call, c, out)


def _compute_any(call: CheckedCall, c: View) -> None:
    """Write the product of bools: true where any pair is true, so where a count of such pairs is not 0."""
    source, out = kernel_types("bool", "bool")
    if call.a.shape[-1] > _COUNTED:  # a count in 32 bits could wrap around to 0; a sum of floats stops at 2**24
        source = out = "f32"
    counts = arrays.scratch(c.shape, out)
    _compute(call._replace(common=source, result=out), counts)
    arrays.store(counts, c)


def _launch(call: CheckedCall, prepared: Prepared, used: tuple[View, View, View], out: Any) -> None:
    """Run the kernel for every offset of the form, and tell the compiled entry."""
    kernel, options, c = prepared.plan.kernel, call.options, used[2]
    generation, threads = cpu_threads.generation, options.threads or cpu_threads.get()
    if call.old is not None and not arrays.same(call.old, c):
        if isinstance(kernel, Launch):  # C keeps its values when there is no memory for the product
            kernel.reserve(*prepared.operands(*used), threads)
        arrays.store(call.old, c)
    form, job = prepared.form, b""
    for offset in form.offsets() if form.loops else _ONCE:
        views = prepared.operands(*used, offset)
        if isinstance(kernel, Launch):
            job = kernel.job(*views, options.alpha, options.beta, call.bias, threads)
            kernel.run(job, *views[:2])
        else:
            kernel(*views, alpha=options.alpha, beta=options.beta, bias=call.bias, threads=threads)
    if job and (used[0] is call.a or not isinstance(call.b, PackedView)):  # compiled code converts both, or none
        repeats.remember(call, prepared, used, out, threads, job)
    if cpu_threads.generation != generation:  # set_num_threads was called meanwhile, perhaps by another thread
        entry.forget()


def _zero(x: View, dtype: str, axis: int) -> View:
    """Return a view of zeros with the shape of x, but length 1 along `axis`."""
    shape = list(x.shape)
    shape[axis] = 1
    return View(_ZEROS.ctypes.data, tuple(shape), (0,) * len(shape), dtype, owner=_ZEROS)


# ---- semirings ----
# C[i, j] is the "sum" over k of the "products" of A[i, k] and B[k, j]:
#
# | semiring | product | sum | where k is 0 |
# | --- | --- | --- | --- |
# | min_plus | a + b | the least | inf |
# | max_plus | a + b | the largest | -inf |
# | max_times | a b | the largest | -inf |
# | or_and | a and b | or | False |
# | log_sum_exp | a + b | log(sum(exp(...))) | -inf |
#
# Each product of the first three is rounded once, in float64, or in float32 for narrower types, and nothing else is.
# One that is NaN (inf - inf, 0 inf, an operand) is left out, as np.fmin and np.fmax leave it out; log_sum_exp keeps it.

# Sums of exponentials below this may have lost terms that underflow; those above lost less than 2^-60 of themselves.
_LEAST = 2.0**-900
_AT_ONCE = 1 << 20  # terms that are evaluated one by one at a time


def _log_sum_exp_product(call: CheckedCall, out: Any) -> Any:
    """Return the product in the semiring log_sum_exp, as `product` does."""
    a, b = call.operands
    if isinstance(call.b, PackedView):
        b.check(call.common, call.result, call.options.semiring)
    arrays.unchanged(a=call.a, b=call.b, out=None if out is None else call.c)
    p, q = (arrays.as_numpy(z if z.dtype == "f64" else arrays.converted(z, "f64")) for z in (call.a, call.b))
    value = log_sum_exp(p, q, call.options.threads)
    like = arrays.kind(a, b) if out is None else value
    c = arrays.empty(like, value.shape, call.result)
    arrays.store(view(value), c)
    if out is None:
        return arrays.wrap(like, c.owner)
    arrays.store(c, call.c)
    arrays.written(out)
    return out


def log_sum_exp(a: Array, b: Array, threads: int | None) -> Array:
    """Return log(sum over k of exp(a[i, k] + b[k, j])) of float64.

    That is a product of exponentials, each divided by that of the largest element of its row of A or column of B. Where
    it is so small that terms may be lost, or no number, its terms are summed one by one, next to the largest.
    """
    one_row, one_column = a.ndim == 1, b.ndim == 1
    a, b = a[None] if one_row else a, b[:, None] if one_column else b
    if a.shape[-1] == b.shape[-2] == 0:
        values = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), -np.inf)
    else:
        with np.errstate(all="ignore"):
            tops = [_finite(z.max(axis, keepdims=True, initial=-np.inf)) for z, axis in ((a, -1), (b, -2))]
            p, q = (np.exp(z - top) for z, top in zip((a, b), tops, strict=True))
            options = NO_OPTIONS._replace(threads=threads)
            sums = product(checked_call("matmul", view(p), view(q), None, options, operands=(p, q)), None)
            values = np.log(sums) + tops[0] + tops[1]
            lost = ~((sums >= _LEAST) & (sums < np.inf))
        if lost.any():
            values[lost] = _one_by_one(a, b, np.nonzero(lost))
    values = values.squeeze(-1) if one_column else values  # of operands of one dimension
    return values.squeeze(-1 if one_column else -2) if one_row else values


def _finite(tops: Array) -> Array:
    """Return the largest elements, and 0 where they are infinite or NaN."""
    return np.where(np.isfinite(tops), tops, 0)


def _one_by_one(a: Array, b: Array, places: tuple[Array, ...]) -> Array:
    """Return elements of the result at these indices, each from all of its terms."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(z, (*batch, *z.shape[-2:])) for z in (a, b))
    values = np.empty(len(places[0]))
    step = max(1, _AT_ONCE // a.shape[-1])
    for first in range(0, len(values), step):
        *along, i, j = (each[first : first + step] for each in places)
        with np.errstate(all="ignore"):
            terms = a[(*along, i)] + np.moveaxis(b, -2, -1)[(*along, j)]
            top = _finite(terms.max(-1, keepdims=True))
            values[first : first + step] = np.log(np.exp(terms - top).sum(-1)) + top[:, 0]
    return values
