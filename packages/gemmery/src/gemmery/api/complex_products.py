"""Complex products on a device by the kernels for real numbers, of twice the columns and twice the k.

Rows of A and of C are rows of real numbers as they lie; B is expanded in scratch memory (complex_expand.cu). That
serves tensor cores: those for float64, and those that multiply float32 in parts where `precision` allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from gemmery import arrays, dtypes
from gemmery.api.checked import CheckedCall
from gemmery.api.device_call import table
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.cuda import driver
from gemmery.cuda.geometry import C_NAMES, Geometry, template
from gemmery.cuda.launch import Ready, loaded, product_argument
from gemmery.problem import Problem

REAL = {"complex64": "f32", "complex128": "f64"}  # the numbers that are multiplied in the place of these
_THREADS, _BLOCKS = 256, 8  # of a block, and of these on a multiprocessor
# Bytes of B that are expanded at a time, by whole tiles of columns: of 8192^3 in complex128 it would take 4 GB.
_MOST, _COLUMNS = {"complex64": 1 << 31, "complex128": 1 << 29}, 128
_WORK, _ROWS = 1 << 24, 64  # multiply-adds and rows of A from which expanding B is a small part


def pays(call: CheckedCall) -> bool:
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


def real_products(call: CheckedCall, scratch: Callable[[View, int], View]) -> Iterator[CheckedCall]:
    """Yield the products of real numbers that a complex one consists of, each when what it reads is written.

    C, whose rows are adjacent, has what beta multiplies, and overlaps neither A nor B: it is written some columns at a
    time. `scratch` allocates bytes on the device of a view for the time of the call.
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
