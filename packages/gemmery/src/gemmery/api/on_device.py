"""Products on a CUDA device: checked, converted, and enqueued without waiting and without a copy to the host.

The stream is the current one of a's library, which also allocates memory: results, scratch, and copies of operands that
the result would overwrite. The stream waits for those of the other operands, which then wait for the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import array_libraries, complex_products, semirings
from gemmery.api.array_libraries import NO_PARTS, Keywords
from gemmery.api.compute import writable
from gemmery.api.device_operands import (
    NUMBER,
    ROUNDED,
    Inputs,
    OperandScales,
    check_capability,
    group_scales,
    located,
    operand_type,
    resolved,
    scales,
    stay_mixed,
    types,
)
from gemmery.api.options import (
    added,
    check_added,
    check_beta,
    check_bias,
    check_values,
    epilogue_name,
    host_ends,
    scalar,
    viewed,
)
from gemmery.api.prepared import PreparedLaunch, TieredLaunch, prepare, prepare_groups, specialized
from gemmery.api.promote import promoted
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered
from gemmery.cuda.launch import Scalars, packed_scalars
from gemmery.cuda.ordered import DeviceArray
from gemmery.errors import ArgumentError, DeviceError, DTypeError, LayoutError, brief
from gemmery.keywords import NO_OPTIONS, Options


def product(
    name: str, x: View, y: View, out: Any, options: Options, keywords: Keywords, parts: tuple[int, int] = NO_PARTS
) -> Any:
    """Return the product of two arrays by their views, one of which is on a device, for the function `name`.

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
    inputs = _inputs(x, y, common, result, options, factors, parts)._replace(old=old)
    check_capability(common, result, bool(factors.kind), x.device)
    if factors.factor != 1:
        options = options._replace(alpha=scalar("scale_a times scale_b", options.alpha * factors.factor, result))
    arrays.unchanged(a=x, b=y, c=old, out=target)
    direct = target is None or (target.dtype == result and _is_direct(target, inputs, options))
    written = target if target is not None and direct else new(x, shape, result)
    served = _compute(inputs, written, options)
    if target is not None:
        if not direct:
            copy(written, target)
        arrays.written(out)
    if served is not None and direct and inputs.x is x and inputs.y is y:
        array_libraries.remember(name, inputs, written, target is None, options, keywords, served)
    return finished(x, written) if target is None else out


def _is_direct(target: View, inputs: Inputs, options: Options) -> bool:
    """Return False where a product is written to other memory and copied: kernels and `out` do not allow else."""
    old, real = inputs.old, inputs.x.dtype in complex_products.REAL and complex_products.pays(inputs, options)
    if (real or inputs.scales.kind == "blocks") and target.strides[-1:] != (dtypes.get(target.dtype).size,):
        return False
    if old is not None and not arrays.same(old, target) and arrays.overlap(old, target):
        return False
    return not (real and any(arrays.overlap(z, target) for z in (inputs.x, inputs.y)))


def write(x: View, y: View, target: View, precision: str | None = None) -> TieredLaunch | None:
    """Write a product to `target`; the views name the device, and their stream is the one on which it runs.

    It returns what ran, for more products of memory like this; None for an empty one.

    Raises DTypeError for element types that the device does not multiply, RefusedError for a precision it cannot have.
    """
    common, result = types(x, y, None if target.dtype == x.dtype else target.dtype)
    check_capability(common, result, False, x.device)
    options = NO_OPTIONS._replace(precision=resolved(precision, common, result, x.device))
    return _compute(Inputs(x, y), target._replace(dtype=result), options)


def planned(x: View, y: View, options: Options) -> PreparedLaunch:
    """Return what `product` runs for a new result of a product that comes back often, without running it."""
    x, y = located(x), located(y)
    arrays.together(a=x, b=y)
    common, result, options = _types("matmul", x, y, None, None, options)
    shape, size = result_shape(x.shape, y.shape), dtypes.get(result).size
    epilogue = epilogue_name(options.bias, options.activation, result)
    factors = scales(options, x, y, common, result)
    check_capability(common, result, bool(factors.kind), x.device)
    if not stay_mixed(x, y, common, result, options.precision):
        x, y = arrays.once_converted(x, common), arrays.once_converted(y, common)
    step = 0 if isinstance(options.bias, NUMBER) else max(4, size)
    bias = None if options.bias is None else View(0, shape[-1:], (step,), "f32")
    inputs = Inputs(x, y, bias, epilogue, scales=factors)
    target = View(0, shape, arrays.contiguous(shape, size), result, x.device)
    if x.dtype in complex_products.REAL and complex_products.pays(inputs, options):
        inputs, target = complex_products.as_real(inputs, target)
    return specialized(inputs.call(target, factors.factor != 1, options))


def _types(
    name: str, x: View, y: View, old: View | None, target: View | None, options: Options
) -> tuple[str, str, Options]:
    """Return the type to which A and B promote, the type of the result, and the options with checked values."""
    common, result = types(x, y, options.dtype, old or target)
    if old is not None and old.dtype in dtypes.FLOAT8:
        raise DTypeError(f"{added(name)} is {dtypes.get(old.dtype).numpy}: what beta multiplies is float16 or wider")
    if old is not None and common not in dtypes.FLOAT8:
        result = promoted(result, old.dtype)
        common = common if common == "int8" and result in ROUNDED else operand_type(common, result)
    options = options._replace(semiring=semirings.check(options, common) or None)
    precision = None if options.semiring else resolved(options.precision, common, result, x.device)
    alpha, beta = options.alpha, options.beta
    if name != "matmul" or result != "bool":
        alpha, beta = scalar("alpha", alpha, result), scalar("beta", beta, result)
    check_beta(name, beta, old)
    check_values(options)
    invariant = bool(options.batch_invariant)
    return common, result, options._replace(alpha=alpha, beta=beta, batch_invariant=invariant, precision=precision)


def _inputs(
    x: View, y: View, common: str, result: str, options: Options, factors: OperandScales,
    parts: tuple[int, int] = NO_PARTS, offsets: View | None = None,
) -> Inputs:  # fmt: skip
    """Return A, B and the bias in the element types that a kernel reads."""
    if options.alpha == 0:  # BLAS then reads neither A nor B
        x = x._replace(shape=(*x.shape[:-1], 0), dtype=common)
        y = y._replace(shape=(*y.shape[:-2], 0, *y.shape[-1:]) if len(y.shape) > 1 else (0,), dtype=common)
    sides: Ints = (y.shape[-1] if len(y.shape) > 1 else 1,)
    if offsets is not None and len(y.shape) == 3:
        sides = y.shape[0], *sides
    if not stay_mixed(x, y, common, result, options.precision):
        x, y = converted(x, common), converted(y, common)
    epilogue = epilogue_name(options.bias, options.activation, result)
    bias = None if options.bias is None else _bias(options.bias, x, sides, result)
    return Inputs(x, y, bias, epilogue, factors, parts, offsets)


def converted(x: View, dtype: str) -> View:
    """Return an operand in another element type."""
    return x if x.dtype == dtype else view(arrays.astype(x.array, dtype))


def _bias(bias: Any, x: View, sides: Ints, result: str) -> View:
    """Return accumulators on the device, as an array of (n,) or (groups, n) whose strides may be 0.

    The stream writes a number of the host there.
    """
    accumulator = dtypes.get(result).accumulator
    if isinstance(bias, NUMBER):
        number = scalar("bias", bias, result)
        memory = scratch(x, dtypes.get(accumulator).size)
        ordered.put(number, accumulator, memory.pointer, x.stream, x.ordinal)
        return memory._replace(dtype=accumulator, shape=sides, strides=(0,) * len(sides))
    rows = located(viewed("bias", bias))
    arrays.together(a=x, bias=rows)
    check_bias(rows, sides, result)
    rows = converted(rows, accumulator)
    step = 0 if rows.shape in ((), (1,)) else rows.strides[-1]
    each = rows.strides[0] if len(rows.shape) == 2 else 0
    return rows._replace(shape=sides, strides=(each, step)[-len(sides) :])


def _compute(inputs: Inputs, target: View, options: Options) -> TieredLaunch | None:
    """Write the product to `target`, which has the result's element type; return what ran.

    None for a product without elements.
    """
    if 0 in target.shape:
        return None
    old = inputs.old
    if old is not None and (options.beta == 0 or arrays.same(old, target)):
        inputs = inputs._replace(old=None)
    if inputs.x.dtype in complex_products.REAL and complex_products.pays(inputs, options):
        if inputs.old is not None:
            copy(inputs.old, target)
        complex_products.multiply(inputs, target, options, scratch, _compute)
        return None
    served = prepare(inputs.call(target, options.alpha != 1 or options.beta != 0, options))
    enqueue(served, inputs, target, packed_scalars(options.alpha, options.beta, target.dtype))
    return served


def enqueue(served: TieredLaunch, inputs: Inputs, target: View, scalars: Scalars) -> None:
    """Write a product to `target`, whose element type is the result's, with the `packed_scalars`.

    What beta multiplies is copied to `target` before.
    """
    stream, ordinal, read, old = inputs.x.stream, inputs.x.ordinal, inputs.read, inputs.old
    run = served.next(stream)
    others = {z.stream for z in (*read, inputs.offsets, target, old) if z is not None} - {stream}
    for other in others:
        ordered.wait(stream, other, ordinal)
    read = tuple(z and apart(inputs.x, z, target) for z in read)  # keeps copies alive until the launch
    x, y, bias, *factors = [0 if z is None else z.pointer for z in read]
    workspace = scratch(inputs.x, run.workspace) if run.workspace else None
    if old is not None:  # after all memory is allocated
        copy(old, target, stream)
    extra: tuple[int, ...] = ()
    if any(inputs.parts) and any(run.kept):
        extra = (*(part if is_kept else 0 for part, is_kept in zip(inputs.parts, run.kept, strict=True)), 0)
    elif inputs.scales.kind or inputs.offsets is not None:
        extra = (*factors, 0 if inputs.offsets is None else inputs.offsets.pointer)
    for first, second, third in served.form.offsets():
        addresses = x + first, y + second, target.pointer + third
        run(*addresses, stream, bias, 0 if workspace is None else workspace.pointer, scalars, extra)
    for other in others:
        ordered.wait(other, stream, ordinal)


def apart(x: View, source: View, target: View) -> View:
    """Return `source`, or a copy of the memory that it spans where that overlaps `target`."""
    if not arrays.overlap(source, target):
        return source
    low, high = arrays.reach(source.shape, source.strides, source.dtype)
    memory = scratch(x, high - low)
    ordered.copy(source.pointer + low, memory.pointer, high - low, x.stream, x.ordinal)
    return source._replace(pointer=memory.pointer - low, owner=memory)


def copy(source: View, target: View, *streams: int) -> None:
    """Copy an array into another of the same shape, on whose stream that is, between what these streams do."""
    others = {source.stream, *streams} - {target.stream}
    for other in others:
        ordered.wait(target.stream, other, target.ordinal)
    size = dtypes.get(source.dtype).size
    alike = source.dtype == target.dtype and source.strides == target.strides
    if alike and source.strides == arrays.contiguous(source.shape, size):
        count = math.prod(source.shape) * size
        ordered.copy(source.pointer, target.pointer, count, target.stream, target.ordinal)
    elif type(source.array) is not type(target.array) or isinstance(source.array, DeviceArray):
        raise LayoutError(
            f"a {type(source.array).__name__} with strides {source.strides} cannot be copied into a "
            f"{type(target.array).__name__}; pass arrays of one library, or contiguous arrays of the result's element "
            "type"
        )
    else:
        arrays.assign(target.array, source.array)
    for other in others:  # which may free or overwrite the source
        ordered.wait(other, target.stream, target.ordinal)


def new(x: View, shape: Ints, dtype: str) -> View:
    """Allocate on the device of x with its library, or with the driver where that library does not allocate."""
    if arrays.allocates(x.array):
        return arrays.empty(x.array, shape, dtype)
    return DeviceArray(shape, dtype, x.ordinal, x.stream).view


def scratch(x: View, size: int) -> View:
    """Allocate bytes for the duration of a call, as `new` does."""
    if arrays.allocates(x.array):
        return arrays.empty(x.array, (size,), "uint8")
    memory = ordered.Scratch(size, x.stream, x.ordinal)
    return View(memory.pointer, (size,), (1,), "uint8", x.device, x.stream, owner=memory)


def finished(x: View, target: View) -> Any:
    """Return the array of memory from `new`, to which all work has been launched, as an array of x's library."""
    result: Any = target.array
    if not isinstance(result, DeviceArray):
        return result
    result.finished()
    like: Any = x.array
    return like.__array_namespace__().from_dlpack(result) if hasattr(like, "__array_namespace__") else result


def grouped_product(
    x: View, y: View, where: View, shape: Ints, out: Any, terms: Options, keywords: Keywords,
    multiply_groups: Callable[..., None],
) -> Any:  # fmt: skip
    """Return the products of the groups; the views are those of a, b and the offsets, `shape` is the result's.

    Where b is one matrix, groups follow each other along k. `multiply_groups` writes a product for each group, where no
    kernel reads the offsets.
    """
    deep = len(y.shape) == 2
    x, y, where = map(located, (x, y, where))
    target = None if out is None else located(view(out))
    arrays.together(a=x, b=y, out=target)
    check_offsets(x, where)
    common, result = types(x, y, terms.dtype, target)
    if target is not None:
        writable(target, shape, result)
        if target.dtype != result:  # rows that belong to no group keep their values
            have, want = dtypes.get(target.dtype).numpy, dtypes.get(result).numpy
            raise DTypeError(f"out is {have} and the result {want}; pass an out of {want}, or dtype={have!r}")
    check_values(terms)
    terms = terms._replace(batch_invariant=bool(terms.batch_invariant))
    factors = (scales if deep else group_scales)(terms, x, y, common, result)
    inputs = _inputs(x, y, common, result, terms, factors, offsets=where)
    check_capability(common, result, bool(factors.kind), x.device)
    written = target or new(x, shape, result)
    if 0 not in shape and (deep or y.shape[0]):  # without groups, a kernel has neither a matrix nor an offset to read
        ends = _launch_groups(inputs, written, terms) if y.shape[0] else [0] * shape[0]
        if isinstance(ends, list):
            _one_by_one(x, y, ends, inputs, written, terms, multiply_groups)
        elif where.device != "cpu" and inputs.x is x and inputs.y is y:
            terms = terms._replace(alpha=factors.factor)
            array_libraries.remember("grouped_matmul", inputs, written, target is None, terms, keywords, ends)
    if out is None:
        return finished(x, written)
    arrays.written(out)
    return out


def check_offsets(x: View, where: View) -> None:
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


def _launch_groups(inputs: Inputs, target: View, terms: Options) -> list[int] | TieredLaunch:
    """Write the products to `target` by one launch; return it, or the ends of the groups where no kernel does so."""
    x, where, deep = inputs.x, inputs.offsets, len(inputs.y.shape) == 2
    rows, what = (x.shape[1], "columns") if deep else (x.shape[0], "rows")
    assert where is not None
    served = prepare_groups(inputs.call(target, inputs.scales.factor != 1, terms))
    captured = bool(x.stream) and driver.captures(x.stream)
    if isinstance(served, str) or (captured and where.device == "cpu"):
        if not arrays.allocates(x.array):
            raise LayoutError(f"a {type(x.array).__name__} cannot be cut into groups: pass arrays of PyTorch or CuPy")
        if where.device == "cpu":
            return host_ends(where.array, rows, what)
        if captured:
            raise DeviceError(
                "a CUDA graph captures this stream, and no kernel of this product reads offsets on the device; pass "
                "them as a list, which the graph keeps"
            )
        return clamped(where.array.tolist(), rows)  # the host waits for the stream
    if where.device == "cpu":
        ends = np.array(host_ends(where.array, rows, what), np.int32)
        where = scratch(x, ends.nbytes)
        inputs = inputs._replace(offsets=where)
        ordered.bring(ends.ctypes.data, where.pointer, ends.nbytes, x.stream, x.ordinal)
    enqueue(served, inputs, target, packed_scalars(inputs.scales.factor, 0, target.dtype))
    return served


def _one_by_one(
    x: View, y: View, ends: list[int], inputs: Inputs, target: View, terms: Options, multiply: Callable[..., None]
) -> None:
    """Write a product for each group; to other memory first where `target` overlaps what later groups read."""
    bias = None if terms.bias is None or isinstance(terms.bias, NUMBER) else located(view(terms.bias))
    if not any(z and arrays.overlap(z, target) for z in (x, y, bias, inputs.scales.a, inputs.scales.b)):
        multiply(x.array, y.array, ends, target.array, terms)
        return
    apart = new(x, target.shape, target.dtype)
    multiply(x.array, y.array, ends, apart.array, terms)
    last = target.shape[0] if len(y.shape) == 2 else ends[-1]
    source, rows = (view(z.array[:last]) for z in (apart, target))
    copy(source, rows)


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
