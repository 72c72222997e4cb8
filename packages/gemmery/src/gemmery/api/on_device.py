"""Products on a CUDA device: checked, converted, and enqueued without waiting and without a copy to the host.

The stream is the current one of a's library, which also allocates memory: results, scratch, and copies of operands that
the result would overwrite. The stream waits for those of the other operands, which then wait for the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import array_libraries
from gemmery.api.array_libraries import NO_PARTS, Keywords
from gemmery.api.checked import bias_shape, checked_call
from gemmery.api.device_call import GATHERED, CheckedCall, OperandScales, located, table
from gemmery.api.device_operands import stay_mixed
from gemmery.api.options import host_ends
from gemmery.api.prepared import PreparedLaunch, TieredLaunch, prepare, prepare_groups, specialized
from gemmery.arrange import Ints
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered
from gemmery.cuda.geometry import C_NAMES, Geometry, Scaling, template
from gemmery.cuda.launch import Ready, loaded, packed_scalars, product_argument
from gemmery.cuda.ordered import DeviceArray
from gemmery.errors import ArgumentError, DeviceError, DTypeError, LayoutError, brief
from gemmery.keywords import NO_OPTIONS, Options
from gemmery.problem import Problem


def product(
    name: str, a: View, b: View, out: Any, options: Options, keywords: Keywords, parts: tuple[int, int] = NO_PARTS,
    shape: Ints | None = None, offsets: View | None = None, multiply_groups: Any = None,
) -> Any:  # fmt: skip
    """Return the product of two arrays by their views, one of which is on a device, for the function `name`.

    `keywords` are those of the options that the call named, in its order: by them it is looked up when it comes again.
    `parts` are the addresses of the parts of A and of B, where they were split before. With `offsets` the result has
    this shape, and `multiply_groups` writes a product for each group where no kernel reads them.
    """
    if options.threads is not None:
        raise ArgumentError(
            f"threads={brief(options.threads)} applies to products on the CPU only, and the operands are on a device; "
            "leave it out"
        )
    placed = checked_call(name, a, b, out, options, parts, shape, offsets)
    if offsets is not None and placed.c.dtype != placed.result:  # rows that belong to no group keep their values
        have, want = dtypes.get(placed.c.dtype).numpy, dtypes.get(placed.result).numpy
        raise DTypeError(f"out is {have} and the result {want}; pass an out of {want}, or dtype={have!r}")
    call = for_kernels(placed, converted)
    arrays.unchanged(a=placed.a, b=placed.b, c=placed.old, out=None if out is None else placed.c)
    direct = out is not None and (offsets is not None or _is_direct(call))
    if not direct:
        call = call._replace(c=new(call.a, call.c.shape, call.result))
    served = _write(call) if offsets is None else _write_groups(call, placed, options, multiply_groups)
    if out is not None:
        if not direct:
            copy(call.c, placed.c)
        arrays.written(out)
    if served is not None and (direct or out is None) and call.a is placed.a and call.b is placed.b:
        array_libraries.remember(name, call, out is None, keywords, served)
    return finished(placed.a, call.c) if out is None else out


def planned(a: View, b: View, options: Options) -> PreparedLaunch:
    """Return what `product` runs for a new result of a product that comes back often, without running it."""
    call = for_kernels(checked_call("matmul", a, b, None, options), arrays.once_converted)
    c = call.c._replace(strides=arrays.contiguous(call.c.shape, dtypes.get(call.result).size))
    call = call._replace(c=c)
    return specialized((as_real(call) if is_real(call) else call).still())


def write(a: View, b: View, c: View, precision: str | None = None) -> TieredLaunch | None:
    """Write a product to C; the views name the device, and A's stream is the one on which it runs.

    It returns what ran, for more products of memory like this; None for an empty one.

    Raises DTypeError for element types that the device does not multiply, RefusedError for a precision it cannot have.
    """
    dtype = None if c.dtype == a.dtype else c.dtype
    call = checked_call("matmul", a, b, None, NO_OPTIONS._replace(dtype=dtype, precision=precision))
    return _write(call._replace(c=c._replace(dtype=call.result)))


def for_kernels(call: CheckedCall, convert: Callable[[View, str], View]) -> CheckedCall:
    """Return a call whose A, B and bias have the types that a kernel reads, by `convert`.

    A bias has the shape of all columns, its strides may be 0. One that is a number has no memory yet.
    """
    a, b, bias = call.a, call.b, call.bias
    if not stay_mixed(call):
        a, b = convert(a, call.common), convert(b, call.common)
    if bias is not None:
        bias = convert(bias, dtypes.get(call.result).accumulator)
        shape, column = bias_shape(b, call.offsets), 0 if bias.shape in ((), (1,)) else bias.strides[-1]
        group = bias.strides[0] if len(bias.shape) == 2 else 0
        bias = bias._replace(shape=shape, strides=(group, column)[-len(shape) :])
    return call if a is call.a and b is call.b and bias is None else call._replace(a=a, b=b, bias=bias)


def converted(z: View, dtype: str) -> View:
    """Return an operand in another element type."""
    return z if z.dtype == dtype else view(arrays.astype(z.array, dtype))


def _is_direct(call: CheckedCall) -> bool:
    """Return False where a product is written to other memory and copied: kernels and `out` do not allow else."""
    c, old, real = call.c, call.old, is_real(call)
    if c.dtype != call.result:
        return False
    if (real or call.scales.kind == "blocks") and c.strides[-1:] != (dtypes.get(c.dtype).size,):
        return False
    if old is not None and not arrays.same(old, c) and arrays.overlap(old, c):
        return False
    return not (real and any(arrays.overlap(z, c) for z in (call.a, call.b)))


def _write(call: CheckedCall) -> TieredLaunch | None:
    """Write a product to C, which has the result's element type; return what ran.

    None for one without elements, and for a complex one by real ones.
    """
    if 0 in call.c.shape:
        return None
    if call.old is not None and (call.options.beta == 0 or arrays.same(call.old, call.c)):
        call = call._replace(old=None)
    served = None if is_real(call) else prepare(call.still())
    enqueue(call, served)
    return served


def enqueue(call: CheckedCall, served: TieredLaunch | None) -> None:
    """Put a product on A's stream, between what the streams of the other operands do; by real products if None."""
    a, c, old, options = call.a, call.c, call.old, call.options
    with ordered.between(a, {z.stream for z in (*call.read, call.offsets, c, old) if z is not None}):
        read = [z and _apart(z, call) for z in call.read]  # keeps copies alive until the launch
        if call.bias is not None and isinstance(options.bias, int | float | complex):
            read[2] = bias = scratch(a, 16)
            ordered.put(options.bias, call.bias.dtype, bias.pointer, a.stream, a.ordinal)
        run = None if served is None else served.next(a.stream)
        memory = scratch(a, run.workspace) if run is not None and run.workspace else None
        if old is not None:  # after all memory is allocated
            copy(old, c, a.stream)
        if served is None or run is None:
            for real in _real_products(call):
                enqueue(real, prepare(real.still()))
            return
        pointers = [0 if z is None else z.pointer for z in (*read, call.offsets, memory)]
        extra = tuple(pointers[3:6]) if call.scales.kind or call.offsets is not None else ()
        if any(call.parts) and any(run.kept):
            extra = (*(part * is_kept for part, is_kept in zip(call.parts, run.kept, strict=True)), 0)
        scalars = packed_scalars(options.alpha, options.beta, c.dtype)
        for first, second, third in served.form.offsets():
            places = pointers[0] + first, pointers[1] + second, c.pointer + third
            run(*places, a.stream, pointers[2], pointers[6], scalars, extra)


def _apart(z: View, call: CheckedCall) -> View:
    """Return an operand, or a copy of the memory that it spans where that overlaps C."""
    if not arrays.overlap(z, call.c):
        return z
    low, high = arrays.reach(z.shape, z.strides, z.dtype)
    memory = scratch(call.a, high - low)
    ordered.copy(z.pointer + low, memory.pointer, high - low, call.a.stream, call.a.ordinal)
    return z._replace(pointer=memory.pointer - low, owner=memory)


def copy(source: View, target: View, *streams: int) -> None:
    """Copy an array into another of the same shape, on whose stream that is, between what these streams do."""
    with ordered.between(target, {source.stream, *streams}):  # the source may then be freed
        size = dtypes.get(source.dtype).size
        alike = source.dtype == target.dtype and source.strides == target.strides
        if alike and source.strides == arrays.contiguous(source.shape, size):
            count = prod(source.shape) * size
            ordered.copy(source.pointer, target.pointer, count, target.stream, target.ordinal)
        elif type(source.array) is not type(target.array) or isinstance(source.array, DeviceArray):
            raise LayoutError(
                f"a {type(source.array).__name__} with strides {source.strides} cannot be copied into a "
                f"{type(target.array).__name__}; pass arrays of one library, or contiguous arrays of the result's "
                "element type"
            )
        else:
            arrays.assign(target.array, source.array)


def new(a: View, shape: Ints, dtype: str) -> View:
    """Allocate on the device of A with its library, or with the driver where that library does not allocate."""
    if arrays.allocates(a.array):
        return arrays.empty(a.array, shape, dtype)
    return DeviceArray(shape, dtype, a.ordinal, a.stream).view


def scratch(a: View, size: int) -> View:
    """Allocate bytes for the duration of a call, as `new` does."""
    if arrays.allocates(a.array):
        return arrays.empty(a.array, (size,), "uint8")
    memory = ordered.Scratch(size, a.stream, a.ordinal)
    return View(memory.pointer, (size,), (1,), "uint8", a.device, a.stream, owner=memory)


def finished(a: View, c: View) -> Any:
    """Return the array of memory from `new`, to which all work has been launched, as an array of A's library."""
    array: Any = c.array
    if not isinstance(array, DeviceArray):
        return array
    array.finished()
    xp: Any = a.array
    return xp.__array_namespace__().from_dlpack(array) if hasattr(xp, "__array_namespace__") else array


def checked_offsets(a: View, offsets: View) -> View:
    """Return the ends of groups with their device. Raises unless they are on the host, or as a kernel reads them."""
    offsets = located(offsets)
    if offsets.device == "cpu":
        return offsets
    arrays.together(a=located(a), offsets=offsets)
    if offsets.dtype != "int32":
        raise DTypeError(
            f"offsets are {dtypes.get(offsets.dtype).numpy} on {offsets.device}, and kernels read int32; convert them, "
            "in PyTorch with offsets.int()"
        )
    if offsets.shape[0] > 1 and offsets.strides != (4,):
        raise LayoutError(f"offsets have a stride of {offsets.strides[0]} bytes; pass a contiguous array of int32")
    return offsets


def _write_groups(
    call: CheckedCall, placed: CheckedCall, options: Options, multiply_groups: Callable[..., None]
) -> TieredLaunch | None:
    """Write the products of groups to C; return the launch that did it if it reads offsets on the device.

    Where no kernel does so `multiply_groups` writes one after the other from `placed`, the call before its conversion.
    """
    a, c, offsets, deep = call.a, call.c, call.offsets, len(call.b.shape) == 2
    rows, what = (a.shape[1], "columns") if deep else (a.shape[0], "rows")
    assert offsets is not None
    on_host, nothing = offsets.device == "cpu", not call.b.shape[0]
    if 0 in c.shape or (nothing and not deep):  # a kernel has neither a matrix nor an offset to read
        return None
    served = "" if nothing else prepare_groups(call.still())
    captured = bool(a.stream) and driver.captures(a.stream)
    if isinstance(served, str) or (captured and on_host):
        if not arrays.allocates(a.array):
            raise LayoutError(f"a {type(a.array).__name__} cannot be cut into groups: pass arrays of PyTorch or CuPy")
        if captured and not (on_host or nothing):
            raise DeviceError(
                "a CUDA graph captures this stream, and no kernel of this product reads offsets on the device; pass "
                "them as a list, which the graph keeps"
            )
        if nothing:
            ends = [0] * c.shape[0]
        else:  # for offsets on the device the host waits for the stream
            ends = host_ends(offsets.array, rows, what) if on_host else clamped(offsets.array.tolist(), rows)
        aside = any(z and arrays.overlap(z, c) for z in placed.read)  # C overlaps what later groups read
        target = new(a, c.shape, c.dtype) if aside else c
        multiply_groups(placed.a.array, placed.b.array, ends, target.array, options)
        if aside:
            last = c.shape[0] if deep else ends[-1]
            copy(view(target.array[:last]), view(c.array[:last]))
        return None
    enqueue(_with_ends(call), served)
    return None if on_host else served


def gathered(a: View, b: View, out: Any, index: View, offsets: View, options: Options) -> Any:
    """Return the products of groups of rows of A that an index on its device names, by a kernel that reads the index.

    None where there is no such kernel, or a copy of the rows takes less time.
    """
    shape = (*index.shape, b.shape[-1])
    call = for_kernels(checked_call("grouped_matmul", a, b, out, options, NO_PARTS, shape, offsets), converted)
    as_it_is = call.a.dtype == a.dtype and call.c.dtype == call.result
    if call.scales.kind or not as_it_is or 0 in (*shape, *a.shape, b.shape[0]):
        return None
    call = call._replace(scales=OperandScales(GATHERED, a=index, scaling=Scaling(GATHERED, a.shape[0])))
    call = call if out is not None else call._replace(c=new(call.a, shape, call.result))
    served = prepare_groups(call.still())
    if isinstance(served, str) or (offsets.device == "cpu" and a.stream and driver.captures(a.stream)):
        return None
    enqueue(_with_ends(call), served)
    if out is None:
        return finished(a, call.c)
    arrays.written(out)
    return out


def _with_ends(call: CheckedCall) -> CheckedCall:
    """Return a call whose offsets are on the device."""
    a, offsets = call.a, call.offsets
    assert offsets is not None
    if offsets.device != "cpu":
        return call
    deep = len(call.b.shape) == 2
    rows, what = (a.shape[1], "columns") if deep else (call.c.shape[0], "rows")
    whole = np.array(host_ends(offsets.array, rows, what), np.int32)
    memory = scratch(a, whole.nbytes)
    ordered.bring(whole.ctypes.data, memory.pointer, whole.nbytes, a.stream, a.ordinal)
    return call._replace(offsets=memory)


def clamped(ends: list[int], rows: int) -> list[int]:
    """Return ends as kernels use them: at least the one before, at most the number of rows.

    >>> clamped([3, 1, 9, -1], 5)
    [3, 3, 5, 5]
    """
    return list(accumulate((min(end, rows) for end in ends), max, initial=0))[1:]


# ---- complex products ----
# By the kernels for real numbers, of twice the columns and twice the k: rows of A and of C are rows of real numbers as
# they lie; B is expanded in scratch memory (complex_expand.cu). That serves tensor cores: those for float64, and those
# that multiply float32 in parts where `precision` allows it.

REAL = {"complex64": "f32", "complex128": "f64"}  # the numbers that are multiplied in the place of these
_THREADS, _BLOCKS = 256, 8  # of a block, and of these on a multiprocessor
# Bytes of B that are expanded at a time, by whole tiles of columns: of 8192^3 in complex128 it would take 4 GB.
_MOST, _COLUMNS = {"complex64": 1 << 31, "complex128": 1 << 29}, 128
_WORK, _ROWS = 1 << 24, 64  # multiply-adds and rows of A from which expanding B is a small part


def is_real(call: CheckedCall) -> bool:
    """Return True where a product of complex numbers is one of real ones: its scalars are real, and it has no bias.

    That takes less time than a complex kernel where B is reused: 4096^3 of complex64 10.9 ms and 11.9 on an H200.
    """
    a, b, options = call.a, call.b, call.options
    if a.dtype not in REAL or call.bias is not None or options.alpha.imag or options.beta.imag:
        return False
    if not all(2 <= len(z.shape) <= 3 for z in (a, b)) or 0 in (*a.shape, *b.shape):
        return False
    if options.precision is not None:
        return True
    card = driver.find(a.device)
    faster = a.dtype == "complex64" or card.peak("tensor_f64") > card.peak("f64")
    return faster and prod(a.shape[-2:]) * b.shape[-1] >= _WORK and a.shape[-2] >= _ROWS


def _real_products(call: CheckedCall) -> Iterator[CheckedCall]:
    """Yield the products of real numbers that a complex one consists of, each when what it reads is written.

    C, whose rows are adjacent, has what beta multiplies, and overlaps neither A nor B: it is written some columns at a
    time.
    """
    a, b, c = call.a, call.b, call.c._replace(stream=call.a.stream)
    size = dtypes.get(a.dtype).size
    if not _by_rows(a):
        memory = scratch(a, prod(a.shape) * size)
        _rewrite(a, "a", memory.pointer, a.stream)
        a = a._replace(pointer=memory.pointer, strides=arrays.contiguous(a.shape, size), owner=memory.owner)
    column, n = 2 * prod(b.shape[:-1]) * size, b.shape[-1]  # bytes of one that is expanded
    step = max(_COLUMNS, _MOST[b.dtype] // column // _COLUMNS * _COLUMNS)
    memory = scratch(a, column * min(step, n))
    for first in range(0, n, step):
        part = _columns(b, first, step)
        _rewrite(part, "b", memory.pointer, a.stream)
        yield as_real(call._replace(a=a, b=part, c=_columns(c, first, step), old=None), memory.pointer)


def _columns(z: View, first: int, count: int) -> View:
    """Return some columns of the matrices of an array."""
    shape = *z.shape[:-1], min(count, z.shape[-1] - first)
    return z._replace(pointer=z.pointer + first * z.strides[-1], shape=shape)


def as_real(call: CheckedCall, memory: int = 0) -> CheckedCall:
    """Return the real product that takes the place of a complex one; `memory` is the address of B as real numbers."""
    a, b, size = call.a, call.b, dtypes.get(call.a.dtype).size
    if not _by_rows(a):
        a = a._replace(pointer=0, strides=arrays.contiguous(a.shape, size))
    shape = *b.shape[:-2], 2 * b.shape[-2], 2 * b.shape[-1]
    strides = arrays.contiguous(shape, size // 2)
    if _k_adjacent(b.strides):
        strides = *strides[:-2], size // 2, shape[-2] * size // 2
    b = b._replace(pointer=memory, shape=shape, strides=strides, dtype=REAL[b.dtype], stream=a.stream)
    return call._replace(a=_as_real(a), b=b, c=_as_real(call.c))


def _as_real(z: View) -> View:
    """Return rows of complex numbers as rows of real ones."""
    shape, strides = (*z.shape[:-1], 2 * z.shape[-1]), (*z.strides[:-1], dtypes.get(z.dtype).size // 2)
    return z._replace(shape=shape, strides=strides, dtype=REAL[z.dtype])


def _k_adjacent(strides: Ints) -> bool:
    return abs(strides[-2]) < abs(strides[-1])


def _by_rows(z: View) -> bool:
    return z.strides[-1] == dtypes.get(z.dtype).size or z.shape[-1] <= 1


def _rewrite(z: View, operand: str, memory: int, stream: int) -> None:
    """Write the rows of A one after the other to an address, or B as real numbers."""
    shape, strides = (z.shape, z.strides) if len(z.shape) == 3 else ((1, *z.shape), (0, *z.strides))
    a, b = (z.pointer, 0) if operand == "a" else (0, z.pointer)
    _launch(shape, strides, z.dtype, z.device, operand)(a, b, 0, stream, 0, memory)


@table.once
def _launch(shape: Ints, strides: Ints, dtype: str, device: str, operand: str) -> Ready:
    """Return the launch that writes an operand of these strides in bytes to the workspace."""
    real, card = C_NAMES[REAL[dtype]], driver.find(device)
    batch, rows, columns = shape
    m, n, k = (rows, 1, columns) if operand == "a" else (1, columns, rows)
    if operand == "a":
        name, count = template("complex_rows", real), -(-rows // 32) * -(-columns // 32) * batch
    else:
        name, count = template("complex_expand", real, _k_adjacent(strides)), -(-prod(shape) // _THREADS)
    # The kernel reads one of the three, whose strides these are.
    a, b, c = (View(0, shape, strides, dtype) for shape in ((batch, m, k), (batch, k, n), (batch, m, n)))
    argument = product_argument(Problem(m, n, k, dtype, dtype, batch, device=device), a, b, c)
    launch = Geometry("complex_expand.cu", name, (min(count, _BLOCKS * card.sms), 1, 1), (_THREADS, 1, 1))
    return Ready([loaded(launch, card.ordinal)], argument, card.ordinal, 0, False, out=dtype)
