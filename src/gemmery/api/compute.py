"""A product of two views into CPU memory: the part that every public function shares."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gemmery import arrays, dispatch, dtypes
from gemmery.api.promote import can_cast, kernel_types
from gemmery.arrange import Arrangement, Ints, Three, arrange, layout, result_shape
from gemmery.arrays import View, view
from gemmery.cpu import entry
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.errors import DTypeError, LayoutError, ShapeError
from gemmery.problem import Problem

_COUNTED = 2**32 - 1  # pairs of bools that 32 bits can count
_ONCE = ((0, 0, 0),)
_ZEROS = np.zeros(2)  # 16 bytes: one zero of any element type


class Terms(NamedTuple):
    """The parameters of a product besides A and B."""

    alpha: complex = 1
    beta: complex = 0
    old: View | None = None  # the C that beta multiplies
    epilogue: str = ""
    bias: View | None = None
    threads: int | None = None


PLAIN = Terms()


class Prepared(NamedTuple):
    """A product without its memory."""

    plan: dispatch.Plan
    problem: Problem
    form: Arrangement


def product(a: Any, b: Any, x: View, y: View, common: str, result: str, out: Any, terms: Terms) -> Any:
    """Return the product of the views x and y of a and b, in `out` or in a new array of their kind.

    `common` is the element type to which x and y promote, `result` that of the product.
    """
    shape = result_shape(x.shape, y.shape)
    if out is None:
        like = arrays.kind(a, b)
        made, target = arrays.empty(like, shape, result)
        _compute(x, y, common, result, target, terms)
        return arrays.wrap(like, made)
    target = view(out)
    if not x.device == y.device == target.device:
        arrays.together(a=x, b=y, out=target)
    writable(target, shape, result)
    if target.dtype == result and not _overlaps(target, x, y, terms):
        _compute(x, y, common, result, target, terms)
    else:
        _compute_aside(x, y, common, result, target, terms)
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
) -> Prepared | None:
    """Return the kernel and the form of a product; cached for each combination of shapes and strides.

    Kernels store vectors: the result is None where C's elements are adjacent neither in rows nor in columns, and where
    they are adjacent in columns and there is an epilogue.
    """
    size, out_size = dtypes.get(source).size, dtypes.get(out).size
    form = arrange(x_shape, x_strides, y_shape, y_strides, shape, strides, out_size, more_columns=not epilogue)
    c_layout = layout(form.m, form.n, form.c[1], form.c[2], out_size)
    if c_layout == "any" or (epilogue and c_layout == "col"):
        return None
    problem = Problem(
        form.m,
        form.n,
        form.k,
        source,
        out,
        form.batch,
        layout(form.m, form.k, form.a[1], form.a[2], size),
        layout(form.k, form.n, form.b[1], form.b[2], size),
        c_layout,
        epilogue,
        scaled,
    )
    return Prepared(dispatch.plan(problem), problem, form)


def _compute(x: View, y: View, common: str, result: str, target: View, terms: Terms) -> None:
    """Write the product to `target`, which has element type `result` and overlaps no input."""
    if 0 in target.shape:
        return
    if result == "bool":
        _compute_any(x, y, target, terms)
        return
    source, out = kernel_types(common, result)
    if terms.alpha == 0:  # BLAS then reads neither A nor B
        x, y = _zero(x, source, -1), _zero(y, source, max(-2, -len(y.shape)))
    repeats = terms is PLAIN and x.dtype == y.dtype == source and len(x.shape) == len(y.shape) == 2
    x = x if x.dtype == source else arrays.converted(x, source)
    y = y if y.dtype == source else arrays.converted(y, source)
    scaled = terms.alpha != 1 or terms.beta != 0
    prepared = prepare(
        source, out, x.shape, x.strides, y.shape, y.strides, target.shape, target.strides, terms.epilogue, scaled
    )
    if prepared is None:
        _compute_aside(x, y, source, result, target, terms)
        return
    _launch(prepared, x, y, target, terms, repeats)


def _compute_aside(x: View, y: View, common: str, result: str, target: View, terms: Terms) -> None:
    """Compute the product in scratch memory, then copy it: for a `target` that no kernel can write directly."""
    scratch = arrays.scratch(target.shape, result)
    _compute(x, y, common, result, scratch, terms)
    arrays.store(scratch, target)


def _compute_any(x: View, y: View, target: View, terms: Terms) -> None:
    """Write the product of bools: true where any pair is true, so where a count of such pairs is not 0."""
    source, out = kernel_types("bool", "bool")
    if x.shape[-1] > _COUNTED:  # a count in 32 bits could wrap around to 0; a sum of floats stops at 2**24
        source = out = "f32"
    counts = arrays.scratch(target.shape, out)
    _compute(x, y, source, out, counts, terms)
    arrays.store(counts, target)


def _launch(prepared: Prepared, x: View, y: View, target: View, terms: Terms, repeats: bool) -> None:
    """Run the kernel for every offset of the form; `repeats` if the compiled entry takes more products like it."""
    kernel = prepared.plan.kernel
    generation, threads = cpu_threads.generation, terms.threads or cpu_threads.get()
    if terms.old is not None and not arrays.same(terms.old, target):
        if isinstance(kernel, Launch):  # `target` keeps its values when there is no memory for the product
            kernel.reserve(*_operands(prepared, x, y, target, (0, 0, 0)), threads)
        arrays.store(terms.old, target)
    form = prepared.form
    for offset in form.offsets() if form.loops else _ONCE:
        a, b, c = _operands(prepared, x, y, target, offset)
        kernel(a, b, c, alpha=terms.alpha, beta=terms.beta, bias=terms.bias, threads=threads)
    if repeats:
        _remember(prepared, x, y, target, threads)
        if cpu_threads.generation != generation:  # set_num_threads was called meanwhile, perhaps by another thread
            entry.forget()


def _operands(prepared: Prepared, x: View, y: View, target: View, offset: Three) -> tuple[View, View, View]:
    """Return the operands of one run of the kernel."""
    problem, form = prepared.problem, prepared.form
    batch, m, n, k = form.batch, form.m, form.n, form.k
    return (
        View(x.pointer + offset[0], (batch, m, k), form.a, problem.dtype),
        View(y.pointer + offset[1], (batch, k, n), form.b, problem.dtype),
        View(target.pointer + offset[2], (batch, m, n), form.c, problem.out),
    )


def _remember(prepared: Prepared, x: View, y: View, target: View, threads: int) -> None:
    """Store the product in the compiled entry, for more products of matrices like these."""
    kernel = prepared.plan.kernel
    a, b, c = (_matrix(z) for z in (x, y, target))
    if a is None or b is None or c is None or not isinstance(kernel, Launch):
        return
    if c.flags.c_contiguous and a.dtype == b.dtype == c.dtype:
        operands = _operands(prepared, x, y, target, (0, 0, 0))
        entry.remember(a, b, c, kernel.job(*operands, 1, 0, None, threads), prepared.problem.flops)


def _matrix(x: View) -> Any:
    """Return the NumPy matrix of which x is the view, or None: a copy of bfloat16 is owned by an array of uint16."""
    array = x.owner
    return array if type(array) is np.ndarray and array.ndim == 2 and view(array)[:4] == x[:4] else None


def _zero(x: View, dtype: str, axis: int) -> View:
    """Return a view of zeros with the shape of x, but length 1 along `axis`."""
    shape = list(x.shape)
    shape[axis] = 1
    return View(_ZEROS.ctypes.data, tuple(shape), (0,) * len(shape), dtype, owner=_ZEROS)


def writable(target: View, shape: Ints, result: str) -> None:
    """Raise unless `out` can be written and takes a result of this shape and element type."""
    if target.shape != shape:
        raise ShapeError(f"out of shape {target.shape} is non-broadcastable; the product has shape {shape}")
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
