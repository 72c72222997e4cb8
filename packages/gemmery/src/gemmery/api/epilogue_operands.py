"""How the kernels of an epilogue reach operands and results: checked against the product's shape, as slots."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.epilogue_terms import Shapes, number_of, operand_view, out_of, sides_of, stored_as
from gemmery.arrange import Ints
from gemmery.arrays import View
from gemmery.cpu.slots import WORDS
from gemmery.epilogues.graph import GraphOperand, GraphOutput
from gemmery.errors import ArgumentError
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
    if isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, np.complexfloating):
        return _number(name, number_of(name, value), element)._replace(value=value)
    view = operand_view(name, value)
    if view.device != "cpu":
        raise ArgumentError(f"operand {name!r} is on {view.device}, and the product on the CPU: move one to the other")
    if view.dtype == "bool":
        view = view._replace(dtype="int8")
    shape, (m, n) = view.shape, (shapes.m, shapes.n)
    batch, rows, columns = sides_of(name, shape, shapes.batch, m, n)
    if math.prod(shape) == 1:
        single = arrays.converted(view, "f64")
        return _number(name, float(np.asarray(single.owner).reshape(-1)[0]), element)._replace(value=value)
    if view.dtype == "f64" and element == "float":
        view = arrays.converted(view, "f32")
    kind = "row" if rows == 1 and columns == n else "column" if columns == 1 and (n > 1 or rows > 1) else "matrix"
    size = dtypes.get(view.dtype).size
    if kind != "column" and columns > 1 and view.strides[-1] != size:
        view = compact(view)
    strides = (0,) * (2 - len(shape)) + view.strides
    step = _batch_step(batch, strides[:-2], shapes.batch)
    if step is None:
        full = np.broadcast_to(arrays.memory(view), (*shapes.batch, rows, columns))
        values = np.ascontiguousarray(full)
        view = View(values.ctypes.data, values.shape, values.strides, view.dtype, owner=values)
        strides, step = view.strides, rows * columns * size
    words = slot(view.pointer, step, 0 if rows == 1 else strides[-2])
    return OperandReading(GraphOperand(name, kind, view.dtype), words, view, value)


def compact(view: View) -> View:
    """Return a C-contiguous copy."""
    values = np.ascontiguousarray(arrays.memory(view))
    return View(values.ctypes.data, values.shape, values.strides, view.dtype, owner=values)


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


def steps(view: View, kind: str, shapes: Shapes) -> tuple[int, int] | None:
    """Return the bytes from one matrix to the next and from row to row; None where columns are not adjacent."""
    size, strides = dtypes.get(view.dtype).size, list(view.strides)
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
    view = out_of(out, output, shape)
    if view.dtype == stored and steps(view, output.kind, shapes) and not any(arrays.overlap(view, x) for x in inputs):
        return Writing(view, output.dtype, out)
    return Writing(arrays.scratch(shape, stored), output.dtype, out, view)
