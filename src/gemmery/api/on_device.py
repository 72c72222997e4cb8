"""Products on a CUDA device: enqueued on the caller's current stream, without waiting and without a copy to the host.

The stream is the current one of a's library. It waits for the streams of the other operands, which then wait for the
product. The caller's library allocates scratch memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import device_memory, quick, quick_options
from gemmery.api.compute import writable
from gemmery.api.device_types import SERVED, check_capability, located, types, unserved
from gemmery.api.options import (
    check_activation,
    check_added,
    check_beta,
    check_bias,
    check_values,
    dtype_name,
    epilogue_name,
    scalar,
)
from gemmery.api.precision import resolved
from gemmery.api.prepared import PreparedLaunch, TieredLaunch, prepare, specialised
from gemmery.api.promote import promoted
from gemmery.api.scales import NO_SCALES, OperandScales, scales
from gemmery.arrange import result_shape
from gemmery.arrays import View, view
from gemmery.cuda import ordered
from gemmery.errors import ArgumentError, DTypeError, brief
from gemmery.keywords import NO_OPTIONS, Options, for_kernel
from gemmery.tuples import NamedTuple

_NUMBER = (int, float, np.number)


class Inputs(NamedTuple):
    """The inputs of a product, in the element types that its kernel reads."""

    x: View
    y: View
    bias: View | None
    epilogue: str
    owners: list[object]  # owners of converted memory, alive until the launch
    scales: OperandScales = NO_SCALES
    parts: tuple[int, int] = (0, 0)  # addresses of those of A and of B, where they were split before


def product(
    name: str, a: Any, b: Any, x: View, y: View, out: Any, options: Options, parts: tuple[int, int] = (0, 0)
) -> Any:
    """Return the product of the views x and y of a and b, one of which is on a device, for the function `name`.

    `parts` are the addresses of the parts of A and of B, where they were split before.
    """
    if options.threads is not None:
        raise ArgumentError(
            f"threads={brief(options.threads)} applies to products on the CPU only, and the operands are on a device; "
            "leave it out"
        )
    plain, requested = options is NO_OPTIONS, options.precision
    x, y = located(x), located(y)
    target, old = (None if z is None else located(view(z)) for z in (out, options.old))
    arrays.together(a=x, b=y, out=target, c=old)
    common, result, options = _types(name, x, y, old, target, options)
    known = options.old is out or (options.old is None and result == x.dtype)
    short = plain or (name != "matmul" and requested is None and known)
    shape = result_shape(x.shape, y.shape)
    if old is not None:
        check_added(name, old, shape)
    if target is not None:
        writable(target, shape, result)
    factors = scales(options, x, y, common, result)
    operands = _operands(a, b, x, y, common, result, options)._replace(scales=factors, parts=parts)
    check_capability(common, bool(factors.kind), x.device)
    if factors.factor != 1:
        options = options._replace(alpha=scalar("scale_a times scale_b", options.alpha * factors.factor, result))
    arrays.unchanged(a=x, b=y, c=old, out=target)
    moved = target is not None and old is not None and not arrays.same(old, target) and arrays.overlap(old, target)
    as_before = name == "matmul" and operands.x is x and operands.y is y
    short = short and not any(parts)
    turned = factors.kind == "blocks" and target is not None and target.strides[-1:] != (dtypes.get(target.dtype).size,)
    if target is not None and target.dtype == result and not moved and not turned:
        _compute(a, operands, out, target, old, options)
        arrays.written(out)
        if short or as_before:
            _remember(name, a, b, out, operands, target, options, requested, short)
        return out
    array, fresh = device_memory.new(a, shape, result, x)
    _compute(a, operands, array, fresh, old, options)
    if target is not None:
        device_memory.copy(array, fresh, out, target)
        arrays.written(out)
        return out
    short = short and result == x.dtype  # `quick` allocates results of a's element type
    if short or as_before:
        _remember(name, a, b, None, operands, fresh, options, requested, short)
    return device_memory.finished(a, array)


def write(x: View, y: View, target: View, precision: str | None = None) -> TieredLaunch | None:
    """Write a product to `target`; the views name the device, and their stream is the one on which it runs.

    It returns what ran, for more products of memory like this; None for an empty one.

    Raises DTypeError for element types that the device does not multiply, RefusedError for a precision it cannot have.
    """
    common, result = types(x, y, None if target.dtype == x.dtype else target.dtype, None)
    check_capability(common, False, x.device)
    precision = resolved(precision, common, result, x.device)
    options = NO_OPTIONS if precision is None else NO_OPTIONS._replace(precision=precision)
    operands, target = Inputs(x, y, None, "", []), target._replace(dtype=result)
    _compute(None, operands, None, target, None, options)
    return None if 0 in target.shape else prepared(operands, target, options)


def planned(x: View, y: View, options: Options) -> PreparedLaunch:
    """Return what `product` runs for a new result of a product that comes back often, without running it."""
    x, y = located(x), located(y)
    arrays.together(a=x, b=y)
    common, result, options = _types("matmul", x, y, None, None, options)
    shape, size = result_shape(x.shape, y.shape), dtypes.get(result).size
    if options.activation is not None:
        check_activation(options.activation, result)
    factors = scales(options, x, y, common, result)
    check_capability(common, bool(factors.kind), x.device)
    step = None
    if options.bias is not None:
        step = 0 if isinstance(options.bias, _NUMBER) else max(4, size)
    x, y = (
        z
        if z.dtype == common
        else z._replace(dtype=common, strides=arrays.contiguous(z.shape, dtypes.get(common).size))
        for z in (x, y)
    )
    target = View(0, shape, arrays.contiguous(shape, size), result, x.device)
    epilogue, scaled = epilogue_name(options.bias, options.activation), factors.factor != 1
    terms = step, epilogue, scaled, for_kernel(options), factors.scaling
    return specialised(_bare(x), _bare(y), target, *terms)


def prepared(operands: Inputs, target: View, options: Options) -> TieredLaunch:
    """Return what `prepare` makes of these operands."""
    bias = operands.bias
    return prepare(
        _bare(operands.x),
        _bare(operands.y),
        _bare(target),
        None if bias is None else bias.strides[0],
        operands.epilogue,
        options.alpha != 1 or options.beta != 0,
        for_kernel(options),
        operands.scales.scaling,
        "".join(letter for letter, address in zip("ab", operands.parts, strict=True) if address),
    )


def _bare(z: View) -> View:
    return View(z.pointer & 15, z.shape, z.strides, z.dtype, z.device)


def _types(
    name: str, x: View, y: View, old: View | None, target: View | None, options: Options
) -> tuple[str, str, Options]:
    """Return the type to which A and B promote, the type of the result, and the options with checked values."""
    dtype = None if options.dtype is None else dtype_name(options.dtype)
    like = old or target
    common, result = types(x, y, dtype, None if like is None else like.dtype)
    if old is not None and common in SERVED:
        if old.dtype not in SERVED:
            raise unserved(old)
        result = promoted(common, old.dtype)
    precision = resolved(options.precision, common, result, x.device)
    alpha, beta = scalar("alpha", options.alpha, result), scalar("beta", options.beta, result)
    check_beta(name, beta, old)
    if result == "int32" and (alpha != 1 or beta != 0 or options.bias is not None):
        raise DTypeError(
            "a product of int8 into int32 on a device has no alpha, beta or bias: apply them to the result of "
            "gm.matmul(a, b, dtype='int32'), or pass dtype='float32'"
        )
    check_values(options)
    invariant = bool(options.batch_invariant)
    options = options._replace(alpha=alpha, beta=beta, batch_invariant=invariant, precision=precision)
    return common, result, options


def _operands(a: Any, b: Any, x: View, y: View, common: str, result: str, options: Options) -> Inputs:
    """Return A, B and the bias in the element types that a kernel reads."""
    owners: list[object] = []
    if options.alpha == 0:  # BLAS then reads neither A nor B
        x = x._replace(shape=(*x.shape[:-1], 0), dtype=common)
        y = y._replace(shape=(*y.shape[:-2], 0, *y.shape[-1:]) if len(y.shape) > 1 else (0,), dtype=common)
    if x.dtype != common:
        owners.append(arrays.astype(a, common))
        x = view(owners[-1])
    if y.dtype != common:
        owners.append(arrays.astype(b, common))
        y = view(owners[-1])
    bias = None if options.bias is None else _bias(options.bias, a, x, y, result, owners)
    if options.activation is not None:
        check_activation(options.activation, result)
    return Inputs(x, y, bias, epilogue_name(bias, options.activation), owners)


def _bias(bias: Any, a: Any, x: View, y: View, result: str, owners: list[object]) -> View:
    """Return n accumulators on the device, or one with stride 0; the stream writes a number of the host there."""
    n, accumulator = y.shape[-1] if len(y.shape) > 1 else 1, dtypes.get(result).accumulator
    if isinstance(bias, _NUMBER):
        return device_memory.number(bias, accumulator, a, x, owners)._replace(shape=(n,), strides=(0,))
    row = located(view(bias))
    arrays.together(a=x, bias=row)
    check_bias(row, n, result)
    if row.dtype != accumulator:
        owners.append(arrays.astype(bias, accumulator))
        row = view(owners[-1])
    owners.append(bias)
    return row._replace(shape=(n,), strides=(0 if row.shape in ((), (1,)) else row.strides[0],))


def _compute(a: Any, operands: Inputs, out: Any, target: View, old: View | None, options: Options) -> None:
    """Write the product to `target`, the view of out, which has the result's element type."""
    if 0 in target.shape:
        return
    stream, ordinal = operands.x.stream, device_memory.ordinal(operands.x)
    served = prepared(operands, target, options)
    run, bias = served.next(stream), operands.bias
    a_scale, b_scale = operands.scales.a, operands.scales.b
    others = {z.stream for z in (operands.y, bias, target, old, a_scale, b_scale) if z is not None} - {stream}
    for other in others:
        ordered.wait(stream, other, ordinal)
    owners = list(operands.owners)  # a copy: scratch memory does not keep a product from being remembered
    x, y = (device_memory.apart(a, z, target, stream, owners) for z in (operands.x, operands.y))
    bias_view = None if bias is None else device_memory.apart(a, bias, target, stream, owners)
    factors = [
        0 if z is None else device_memory.apart(a, z, target, stream, owners).pointer for z in (a_scale, b_scale)
    ]
    scratch = 0
    if run.workspace:
        memory, its_view = device_memory.scratch(a, run.workspace, x, stream)
        owners.append(memory)
        scratch = its_view.pointer
    if old is not None and options.beta != 0 and not arrays.same(old, target):  # after all memory is allocated
        device_memory.copy(options.old, old, out, target)
    scalars = (options.alpha.real, options.beta.real)
    start = 0 if bias_view is None else bias_view.pointer
    for first, second, third in served.form.offsets():
        addresses = x.pointer + first, y.pointer + second, target.pointer + third
        if any(operands.parts) and any(run.kept):
            parts = [part if is_kept else 0 for part, is_kept in zip(operands.parts, run.kept, strict=True)]
            run(*addresses, stream, start, scratch, scalars, (*parts, 0))
        elif operands.scales.kind:
            run(*addresses, stream, start, scratch, scalars, (*factors, 0))
        else:
            run(*addresses, stream, start, scratch, scalars)
    for other in others:
        ordered.wait(other, stream, ordinal)


def _remember(
    name: str,
    a: Any,
    b: Any,
    out: Any,
    operands: Inputs,
    target: View,
    options: Options,
    requested: str | None,
    short: bool,
) -> None:
    """Store the product for more products of operands like these: in `quick`, or `quick_options` if it is not short.

    `requested` is the precision that the call named, by which the next one looks it up.
    """
    if 0 in target.shape or options.alpha == 0:
        return
    served = prepared(operands, target, options)
    views = [operands.y, operands.bias, operands.scales.a, operands.scales.b, target]
    if served.form.runs != 1 or any(z is not None and z.stream != operands.x.stream for z in views):
        return
    if not short:
        scalars = (options.alpha.real, options.beta.real)
        options = options._replace(precision=requested)
        quick_options.remember(a, b, out, options, target, served, scalars, operands.parts)
    elif not operands.owners:
        if options.alpha == 1 and options.beta == 0:
            name = quick.PLAIN[name]
        quick.remember(a, b, out, name, (operands.x, operands.y, target), served)
