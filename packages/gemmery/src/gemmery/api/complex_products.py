"""Complex products on a device by the kernels for real numbers, of twice the columns and twice the k.

Rows of A and of C are rows of real numbers as they lie; B is expanded in scratch memory (complex_expand.cu). That serves
tensor cores: those for float64, and those that multiply float32 in parts where `precision` allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from gemmery import arrays, dtypes
from gemmery.api.device_call import table
from gemmery.api.device_operands import Inputs
from gemmery.arrays import View
from gemmery.cuda import driver, ordered
from gemmery.cuda.geometry import C_NAMES, template
from gemmery.cuda.launch import Ready, first_arguments, product_argument
from gemmery.keywords import Options
from gemmery.problem import Problem

_REAL = {"complex64": "f32", "complex128": "f64"}
_THREADS, _BLOCKS = 256, 8  # of a block, and of these on a multiprocessor
_WORK, _ROWS = 1 << 24, 64  # multiply-adds and rows of A from which expanding B is a small part

Ints = tuple[int, ...]


def pays(inputs: Inputs, options: Options) -> bool:
    """Return True where a complex product is a real one: on tensor cores, with real scalars and without a bias."""
    x, y = inputs.x, inputs.y
    if x.dtype not in _REAL or inputs.bias is not None or options.alpha.imag or options.beta.imag:
        return False
    if not all(2 <= len(z.shape) <= 3 for z in (x, y)) or 0 in (*x.shape, *y.shape):
        return False
    if x.dtype == "complex64":
        return options.precision is not None
    card, work = driver.find(x.device), prod(x.shape[-2:]) * y.shape[-1]
    return card.peak("tensor_f64") > card.peak("f64") and work >= _WORK and x.shape[-2] >= _ROWS


def multiply(
    inputs: Inputs, target: View, old: View | None, options: Options, scratch: Callable[[View, int], View],
    compute: Callable[[Inputs, View, View | None, Options], Any],
) -> bool:  # fmt: skip
    """Write a product to `target` by `compute`, which multiplies real numbers; False where rows of C are not adjacent.

    `scratch` allocates bytes on the device of a view for the time of the call.
    """
    x, y = inputs.x, inputs.y
    size = dtypes.get(x.dtype).size
    if target.strides[-1] != size and target.shape[-1] > 1:
        return False
    others = {z.stream for z in (x, y, target)} - {x.stream}
    for other in others:
        ordered.wait(x.stream, other, x.ordinal)
    if x.strides[-1] != size and x.shape[-1] > 1:
        rows = _flat(x)
        memory = scratch(x, prod(rows.shape) * size)
        _launch(rows.shape, rows.strides, x.dtype, x.device, "a")(x.pointer, 0, 0, x.stream, 0, memory.pointer)
        x = memory._replace(shape=x.shape, strides=arrays.contiguous(x.shape, size), dtype=x.dtype, stream=x.stream)
    columns = _flat(y)
    memory = scratch(x, 2 * prod(columns.shape) * size)
    _launch(columns.shape, columns.strides, y.dtype, x.device, "b")(0, y.pointer, 0, x.stream, 0, memory.pointer)
    k, n = y.shape[-2:]
    half = size // 2
    steps = (half, 2 * k * half) if _k_adjacent(columns.strides) else (2 * n * half, half)
    shape = (*columns.shape[: len(y.shape) - 2], 2 * k, 2 * n)
    matrices = (4 * k * n * half,) * (len(y.shape) > 2)
    wide = memory._replace(shape=shape, strides=(*matrices, *steps), dtype=_REAL[y.dtype], stream=x.stream)
    added = None if old is None else _as_real(old)
    compute(Inputs(_as_real(x), wide), _as_real(target), added, options)
    for other in others:
        ordered.wait(other, x.stream, x.ordinal)
    return True


def as_real(inputs: Inputs, target: View) -> tuple[Inputs, View]:
    """Return the real product that takes the place of a complex one, of operands that lie row by row, without memory."""
    x, y = inputs.x, inputs.y
    real, half = _REAL[x.dtype], dtypes.get(x.dtype).size // 2
    shapes = (*x.shape[:-1], 2 * x.shape[-1]), (*y.shape[:-2], 2 * y.shape[-2], 2 * y.shape[-1])
    left, right = (View(0, shape, arrays.contiguous(shape, half), real, x.device) for shape in shapes)
    return Inputs(left, right), _as_real(target)


def _as_real(z: View) -> View:
    """Return rows of complex numbers as rows of real ones."""
    return z._replace(
        shape=(*z.shape[:-1], 2 * z.shape[-1]), strides=(*z.strides[:-1], dtypes.get(z.dtype).size // 2),
        dtype=_REAL[z.dtype],
    )  # fmt: skip


def _flat(z: View) -> View:
    """Return a matrix, or a batch along one dimension, as a batch."""
    return z if len(z.shape) == 3 else z._replace(shape=(1, *z.shape), strides=(0, *z.strides))


def _k_adjacent(strides: Ints) -> bool:
    return abs(strides[-2]) < abs(strides[-1])


@table.once
def _launch(shape: Ints, strides: Ints, dtype: str, device: str, operand: str) -> Ready:
    """Return the launch that writes an operand of these strides in bytes to the workspace."""
    real, card = C_NAMES[_REAL[dtype]], driver.find(device)
    batch, rows, columns = shape
    m, n, k = (rows, 1, columns) if operand == "a" else (1, columns, rows)
    if operand == "a":
        name, count = template("complex_rows", real), -(-rows // 32) * -(-columns // 32) * batch
    else:
        name, count = template("complex_expand", real, _k_adjacent(strides)), -(-prod(shape) // _THREADS)
    given = View(0, shape, strides, dtype)
    others = [View(0, sides, arrays.contiguous(sides, dtypes.get(dtype).size), dtype) for sides in ((batch, m, k),
              (batch, k, n), (batch, m, n))]  # fmt: skip
    a, b = (given, others[1]) if operand == "a" else (others[0], given)
    argument = product_argument(Problem(m, n, k, dtype, dtype, batch, device=device), a, b, others[2])
    function = int(driver.function("complex_expand.cu", name, card.ordinal, 0))
    grid = min(count, _BLOCKS * card.sms), 1, 1
    return Ready([first_arguments(function, grid, (_THREADS, 1, 1), 0)], argument, card.ordinal, 0, False, out=dtype)
