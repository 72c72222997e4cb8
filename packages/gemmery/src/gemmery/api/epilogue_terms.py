"""A product with an epilogue: its weights, options, shape, types and outputs, and how kernels reach its operands.

On the CPU operands are slots, on a device views: of all matrices of a batch, then of one.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import array_libraries
from gemmery.api.checked import writable
from gemmery.api.options import dtype_name, result_types, viewed
from gemmery.api.promote import promoted
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View, view
from gemmery.cpu.packed_once import Packed
from gemmery.cpu.slots import WORDS
from gemmery.epilogues.graph import EpilogueGraph, GraphOperand, GraphOutput
from gemmery.epilogues.trace import Epilogue
from gemmery.errors import ArgumentError, DTypeError, ShapeError, brief
from gemmery.keywords import Options
from gemmery.tuples import NamedTuple


class Shapes(NamedTuple):
    """The shape of a product: a batch of m x n, where m or n is missing for a vector."""

    batch: Ints
    m: int
    n: int
    rows: bool = True  # False where A is a vector: results then have no dimension of m
    columns: bool = True  # False where B is one

    def of(self, kind: str) -> Ints:
        """Return the shape of an output of a kind, as the caller sees it."""
        columns = (1,) if kind == "column" else (self.n,) * self.columns
        return (*self.batch, *(self.m,) * self.rows, *columns)


def weights_of(b: Any, options: Options) -> tuple[Any, ...]:
    """Return the weights of a product with an epilogue. Raises ArgumentError for what excludes one."""
    weights = b if isinstance(b, tuple) else (b,)
    if len(weights) not in (1, 2):
        raise ArgumentError(f"b is a tuple of {len(weights)}: with an epilogue it may have one or two matrices")
    if any(isinstance(weight, Packed) or type(weight) in array_libraries.QUANTIZED for weight in weights):
        raise ArgumentError("epilogue= takes plain matrices: pass b before it was packed, or b.dequantize()")
    for name, way_out in _EXCLUDED.items():
        if getattr(options, name) is not None:
            raise ArgumentError(f"{name}= and epilogue= exclude each other: {way_out}")
    return weights


_EXCLUDED = {
    "bias": "write the bias in the epilogue's function",
    "activation": "write the activation in the epilogue's function",
    "semiring": "apply the function to the result",
}


def check_values(function: Epilogue, operands: Mapping[str, Any], count: int) -> None:
    """Raise ArgumentError unless all parameters after the sums have a value, and no sum has one."""
    for name in function.parameters[:count]:
        if name in operands and operands[name] is not function.defaults.get(name):
            raise ArgumentError(f"epilogue {function.__name__} computes {name!r} of a sum: no operand has that name")
    for name in function.parameters[count:]:
        if name not in operands:
            raise ArgumentError(
                f"epilogue {function.__name__} has no value for its parameter {name!r}: bind it by name, "
                f"{function.__name__}({name}=...), or pass operands={{{name!r}: ...}}"
            )


def read_operand(name: str, value: Any, on_device: bool) -> View | float:
    """Return an operand as a number, or as the view of an array where the product is.

    Raises ArgumentError for a whole number beyond float64 and for an array elsewhere, DTypeError for complex numbers.
    """
    if isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, np.complexfloating):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass  # of texts and dates, which `viewed` refuses in words
        except OverflowError:
            raise ArgumentError(f"operand {name!r} is {brief(value)}, beyond float64: pass a float") from None
    operand = viewed(f"operand {name!r}", value)
    if dtypes.get(operand.dtype).kind == "c":
        raise DTypeError(f"operand {name!r} is {operand.dtype}: an epilogue computes real numbers")
    if (operand.device != "cpu") != on_device:
        have, where = ("the CPU", "a device") if on_device else (operand.device, "the CPU")
        raise ArgumentError(f"operand {name!r} is on {have}, and the product on {where}: move one to the other")
    return operand


def sides_of(name: str, shape: Ints, batch: Ints, m: int, n: int) -> tuple[Ints, int, int]:
    """Return the batch, rows and columns of an operand. Raises ShapeError if it does not broadcast to the product."""
    outer, rows, columns = shape[:-2], *((1, 1, *shape)[-2:])
    broadcasts = len(outer) <= len(batch) and all(
        own in (1, full) for own, full in zip(reversed(outer), reversed(batch), strict=False)
    )
    if not broadcasts or rows not in (1, m) or columns not in (1, n):
        raise ShapeError(
            f"operand {name!r} has shape {shape}, and the product {(*batch, m, n)}: an operand is a number, "
            f"({n},) for the columns, ({m}, 1) for the rows, or ({m}, {n}), with batch dimensions that broadcast"
        )
    return outer, rows, columns


def shapes_of(x: View, ys: Sequence[View]) -> Shapes:
    """Return the shape of the products of `x`. Raises ShapeError for weights whose products differ in shape."""
    shape = result_shape(x.shape, ys[0].shape)
    if any(result_shape(x.shape, y.shape) != shape for y in ys):
        raise ShapeError(f"the weights have shapes {ys[0].shape} and {ys[1].shape}; their products must have one shape")
    rows, columns = len(x.shape) > 1, len(ys[0].shape) > 1
    batch = shape[: len(shape) - rows - columns]
    return Shapes(batch, x.shape[-2] if rows else 1, ys[0].shape[-1] if columns else 1, rows, columns)


def types_of(x: View, ys: Sequence[View], dtype: Any) -> tuple[str, str]:
    """Return the types of the sums and of the result. Raises DTypeError for bools and complex numbers."""
    common = promoted(x.dtype, ys[0].dtype)
    if any(promoted(x.dtype, y.dtype) != common for y in ys):
        raise DTypeError(f"the weights are {ys[0].dtype} and {ys[1].dtype}: convert one to the type of the other")
    row = dtypes.get(common)
    if row.kind in "cb":
        raise DTypeError(
            f"an epilogue computes real numbers, and the product is {row.numpy}: convert the operands first"
        )
    if row.kind == "f":
        result = result_types(x, ys[0], dtype)[1]
        if dtypes.get(result).kind != "f":
            raise DTypeError(f"dtype={dtypes.get(result).numpy!r}: an epilogue computes real numbers; cast its result")
        return dtypes.get(result).accumulator, result
    result = ("f32" if row.size <= _EXACT else "f64") if dtype is None else dtype_name(dtype)
    if dtypes.get(result).kind != "f":
        raise DTypeError(
            f"the result of an epilogue of {row.numpy} is a floating-point type, not {result}: cast it after"
        )
    return row.accumulator, result


_EXACT = 2  # bytes of integers whose sums are converted to float32; those of longer ones to float64


def with_kinds(graph: EpilogueGraph, operands: Sequence[GraphOperand], result: str) -> EpilogueGraph:
    """Return a graph whose operands have kinds, and whose outputs have the kinds that follow and types."""
    graph = graph.bound(operands, (result,) * len(graph.outputs))
    kinds = graph.kinds()
    late = graph.after_rows | set(graph.statistics)
    return graph._replace(
        outputs=tuple(
            output._replace(
                kind="column" if kinds[output.node] in ("column", "number") and output.node in late else "matrix"
            )
            for output in graph.outputs
        )
    )


def saved(name: str, graph: EpilogueGraph, m: int, n: int, size: int, fused: bool) -> str:
    """Return in words where an epilogue is applied, and the bytes of matrices that are not written.

    `size` are those of an element, of all products of a batch.
    """
    operations = sum(bool(node.inputs) for node in graph.nodes)
    results = {output.node for output in graph.outputs}
    between = [i for i, kind in enumerate(graph.kinds()) if kind == "matrix" and graph.nodes[i].op != "operand"]
    count = len([i for i in between if i not in results and (fused or graph.nodes[i].op != "sum")])
    where = "to each tile before it is stored" if fused else "by rows, in a pass over the sums"
    return (
        f"{name}, {operations} operations, {where}; {count} matrices of {m} x {n} between them are not written and "
        f"read: {2 * count * size * m * n:,} bytes"
    )


def outs_of(out: Any, count: int) -> tuple[Any, ...]:
    """Return the `out` of each result, or None for each."""
    outs = out if isinstance(out, tuple) else (out,) * (1 if out is not None else count)
    if len(outs) != count:
        raise ArgumentError(
            f"out has {len(outs)} of the {count} results that the epilogue returns: pass a tuple of {count} arrays"
        )
    return outs


def out_of(out: Any, output: GraphOutput, shape: Ints) -> View:
    """Return the memory of an `out`, with codes of 8 bits as int8. Raises the errors of `matmul` for a wrong one."""
    target, stored = view(out), stored_as(output.dtype)
    if stored != output.dtype and target.dtype == output.dtype:
        target = target._replace(dtype=stored)
    writable(target, shape, stored)
    return target


def stored_as(dtype: str) -> str:
    """Return the type in memory of an output; codes of 8 bits are int8 there."""
    return "int8" if dtypes.get(dtype).size == 1 else dtype


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
