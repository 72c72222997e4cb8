"""Products on a CUDA device: checked, converted, and enqueued without waiting and without a copy to the host.

The stream is the current one of a's library, which also allocates memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import array_libraries, enqueue
from gemmery.api.compute import writable
from gemmery.api.device_call import DeviceCall, bare
from gemmery.api.device_operands import (
    NUMBER,
    SERVED,
    Inputs,
    OperandScales,
    check_capability,
    group_scales,
    located,
    scales,
    types,
    unserved,
)
from gemmery.api.groups import check_group_bias, host_ends
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
from gemmery.api.prepared import PreparedLaunch, TieredLaunch, prepare, prepare_groups, specialised
from gemmery.api.promote import promoted
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered
from gemmery.errors import ArgumentError, DeviceError, DTypeError, LayoutError, brief
from gemmery.keywords import NO_OPTIONS, Options, for_kernel


def product(
    name: str, a: Any, b: Any, x: View, y: View, out: Any, options: Options, keywords: dict[str, Any],
    parts: tuple[int, int] = (0, 0),
) -> Any:  # fmt: skip
    """Return the product of the views x and y of a and b, one of which is on a device, for the function `name`.

    `keywords` are those of the options that the call named, in its order: by them it is looked up when it comes again.
    `parts` are the addresses of the parts of A and of B, where they were split before.
    """
    if options.threads is not None:
        raise ArgumentError(
            f"threads={brief(options.threads)} applies to products on the CPU only, and the operands are on a device; "
            "leave it out"
        )
    x, y = located(x), located(y)
    target, old = (None if z is None else located(view(z)) for z in (out, options.old))
    arrays.together(a=x, b=y, out=target, c=old)
    common, result, options = _types(name, x, y, old, target, options)
    shape = result_shape(x.shape, y.shape)
    if old is not None:
        check_added(name, old, shape)
    if target is not None:
        writable(target, shape, result)
    factors = scales(options, x, y, common, result)
    inputs = _inputs(a, b, x, y, common, result, options, factors, parts)
    check_capability(common, bool(factors.kind), x.device)
    if factors.factor != 1:
        options = options._replace(alpha=scalar("scale_a times scale_b", options.alpha * factors.factor, result))
    arrays.unchanged(a=x, b=y, c=old, out=target)
    moved = target is not None and old is not None and not arrays.same(old, target) and arrays.overlap(old, target)
    turned = factors.kind == "blocks" and target is not None and target.strides[-1:] != (dtypes.get(target.dtype).size,)
    direct = target is None or not (target.dtype != result or moved or turned)
    array, its_view = enqueue.new(a, shape, result, x) if target is None or not direct else (out, target)
    served = _compute(a, inputs, array, its_view, old, options)
    if target is not None:
        if not direct:
            enqueue.copy(array, its_view, out, target)
        arrays.written(out)
    if served is not None and direct and inputs.x is x and inputs.y is y:
        _remember(name, a, b, out, inputs, its_view, options, keywords, served)
    return enqueue.finished(a, array) if target is None else out


def write(x: View, y: View, target: View, precision: str | None = None) -> TieredLaunch | None:
    """Write a product to `target`; the views name the device, and their stream is the one on which it runs.

    It returns what ran, for more products of memory like this; None for an empty one.

    Raises DTypeError for element types that the device does not multiply, RefusedError for a precision it cannot have.
    """
    common, result = types(x, y, None if target.dtype == x.dtype else target.dtype, None)
    check_capability(common, False, x.device)
    options = NO_OPTIONS._replace(precision=resolved(precision, common, result, x.device))
    return _compute(None, Inputs(x, y), None, target._replace(dtype=result), None, options)


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
    x, y = (
        z
        if z.dtype == common
        else z._replace(dtype=common, strides=arrays.contiguous(z.shape, dtypes.get(common).size))
        for z in (x, y)
    )
    step = 0 if isinstance(options.bias, NUMBER) else max(4, size)
    bias = None if options.bias is None else View(0, shape[-1:], (step,), "f32")
    inputs = Inputs(x, y, bias, epilogue_name(bias, options.activation), scales=factors)
    target = View(0, shape, arrays.contiguous(shape, size), result, x.device)
    return specialised(_call(inputs, target, factors.factor != 1, options))


def _call(inputs: Inputs, target: View, scaled: bool, options: Options) -> DeviceCall:
    """Return a product without its memory."""
    return DeviceCall(
        bare(inputs.x),
        bare(inputs.y),
        bare(target),
        None if inputs.bias is None else inputs.bias.strides,
        inputs.epilogue,
        scaled,
        for_kernel(options),
        inputs.scales.scaling,
        "".join(letter for letter, address in zip("ab", inputs.parts, strict=True) if address),
        inputs.offsets is not None,
    )


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


def _inputs(
    a: Any, b: Any, x: View, y: View, common: str, result: str, options: Options, factors: OperandScales,
    parts: tuple[int, int],
) -> Inputs:  # fmt: skip
    """Return A, B and the bias in the element types that a kernel reads."""
    owners: list[object] = []
    if options.alpha == 0:  # BLAS then reads neither A nor B
        x = x._replace(shape=(*x.shape[:-1], 0), dtype=common)
        y = y._replace(shape=(*y.shape[:-2], 0, *y.shape[-1:]) if len(y.shape) > 1 else (0,), dtype=common)
    x, y = _converted(a, x, common, owners), _converted(b, y, common, owners)
    n = y.shape[-1] if len(y.shape) > 1 else 1
    bias = None if options.bias is None else _bias(options.bias, a, x, (n,), result, owners)
    if options.activation is not None:
        check_activation(options.activation, result)
    return Inputs(x, y, bias, epilogue_name(bias, options.activation), tuple(owners), factors, parts)


def _converted(array: Any, its_view: View, dtype: str, owners: list[object]) -> View:
    """Return an operand in another element type."""
    if its_view.dtype == dtype:
        return its_view
    owners.append(arrays.astype(array, dtype))
    return view(owners[-1])


def _bias(bias: Any, a: Any, x: View, sides: Ints, result: str, owners: list[object]) -> View:
    """Return accumulators on the device, as an array of (n,) or (groups, n) whose strides may be 0.

    The stream writes a number of the host there.
    """
    accumulator = dtypes.get(result).accumulator
    if isinstance(bias, NUMBER):
        return enqueue.number(bias, accumulator, a, x, owners)._replace(shape=sides, strides=(0,) * len(sides))
    rows = located(view(bias))
    arrays.together(a=x, bias=rows)
    if len(sides) == 2:
        check_group_bias(rows, *sides, result)
    else:
        check_bias(rows, sides[0], result)
    rows = _converted(bias, rows, accumulator, owners)
    owners.append(bias)
    step = 0 if rows.shape in ((), (1,)) else rows.strides[-1]
    each = rows.strides[0] if len(rows.shape) == 2 else 0
    return rows._replace(shape=sides, strides=(each, step)[-len(sides) :])


def _compute(a: Any, inputs: Inputs, out: Any, target: View, old: View | None, options: Options) -> TieredLaunch | None:
    """Write the product to `target`, the view of out, which has the result's element type; return what ran.

    None for a product without elements.
    """
    if 0 in target.shape:
        return None
    scaled = options.alpha != 1 or options.beta != 0
    served = prepare(_call(inputs, target, scaled, options))
    added = None
    if old is not None and options.beta != 0 and not arrays.same(old, target):
        added = options.old, old, out
    enqueue.enqueue(a, served, inputs, target, (options.alpha.real, options.beta.real), added)
    return served


def _remember(
    name: str, a: Any, b: Any, out: Any, inputs: Inputs, target: View, options: Options, keywords: dict[str, Any],
    served: TieredLaunch,
) -> None:  # fmt: skip
    """Store the product for more calls of operands like these, by the options that the call named."""
    views = [inputs.y, inputs.bias, inputs.scales.a, inputs.scales.b, target]
    apart = served.form.runs != 1 or any(z is not None and z.stream != inputs.x.stream for z in views)
    if apart or options.alpha == 0:
        return
    scalars = options.alpha.real, options.beta.real
    in_place = options.old is None or options.old is out
    if any(inputs.parts) or (name == "matmul" and keywords):
        if name == "matmul":
            array_libraries.remember(a, b, out, name, inputs, target, served, keywords, scalars)
    elif not keywords and in_place:
        name = array_libraries.PLAIN[name] if scalars == (1, 0) else name
        array_libraries.remember(a, b, out, name, inputs, target, served)


def grouped_product(
    a: Any,
    b: Any,
    offsets: Any,
    views: tuple[View, View, View],
    shape: Ints,
    out: Any,
    terms: Options,
    multiply_groups: Callable[..., None],
) -> Any:
    """Return the products of the groups; the views are those of a, b and the offsets, `shape` is the result's.

    `multiply_groups` writes a product for each group, where no kernel reads the offsets.
    """
    x, y, where = map(located, views)
    target = None if out is None else located(view(out))
    arrays.together(a=x, b=y, out=target)
    _check_offsets(x, where)
    common, result = types(x, y, None if terms.dtype is None else dtype_name(terms.dtype), target and target.dtype)
    if target is not None:
        _check_target(target, shape, result)
    if terms.activation is not None:
        check_activation(terms.activation, result)
    owners: list[object] = []
    check_values(terms)
    terms = terms._replace(batch_invariant=bool(terms.batch_invariant))
    groups, _, n = y.shape
    bias = None if terms.bias is None else _bias(terms.bias, a, x, (groups, n), result, owners)
    factors = group_scales(terms.scale_a, terms.scale_b, x, y, common, result)
    check_capability(common, bool(factors.kind), x.device)
    x, y = _converted(a, x, common, owners), _converted(b, y, common, owners)
    inputs = Inputs(x, y, bias, epilogue_name(bias, terms.activation), tuple(owners), factors, offsets=where)
    array, its_view = enqueue.new(a, shape, result, x) if target is None else (out, target)
    if 0 not in (*shape, groups):  # without groups, a kernel has neither a matrix nor an offset to read
        ends = _launch_groups(a, offsets, inputs, its_view, terms)
        if ends is not None:
            _one_by_one(a, b, ends, inputs, array, its_view, terms, multiply_groups)
    if out is None:
        return enqueue.finished(a, array)
    arrays.written(out)
    return out


def _check_offsets(x: View, where: View) -> None:
    """Raise unless the offsets are on the host, or as a kernel reads them on the device of a."""
    if where.device == "cpu":
        return
    arrays.together(a=x, offsets=where)
    if where.dtype != "int32":
        raise DTypeError(
            f"offsets are {dtypes.get(where.dtype).numpy} on {where.device}, and kernels read int32; convert them, in "
            "PyTorch with offsets.int()"
        )
    if where.shape[0] > 1 and where.strides != (4,):
        raise LayoutError(f"offsets have a stride of {where.strides[0]} bytes; pass a contiguous array of int32")


def _check_target(target: View, shape: Ints, result: str) -> None:
    """Raise unless `out` takes the result as it is: rows that belong to no group keep their values."""
    writable(target, shape, result)
    if target.dtype != result:
        have, want = dtypes.get(target.dtype).numpy, dtypes.get(result).numpy
        raise DTypeError(f"out is {have} and the result {want}; pass an out of {want}, or dtype={have!r}")


def _launch_groups(a: Any, offsets: Any, inputs: Inputs, target: View, terms: Options) -> list[int] | None:
    """Write the products to `target` by one launch; return the ends of the groups where no kernel does so."""
    x, where = inputs.x, inputs.offsets
    assert where is not None
    served = prepare_groups(_call(inputs, target, inputs.scales.factor != 1, terms))
    captured = bool(x.stream) and driver.captures(x.stream)
    if isinstance(served, str) or (captured and where.device == "cpu"):
        if not arrays.allocates(a):
            raise LayoutError(f"a {type(a).__name__} cannot be cut into groups: pass arrays of PyTorch or CuPy")
        return _read(offsets, where, target.shape[0], captured)
    if where.device == "cpu":
        ends = np.array(host_ends(offsets, target.shape[0]), np.int32)
        owner, where = enqueue.scratch(a, ends.nbytes, x, x.stream)
        inputs = inputs._replace(offsets=where, owners=(*inputs.owners, owner))
        ordered.bring(ends.ctypes.data, where.pointer, ends.nbytes, x.stream, enqueue.ordinal(x))
    enqueue.enqueue(a, served, inputs, target, (inputs.scales.factor, 0.0))
    return None


def _one_by_one(
    a: Any, b: Any, ends: list[int], inputs: Inputs, array: Any, target: View, terms: Options,
    multiply_groups: Callable[..., None],
) -> None:  # fmt: skip
    """Write a product for each group; to other memory first where `array` overlaps what later groups read."""
    read = [located(view(z)) for z in (a, b, terms.bias) if z is not None and not isinstance(z, NUMBER)]
    read += [z for z in (inputs.scales.a, inputs.scales.b) if z is not None]
    if not any(arrays.overlap(z, target) for z in read):
        multiply_groups(a, b, ends, array, terms)
        return
    apart, _ = enqueue.new(a, target.shape, target.dtype, inputs.x)
    multiply_groups(a, b, ends, apart, terms)
    source, rows = apart[: ends[-1]], array[: ends[-1]]
    enqueue.copy(source, view(source), rows, view(rows))


def _read(offsets: Any, where: View, rows: int, captured: bool) -> list[int]:
    """Return the ends of the groups, copied from the device if they are there: then the host waits for its stream."""
    if where.device == "cpu":
        return host_ends(offsets, rows)
    if captured:
        raise DeviceError(
            "a CUDA graph captures this stream, and no kernel of this product reads offsets on the device; pass them "
            "as a list, which the graph keeps"
        )
    return clamped(offsets.tolist(), rows)


def clamped(ends: list[int], rows: int) -> list[int]:
    """Return ends as kernels use them: at least the one before, at most the number of rows.

    >>> clamped([3, 1, 9, -1], 5)
    [3, 3, 5, 5]
    """
    result, last = [], 0
    for end in ends:
        last = max(last, min(end, rows))
        result.append(last)
    return result
