"""Products by quantized matrices: on the CPU by panels of levels, on a device by packed weights or expanded ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gemmery import arrays, dtypes
from gemmery.api.checked import checked_call, writable
from gemmery.api.codes import FORMATS, bits_of, cast, checked_dtype, decoded, from_e4m3, library_of
from gemmery.api.compute import with_accumulators
from gemmery.api.device_call import keep, still
from gemmery.api.options import (
    check_activation,
    check_bias,
    dtype_name,
    epilogue_name,
    host_ends,
    only_on_devices,
    viewed,
)
from gemmery.api.packed import prepare_packed, prepare_unpacking
from gemmery.api.packing import pack
from gemmery.api.promote import widened
from gemmery.api.quantized import QuantizedMatrix
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.cpu import packed_levels
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import ArgumentError, DTypeError, ShapeError, brief
from gemmery.keywords import Options
from gemmery.ladder.gemv import MOST_ROWS

Multiply = Callable[..., Any]  # gm.matmul
_FEW = 64  # rows on the CPU; with more, a product of the whole weight takes longer than to compute it


def product(x: Any, matrix: QuantizedMatrix, out: Any, options: Options, multiply: Multiply) -> Any:
    """Return x times a quantized matrix, with the options of `gm.matmul`, by which expanded ones are multiplied."""
    if len(matrix.shape) != 2:
        raise ShapeError(f"b has shape {matrix.shape}: take a matrix of it, b[i], or call gm.grouped_matmul")
    if options.scale_b is not None:
        raise ArgumentError("scale_b: a quantized matrix has its own factors; leave it out")
    if options.semiring is not None:
        raise ArgumentError(f"semiring={brief(options.semiring)} takes plain matrices: pass b.dequantize()")
    kind = str(getattr(x, "dtype", "")).removeprefix("torch.")
    if kind in ("int8", "float8_e4m3fn"):
        done = _by_levels(x, matrix, options) if out is None else None
        if done is not None:
            return done
        x, w, options = _of_codes(x, kind == "int8", matrix, options)
        if w is not None:
            return multiply(x, w.swapaxes(-1, -2), out, **options.passed())
    elif options.scale_a is not None:
        raise DTypeError(f"scale_a with an a of {kind}: they are the factors of codes of int8 and float8_e4m3")
    v = viewed("a", x)
    checked_dtype(v.dtype, "a")
    arrays.together(a=v, b=view(matrix.packed))
    if v.device == "cpu":
        return _on_cpu(x, v, matrix, out, options, multiply)
    done = None
    if out is None and options.precision is None and options.dtype is None:
        done = _arranged(x, matrix, options)
        done = _by_kernel(x, v, matrix, options) if done is None else done
    if done is None:
        done = multiply(x, device_weight(matrix, v.dtype, v).swapaxes(-1, -2), out, **options.passed())
    return done


def _by_levels(x: Any, matrix: QuantizedMatrix, options: Options) -> Any:
    """Return the product of codes of 8 bits by levels of 4 as the same type; None where no kernel has it."""
    library, factors, bias = library_of(x), options.scale_a, options.bias
    result = "f32" if options.dtype is None else dtype_name(options.dtype)
    if library.__name__ != "torch" or not x.is_cuda or x.dim() != 2 or result not in ("bf16", "f16", "f32"):
        return None
    if options.precision is not None or options.threads is not None or not isinstance(bias, type(x) | None):
        return None
    if isinstance(factors, int | float):
        factors = library.full((x.shape[0],), float(factors), device=x.device)
    v = view(x)
    if factors is not None:
        if not isinstance(factors, type(x)) or factors.shape not in ((x.shape[0],), (x.shape[0], 1)):
            return None
        if view(factors).device != v.device or factors.dtype is not library.float32:
            return None
    if bias is not None and (view(bias).device != v.device or tuple(bias.shape) != matrix.shape[1:]):
        return None
    arrays.together(a=v, b=view(matrix.packed))
    result_shape(v.shape, matrix.shape)
    check_activation(options.activation, result)
    layer = import_module(f"gemmery.{library.__name__}.arranged").codes_layer
    return layer(x, matrix, factors, bias, options.activation, result)


def _of_codes(x: Any, whole: bool, matrix: QuantizedMatrix, options: Options) -> tuple[Any, Any, Options]:
    """Return x, a weight (n, k) by which it can be multiplied or None, and options, where x is codes of 8 bits.

    On Hopper tensor cores multiply codes by a matrix of the same codes with a factor a column, and codes as bfloat16,
    which holds all, by the expanded matrix. Elsewhere x becomes floating-point numbers.
    """
    from gemmery.cuda import driver

    result = "f32" if options.dtype is None else dtype_name(options.dtype)
    options = options._replace(dtype=dtypes.get(result).numpy)
    here = str(getattr(x, "device", "cpu")) == "cpu"
    if not here and driver.find(view(x).device).capability == 90:
        alike = matrix.format == ("int8" if whole else "float8_e4m3")
        if alike and matrix.zeros is None and matrix.scales.shape[-1] == 1:
            w = matrix.packed if whole else bits_of(matrix.packed, "e4m3")
            return x, w, options._replace(scale_b=cast(matrix.scales, "f32").reshape(-1))
        return cast(x, "bf16"), device_weight(matrix, "bf16", view(x)), options
    values = from_e4m3(bits_of(x, "uint8")) if here and not whole else cast(x, "f32")
    factors = options.scale_a
    if factors is not None:
        values = values * (factors.reshape(-1, 1) if getattr(factors, "ndim", 0) else factors)
    return values, None, options._replace(scale_a=None, dtype=None if result == "f32" else options.dtype)


def _on_cpu(x: Any, v: View, matrix: QuantizedMatrix, out: Any, options: Options, multiply: Multiply) -> Any:
    """Return the product of few rows by panels of levels, and other ones by the expanded matrix."""
    only_on_devices(options)
    result = v.dtype if options.dtype is None else widened(v.dtype, dtype_name(options.dtype))
    (k, n), shape = matrix.shape, result_shape(v.shape, matrix.shape)
    count, panels = math.prod(shape[:-1]), panels_for(matrix, result)
    if panels is None or 0 in (*shape, k) or not (count <= _FEW or options.batch_invariant):
        return multiply(x, _expanded(matrix, v.dtype), out, **options.passed())
    call = checked_call("matmul", v, View(0, (k, n), (0, 0), v.dtype), out, options)
    arrays.unchanged(a=v, bias=call.bias, out=None if out is None else call.c)
    call = with_accumulators(call)
    z = v if v.dtype == result else arrays.converted(v, result)
    flat = view((x if arrays.allocates(x) and z is v else arrays.as_numpy(z)).reshape(1, count, k))
    like, size = arrays.kind(x, matrix.packed), dtypes.get(result).size
    written = arrays.empty(like, shape, result)
    c = View(written.pointer, (1, count, n), (0, n * size, size), result)
    panels.multiply(flat, c, call.bias, options.activation or "", call.options.threads or cpu_threads.get())
    if out is None:
        return arrays.wrap(like, written.array)
    arrays.store(written, call.c)
    arrays.written(out)
    return out


def panels_for(matrix: QuantizedMatrix, result: str) -> packed_levels.PackedLevels | None:
    """Return the panels that a product with results of this type reads; None where there are none."""
    return matrix.panels() if result in packed_levels.DTYPES else None


def _expanded(matrix: QuantizedMatrix, dtype: str) -> Any:
    """Return the expanded matrix in an element type; packed by `gm.pack`, and kept, where it has no levels."""
    if matrix.panels() is not None or dtype not in packed_levels.DTYPES:
        return matrix.dequantize(dtypes.get(dtype).numpy)  # type: ignore[arg-type]
    if dtype not in matrix._copies:
        matrix._copies[dtype] = pack(matrix.dequantize(dtypes.get(dtype).numpy))  # type: ignore[arg-type]
    return matrix._copies[dtype]


def _arranged(x: Any, matrix: QuantizedMatrix, options: Options) -> Any:
    """Return the product by the copy of the matrix in the order of Hopper's kernel, which the first one makes.

    None where there is no such kernel, and for arrays of other libraries than PyTorch.
    """
    library = library_of(x).__name__
    if library != "torch" or not isinstance(options.bias, type(x) | None):
        return None
    if options.bias is not None:
        view(options.bias)  # raises if PyTorch records operations on it
    # By a name that is put together: the parts for libraries are above this one.
    layer = import_module(f"gemmery.{library}.arranged").matrix_layer
    return layer(x, matrix, options.bias, options.activation, bool(options.batch_invariant))


def experts(
    x: Any, matrix: QuantizedMatrix, v: View, where: View, shape: Ints, offsets: Any, out: Any, options: Options
) -> Any:
    """Return the groups' rows of x times the matrices of a stack by the launch that reads codes; None without one.

    None for arrays of other libraries than PyTorch, results of another type than x, and offsets of the host in a graph.
    """
    library, bias = library_of(x), options.bias
    plain = options.scale_a is options.scale_b is options.dtype is None
    if library.__name__ != "torch" or not plain or 0 in shape or not isinstance(bias, type(x) | None):
        return None
    if out is not None:
        target, steps = viewed("out", out), arrays.contiguous(shape, dtypes.get(v.dtype).size)
        if (target.dtype, target.shape, target.strides, target.device) != (v.dtype, shape, steps, v.device):
            return None
        read = (v, view(matrix.packed), *((view(bias),) if bias is not None else ()))
        if any(arrays.overlap(each, target) for each in read):
            return None
        writable(target, shape, v.dtype)
    if bias is not None:
        if view(bias).device != v.device:
            return None
        check_bias(view(bias), (matrix.shape[0], shape[1]), v.dtype)
        bias = library.broadcast_to(bias, (matrix.shape[0], shape[1]))
    check_activation(options.activation, v.dtype)
    if where.device == "cpu":
        if library.cuda.is_current_stream_capturing():
            return None
        offsets = library.tensor(host_ends(offsets, v.shape[0]), dtype=library.int32).to(x.device)
    multiply = import_module(f"gemmery.{library.__name__}.arranged").experts
    return multiply(x, matrix, offsets, bias, options.activation, bool(options.batch_invariant), out)


def _by_kernel(x: Any, v: View, matrix: QuantizedMatrix, options: Options) -> Any:
    """Return the product of few rows by the packed matrix; None where no kernel makes it."""
    n, bias, activation = matrix.shape[1], options.bias, options.activation
    if options.batch_invariant or not arrays.allocates(x):
        return None
    start = 0
    if bias is not None:
        if not arrays.allocates(bias) or tuple(bias.shape) != (n,) or view(bias).device != v.device:
            return None
        bias = arrays.astype(bias, "f32").reshape(1, n)
        row = view(bias)
        if row.strides[1] != 4:
            return None
        start = row.pointer
    if v.strides != arrays.contiguous(v.shape, dtypes.get(v.dtype).size):
        x = library_of(x).stack([x])[0]  # a contiguous copy
        v = view(x)
    calls = matrix._copies.setdefault("calls", {})
    key = v.shape, v.dtype, v.pointer & 15, activation, bias is None
    known = calls.get(key)
    if known is None:
        known = keep(calls, key, _prepared(v, matrix, epilogue_name(bias, activation, v.dtype)))
    if isinstance(known, str):
        return None
    run, packed, scales, shape = known
    result = x.new_empty(shape) if hasattr(x, "new_empty") else arrays.empty(x, shape, v.dtype).array
    to = result.data_ptr() if hasattr(result, "data_ptr") else result.data.ptr
    run(v.pointer, packed, to, v.stream, start, scales)
    return result


def _prepared(v: View, matrix: QuantizedMatrix, epilogue: str) -> tuple[Any, int, int, tuple[int, ...]] | str:
    """Return the launch for an x like this, the addresses of the matrix and the shape of the result; or why none."""
    (k, n), count = matrix.shape, math.prod(v.shape[:-1])
    if matrix.format not in ("int8", "int4") or matrix.zeros is not None or not 0 < count <= MOST_ROWS:
        return "a kernel multiplies few rows by integers without zero points"
    if v.shape[-1] != k:
        return "x has other columns"
    packed, scales = view(matrix.packed), view(matrix.scales)
    flat, c = (View(v.pointer & 15, (count, i), (2 * i, 2), v.dtype, v.device) for i in (k, n))
    run = prepare_packed(
        flat, still(packed), still(scales), c._replace(pointer=0), FORMATS[matrix.format].bits, epilogue
    )
    return run if isinstance(run, str) else (run, packed.pointer, scales.pointer, (*v.shape[:-1], n))


def device_weight(matrix: QuantizedMatrix, dtype: str, x: View) -> Any:
    """Return the matrix (..., n, k) on its device in an element type: by a kernel where one expands this format."""
    if len(matrix.shape) > 2 and matrix.scale is not None:  # one for each matrix
        each = [device_weight(matrix[i], dtype, x) for i in range(len(matrix))]
        return library_of(matrix.packed).stack(each)
    *groups, k, n = matrix.shape
    packed, scales, zeros, scale = (
        None if z is None else view(z.reshape(-1, z.shape[-1]) if z.ndim > 1 else z) for z in matrix.parts
    )
    assert packed is not None
    assert scales is not None
    optional = zeros and still(zeros), scale and still(scale)
    run = prepare_unpacking(still(packed), still(scales), *optional, dtype, matrix.format)
    if isinstance(run, str):
        return decoded(matrix.parts, matrix.format, dtype)
    target = arrays.empty(matrix.packed, (*groups, n, k), dtype)
    first = 0 if zeros is None else zeros.pointer
    run(first, packed.pointer, target.pointer, x.stream, 0 if scale is None else scale.pointer, scales.pointer)
    return target.array


def treatment(v: View, matrix: QuantizedMatrix) -> str:
    """Return what a product of an a like this does with a quantized matrix, in words."""
    stored, wide = f"{matrix.format} in groups of {matrix.group}, {matrix.nbytes:,} bytes", dtypes.get(v.dtype).numpy
    few = math.prod(v.shape[:-1]) <= _FEW and panels_for(matrix, v.dtype) is not None
    if v.device != "cpu":
        how = f"a kernel reads its codes where one can hold its factors; else it is expanded to {wide}"
    elif few:
        how = "the micro-kernel widens its levels, and multiplies sums by factors"
    else:
        how = f"it is expanded to {wide}"
    return f"b is {stored}: {how}"
