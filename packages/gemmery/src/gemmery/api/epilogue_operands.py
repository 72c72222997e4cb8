"""How the kernels of an epilogue reach operands and results, checked against the product's shape.

On the CPU they are slots, on a device views: of all matrices of a batch, then of one.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.epilogue_terms import Shapes, out_of, read_operand, sides_of, stored_as
from gemmery.arrange import Ints
from gemmery.arrays import View, view
from gemmery.cpu.slots import WORDS
from gemmery.epilogues.graph import GraphOperand, GraphOutput
from gemmery.tuples import NamedTuple


class OperandReading(NamedTuple):
    """An operand as a kernel reads it: its kind and type, the words of its slot, and what keeps its memory alive."""

    operand: GraphOperand
    words: bytes
    memory: View | None = None
    value: Any = None  # as the caller passed it


class Writing(NamedTuple):
    """An output: the memory that a kernel writes, the type of its elements, and the caller's `out`, if it is one."""

    memory: View
    dtype: str
    out: Any = None
    copied: View | None = None  # the memory of `out`, where a kernel cannot write it


def read(name: str, value: Any, shapes: Shapes, element: str) -> OperandReading:
    """Return how a kernel reads an operand. Raises ShapeError for a shape that does not fit, DTypeError for a type."""
    z = read_operand(name, value, on_device=False)
    if not isinstance(z, View):
        return _number(name, z, element)._replace(value=value)
    if z.dtype == "bool":
        z = z._replace(dtype="int8")
    shape, (m, n) = z.shape, (shapes.m, shapes.n)
    batch, rows, columns = sides_of(name, shape, shapes.batch, m, n)
    if math.prod(shape) == 1:
        single = arrays.converted(z, "f64")
        return _number(name, float(np.asarray(single.owner).reshape(-1)[0]), element)._replace(value=value)
    if z.dtype == "f64" and element == "float":
        z = arrays.converted(z, "f32")
    kind = "row" if rows == 1 and columns == n else "column" if columns == 1 and (n > 1 or rows > 1) else "matrix"
    size = dtypes.get(z.dtype).size
    if kind != "column" and columns > 1 and z.strides[-1] != size:
        z = compact(z)
    strides = (0,) * (2 - len(shape)) + z.strides
    step = _batch_step(batch, strides[:-2], shapes.batch)
    if step is None:
        full = np.broadcast_to(arrays.memory(z), (*shapes.batch, rows, columns))
        values = np.ascontiguousarray(full)
        z = View(values.ctypes.data, values.shape, values.strides, z.dtype, owner=values)
        strides, step = z.strides, rows * columns * size
    words = slot(z.pointer, step, 0 if rows == 1 else strides[-2])
    return OperandReading(GraphOperand(name, kind, z.dtype), words, z, value)


def compact(z: View) -> View:
    """Return a C-contiguous copy."""
    values = np.ascontiguousarray(arrays.memory(z))
    return View(values.ctypes.data, values.shape, values.strides, z.dtype, owner=values)


def _number(name: str, value: float, element: str) -> OperandReading:
    word = bytes((ctypes.c_double if element == "double" else ctypes.c_float)(value))  # infinity where it overflows
    return OperandReading(GraphOperand(name, "number"), word.ljust(8 * WORDS, b"\0"))


def slot(pointer: int, batch: int, row: int) -> bytes:
    """Return the words of an array: its address, and bytes from one product and one row to the next."""
    return struct.pack("<3q", pointer, batch, row)


def _batch_step(shape: Ints, strides: Ints, full: Ints) -> int | None:
    """Return the bytes from one matrix of a batch to the next, 0 where all are one; None if no step does it."""
    shape, strides = (1,) * (len(full) - len(shape)) + shape, (0,) * (len(full) - len(shape)) + strides
    pairs = [(n, 0 if own == 1 else step) for own, step, n in zip(shape, strides, full, strict=True) if n > 1]
    if not pairs or all(step == 0 for _, step in pairs):
        return 0
    for (_, outer), (n, inner) in pairwise(pairs):
        if outer != n * inner:
            return None
    return pairs[-1][1]


def steps(z: View, kind: str, shapes: Shapes) -> tuple[int, int] | None:
    """Return the bytes from one matrix to the next and from row to row; None where columns are not adjacent."""
    size, strides = dtypes.get(z.dtype).size, list(z.strides)
    columns = shapes.columns or kind == "column"
    column = strides.pop() if columns else size
    row = strides.pop() if shapes.rows else 0
    if kind == "matrix" and shapes.n > 1 and column != size:
        return None
    batch = _batch_step(shapes.batch, tuple(strides), shapes.batch)
    return None if batch is None else (batch, row)


def write(like: Any, output: GraphOutput, shapes: Shapes, out: Any, inputs: Sequence[View]) -> Writing:
    """Return where a kernel writes an output: a new array, `out`, or memory that is copied to `out` afterwards."""
    shape, stored = shapes.of(output.kind), stored_as(output.dtype)
    if out is None:
        return Writing(arrays.empty(like, shape, stored), output.dtype)
    z = out_of(out, output, shape)
    if z.dtype == stored and steps(z, output.kind, shapes) and not any(arrays.overlap(z, x) for x in inputs):
        return Writing(z, output.dtype, out)
    return Writing(arrays.scratch(shape, stored), output.dtype, out, z)


READ = ("f64", "f32", "f16", "bf16")  # what kernels of a device read; other types are converted before


def read_on_device(xp: Any, name: str, value: Any, shapes: Shapes, joined: bool, element: str) -> View | float:
    """Return an operand as a number, as one matrix, row or column for the whole batch, or with all batch dimensions.

    `joined` matrices are one below the other. `xp` is the library of the arrays. Raises as `read` does.
    """
    operand = read_operand(name, value, on_device=True)
    if not isinstance(operand, View):
        return operand
    batch, m, n = shapes[:3]
    outer, rows, columns = sides_of(name, operand.shape, batch, m, n)
    z = operand if operand.dtype in READ else view(arrays.astype(value, element))
    if joined and not (math.prod(outer) == 1 and (rows == 1 or math.prod(batch) == 1)):
        whole = xp.broadcast_to(z.array.reshape((*outer, rows, columns)), (*batch, m, columns))
        return view(whole.reshape((math.prod(batch) * m, columns)))
    strides = (0,) * (2 - len(z.strides)) + z.strides
    along = (step if own > 1 else 0 for step, own in zip(strides[:-2], outer, strict=True))
    return z._replace(shape=(*outer, rows, columns), strides=(*along, *strides[-2:]))


def kind_of(name: str, value: View | float, element: str) -> GraphOperand:
    """Return what the graph of a device says of an operand."""
    if not isinstance(value, View):
        return GraphOperand(name, "number", element)
    rows, columns = value.shape[-2:]
    return GraphOperand(name, "row" if rows == 1 else "column" if columns == 1 else "matrix", value.dtype)


def at_index(value: View | float, index: Ints) -> View | float:
    """Return what an operand has for the matrix of the batch with this index."""
    if not isinstance(value, View):
        return value
    own = index[len(index) - len(value.shape) + 2 :] if index else (0,) * (len(value.shape) - 2)
    start = value.pointer + sum(i * step for i, step in zip(own, value.strides, strict=False))
    return value._replace(pointer=start, shape=value.shape[-2:], strides=value.strides[-2:])
