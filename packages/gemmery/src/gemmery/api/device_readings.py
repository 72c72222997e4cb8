"""The operands of a function after a product on a device, as kernels read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.device_operands import located
from gemmery.api.epilogue_terms import number_of, operand_view, sides_of
from gemmery.arrays import View, view
from gemmery.cuda.traced_function import Strides
from gemmery.epilogues.graph import GraphOperand
from gemmery.errors import ArgumentError
from gemmery.tuples import NamedTuple

READ = ("f64", "f32", "f16", "bf16")  # what kernels read for a function; other types are converted before


class DeviceReading(NamedTuple):
    """An operand of a function: what the graph says of it, and its memory, (rows, columns), or a number."""

    operand: GraphOperand
    value: View | float


def operand_of(
    xp: Any, name: str, value: Any, batch: tuple[int, ...], m: int, n: int, joined: bool, element: str
) -> View | float:  # fmt: skip
    """Return an operand as a number, as one matrix, row or column for the whole batch, or with all batch dimensions."""
    if isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, np.complexfloating):
        return number_of(name, value)
    array_view = operand_view(name, value)
    if array_view.device == "cpu":
        raise ArgumentError(f"operand {name!r} is on the CPU, and the product on a device: move one to the other")
    shape = array_view.shape
    outer, rows, columns = sides_of(name, shape, batch, m, n)
    z = array_view if array_view.dtype in READ else view(arrays.astype(value, element))
    if joined and not (math.prod(outer) == 1 and (rows == 1 or math.prod(batch) == 1)):
        whole = xp.broadcast_to(z.array.reshape((*outer, rows, columns)), (*batch, m, columns))
        return view(whole.reshape((math.prod(batch) * m, columns)))
    steps = (0,) * (2 - len(z.strides)) + z.strides
    along = (step if own > 1 else 0 for step, own in zip(steps[:-2], outer, strict=True))
    return z._replace(shape=(*outer, rows, columns), strides=(*along, *steps[-2:]))


def reading_of(name: str, value: View | float, index: tuple[int, ...], element: str) -> DeviceReading:
    """Return an operand of one matrix, that with this index, as kernels read it."""
    if not isinstance(value, View):
        return DeviceReading(GraphOperand(name, "number", element), value)
    rows, columns = value.shape[-2:]
    kind = "matrix" if rows > 1 and columns > 1 else "column" if rows > 1 else "row"
    own = index[len(index) - len(value.shape) + 2 :] if index else (0,) * (len(value.shape) - 2)
    start = value.pointer + sum(i * step for i, step in zip(own, value.strides, strict=False))
    memory = value._replace(pointer=start, shape=(rows, columns), strides=value.strides[-2:])
    return DeviceReading(GraphOperand(name, kind, value.dtype), located(memory))


def place_of(z: View | float) -> Strides | float:
    """Return where an operand or output lies, as the argument has it; a dimension of 1 is repeated."""
    if not isinstance(z, View):
        return z
    size = dtypes.get(z.dtype).size
    row, column = (step // size if length > 1 else 0 for step, length in zip(z.strides, z.shape, strict=True))
    return Strides(z.pointer, row, column)


def vector_of(z: View | float, n: int) -> int:
    """Return the elements of a row that are adjacent and aligned."""
    if not isinstance(z, View) or z.shape[1] != n or n == 1:
        return 1
    size = dtypes.get(z.dtype).size
    if z.strides[1] != size or not 0 <= z.strides[0] * z.shape[0] < size << 31:  # kernels count in 32 bits there
        return 1
    aligned = math.gcd(16, z.pointer, z.strides[0] if z.shape[0] > 1 else 16)
    return max(1, math.gcd(aligned // size, n))
