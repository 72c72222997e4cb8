"""Complex products on a device by the kernels for real numbers, of twice the columns and twice the k.

Rows of A and of C are rows of real numbers as they lie; B is expanded in scratch memory (complex_expand.cu). That
serves tensor cores: those for float64, and those that multiply float32 in parts where `precision` allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from gemmery import arrays, dtypes
from gemmery.api.device_call import table
from gemmery.api.device_operands import Inputs
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.cuda import driver, ordered
from gemmery.cuda.geometry import C_NAMES, template
from gemmery.cuda.launch import Ready, first_arguments, product_argument
from gemmery.keywords import Options
from gemmery.problem import Problem

REAL = {"complex64": "f32", "complex128": "f64"}  # the numbers that are multiplied in the place of these
_THREADS, _BLOCKS = 256, 8  # of a block, and of these on a multiprocessor
# Bytes of B that are expanded at a time, by whole tiles of columns: of 8192^3 in complex128 it would take 4 GB.
_MOST, _COLUMNS = {"complex64": 1 << 31, "complex128": 1 << 29}, 128
_WORK, _ROWS = 1 << 24, 64  # multiply-adds and rows of A from which expanding B is a small part


def pays(inputs: Inputs, options: Options) -> bool:
    """Return True where a product of complex numbers is one of real ones: its scalars are real, and it has no bias.

    That takes less time than a complex kernel where B is reused: 4096^3 of complex64 10.9 ms and 11.9 on an H200.
    """
    x, y = inputs.x, inputs.y
    if inputs.bias is not None or options.alpha.imag or options.beta.imag:
        return False
    if not all(2 <= len(z.shape) <= 3 for z in (x, y)) or 0 in (*x.shape, *y.shape):
        return False
    if options.precision is not None:
        return True
    card = driver.find(x.device)
    faster = x.dtype == "complex64" or card.peak("tensor_f64") > card.peak("f64")
    return faster and prod(x.shape[-2:]) * y.shape[-1] >= _WORK and x.shape[-2] >= _ROWS


def multiply(
    inputs: Inputs, target: View, options: Options, scratch: Callable[[View, int], View],
    compute: Callable[[Inputs, View, Options], Any],
) -> None:  # fmt: skip
    """Write a product to `target`, whose rows are adjacent, by `compute`, which multiplies real numbers.

    `target` has what beta multiplies, and overlaps neither A nor B, of which it is written some columns at a time.
    `scratch` allocates bytes on the device of a view for the time of the call.
    """
    x, y = inputs.x, inputs.y
    size = dtypes.get(x.dtype).size
    others = {z.stream for z in (x, y, target)} - {x.stream}
    for other in others:
        ordered.wait(x.stream, other, x.ordinal)
    if x.strides[-1] != size and x.shape[-1] > 1:
        rows = _flat(x)
        memory = scratch(x, prod(rows.shape) * size)
        _launch(rows.shape, rows.strides, x.dtype, x.device, "a")(x.pointer, 0, 0, x.stream, 0, memory.pointer)
        x = memory._replace(shape=x.shape, strides=arrays.contiguous(x.shape, size), dtype=x.dtype, stream=x.stream)
    columns, n = _flat(y), y.shape[-1]
    step = max(_COLUMNS, _MOST[y.dtype] // (2 * prod(columns.shape[:-1]) * size) // _COLUMNS * _COLUMNS)
    memory = scratch(x, 2 * prod(columns.shape[:-1]) * min(step, n) * size)
    real = _as_real(x)
    for first in range(0, n, step):
        wide = _expanded(_columns(y, first, step), memory, x)
        compute(Inputs(real, wide), _as_real(_columns(target, first, step)), options)
    for other in others:
        ordered.wait(other, x.stream, x.ordinal)


def _columns(z: View, first: int, count: int) -> View:
    """Return some columns of the matrices of an array."""
    shape = *z.shape[:-1], min(count, z.shape[-1] - first)
    return z._replace(pointer=z.pointer + first * z.strides[-1], shape=shape)


def _expanded(y: View, memory: View, x: View) -> View:
    """Write B as real numbers to memory, on the stream of x."""
    columns, half = _flat(y), dtypes.get(y.dtype).size // 2
    _launch(columns.shape, columns.strides, y.dtype, x.device, "b")(0, y.pointer, 0, x.stream, 0, memory.pointer)
    k, n = y.shape[-2:]
    steps = (half, 2 * k * half) if _k_adjacent(columns.strides) else (2 * n * half, half)
    matrices = (4 * k * n * half,) * (len(y.shape) > 2)
    shape = *y.shape[:-2], 2 * k, 2 * n
    return memory._replace(shape=shape, strides=(*matrices, *steps), dtype=REAL[y.dtype], stream=x.stream)


def as_real(inputs: Inputs, target: View) -> tuple[Inputs, View]:
    """Return the real product that takes the place of a complex one, of operands by rows, without memory."""
    x, y = inputs.x, inputs.y
    real, half = REAL[x.dtype], dtypes.get(x.dtype).size // 2
    shapes = (*x.shape[:-1], 2 * x.shape[-1]), (*y.shape[:-2], 2 * y.shape[-2], 2 * y.shape[-1])
    left, right = (View(0, shape, arrays.contiguous(shape, half), real, x.device) for shape in shapes)
    return Inputs(left, right), _as_real(target)


def _as_real(z: View) -> View:
    """Return rows of complex numbers as rows of real ones."""
    return z._replace(
        shape=(*z.shape[:-1], 2 * z.shape[-1]), strides=(*z.strides[:-1], dtypes.get(z.dtype).size // 2),
        dtype=REAL[z.dtype],
    )  # fmt: skip


def _flat(z: View) -> View:
    """Return a matrix, or a batch along one dimension, as a batch."""
    return z if len(z.shape) == 3 else z._replace(shape=(1, *z.shape), strides=(0, *z.strides))


def _k_adjacent(strides: Ints) -> bool:
    return abs(strides[-2]) < abs(strides[-1])


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
    own = View(0, shape, strides, dtype)
    others = [View(0, sides, arrays.contiguous(sides, dtypes.get(dtype).size), dtype) for sides in ((batch, m, k),
              (batch, k, n), (batch, m, n))]  # fmt: skip
    a, b = (own, others[1]) if operand == "a" else (others[0], own)
    argument = product_argument(Problem(m, n, k, dtype, dtype, batch, device=device), a, b, others[2])
    function = int(driver.function("complex_expand.cu", name, card.ordinal, 0))
    grid = min(count, _BLOCKS * card.sms), 1, 1
    return Ready([first_arguments(function, grid, (_THREADS, 1, 1), 0)], argument, card.ordinal, 0, False, out=dtype)
