"""Products with an epilogue that is a Python function: `epilogue=` of `gm.matmul`, on the CPU.

The sums are computed by the kernel that is fastest for their shape, in the type of its accumulator, and a second kernel
applies the function row by row while they are in cache.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gemmery import arrays, config, dtypes, tiers
from gemmery.api.codes import bits_of
from gemmery.api.compute import prepared_for, writable
from gemmery.api.options import dtype_name, only_on_devices, result_types, thread_count, viewed
from gemmery.api.promote import promoted
from gemmery.api.repeats import Prepared
from gemmery.arrange import Ints, result_shape
from gemmery.arrays import View
from gemmery.cpu import build, row_pass
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.cpu.row_pass import Pass
from gemmery.cpu.slots import WORDS
from gemmery.cpu.target import host
from gemmery.epilogues.graph import EpilogueGraph, GraphOperand, GraphOutput
from gemmery.epilogues.reference import evaluate
from gemmery.epilogues.trace import BoundEpilogue, Epilogue
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


class OperandReading(NamedTuple):
    """An operand as a kernel reads it: its kind and type, the words of its slot, and what keeps its memory alive."""

    operand: GraphOperand
    words: bytes
    memory: View | None = None
    value: Any = None  # as an array that broadcasts


class Writing(NamedTuple):
    """An output: the memory that a kernel writes, the type of its elements, and the caller's `out`, if it is one."""

    memory: View
    dtype: str
    out: Any = None
    copied: View | None = None  # the memory of `out`, where a kernel cannot write it


def bound(option: Any, operands: Any) -> tuple[Epilogue, dict[str, Any]]:
    """Return the epilogue and the operands that a caller passed as `epilogue=` and `operands=`."""
    if isinstance(option, BoundEpilogue):
        function, own = option.epilogue, option.operands
    elif callable(option):
        function, own = option if isinstance(option, Epilogue) else Epilogue(option), {}
    else:
        raise ArgumentError(
            f"epilogue={brief(option)} must be a function of the product's element, or gm.epilogue of it"
        )
    if operands is not None and not isinstance(operands, Mapping):
        raise ArgumentError(f"operands={brief(operands)} must be a dict of arrays and numbers by names of parameters")
    return function, {**function.defaults, **own, **function(**(operands or {})).operands}


def product(a: Any, b: Any, out: Any, options: Options, multiply: Callable[..., Any]) -> Any:
    """Return what the epilogue of a product returns: an array, or a tuple of arrays; `multiply` is `gm.matmul`."""
    weights = b if isinstance(b, tuple) else (b,)
    if len(weights) not in (1, 2):
        raise ArgumentError(f"b is a tuple of {len(weights)}: with an epilogue it may have one or two matrices")
    for name in ("bias", "activation"):
        if getattr(options, name) is not None:
            raise ArgumentError(
                f"{name}= and epilogue= exclude each other: write the {name} in the epilogue's function"
            )
    function, operands = bound(options.epilogue, options.operands)
    x, ys = viewed("a", a), [viewed("b", weight) for weight in weights]
    if any(view.device != "cpu" for view in (x, *ys)):
        raise ArgumentError("epilogue= is for products on the CPU: compute the function after the product there")
    only_on_devices(options)
    sums, result = _types(x, ys, options.dtype)
    call = _prepared(function, len(weights), operands, _shapes(x, ys), sums, result)
    threads = thread_count(options.threads) or cpu_threads.get()
    like = arrays.kind(a, *weights)
    writings = _writings(like, call, out, [x, *ys])
    totals: list[View] = []
    if len(ys) == 1 and (fused := in_tiles(call, x, ys[0], result, bool(options.batch_invariant))):
        _run_in_tiles(call, fused, x, ys[0], writings, threads)
        return _results(like, writings)
    for weight, y in zip(weights, ys, strict=True):
        first, kind = writings[0], call.graph.outputs[0].kind
        if not totals and kind == "matrix" and first.dtype == sums and x.dtype == y.dtype:
            total = first.memory  # the kernel reads a sum before it writes there
        else:
            total = arrays.scratch(call.shapes.of("matrix"), sums)
        wider: dict[str, Any] = {} if sums == promoted(x.dtype, y.dtype) else {"dtype": dtypes.get(sums).numpy}
        if options.threads is not None:
            wider["threads"] = options.threads
        if options.batch_invariant:
            wider["batch_invariant"] = True
        multiply(a, weight, out=_array(total), **wider)
        totals.append(total)
    _run(call, totals, writings, threads)
    return _results(like, writings)


class InTiles(NamedTuple):
    """A product whose kernel applies the graph to each tile of sums before it is stored."""

    launch: Launch
    prepared: Prepared
    out: str  # the element type of C, in which f32 and f64 are kept between blocks of k
    merged: bool  # the products of the batch are rows of one


def in_tiles(call: PreparedEpilogue, x: View, y: View, result: str, invariant: bool) -> InTiles | None:
    """Return how the graph is applied in tiles; None where it is not, or its kernel is still compiled aside.

    It is where `packed` computes the plain product, in the same order, and C does not stay in the cache for a pass.
    """
    graph, shapes = call.graph, call.shapes
    size = dtypes.get(call.sums).size
    large = math.prod(shapes.batch) * shapes.m * shapes.n * size > (host().l2 or 1 << 20) // 2
    plain = x.dtype == y.dtype and dtypes.get(x.dtype).kind == "f" and call.sums == dtypes.get(x.dtype).accumulator
    if not (large and plain and shapes.rows and shapes.columns) or graph.statistics:
        return None
    first = graph.outputs[0].dtype
    out = result if first == result and result in (x.dtype, call.sums) else call.sums
    shape = shapes.of("matrix")
    c = View(0, shape, arrays.contiguous(shape, dtypes.get(out).size), out)
    prepared = prepared_for(x.dtype, out, x, y, c, invariant=invariant)
    if prepared is None or prepared.plan.rung.name != "packed" or prepared.form.loops:
        return None
    form, problem = prepared.form, prepared.problem._replace(epilogue=graph.text)
    merged = form.m != shapes.m
    words = [struct.unpack("<3q", reading.words) for reading in call.readings if reading.memory]
    follow = all(batch == shapes.m * row for _, batch, row in words)
    if form.n != shapes.n or (merged and not (follow and all(node.op != "row_index" for node in graph.nodes))):
        return None
    refused = build.packed_refuses(problem) or build.chain(problem) != build.chain(prepared.problem)
    if refused or problem.c_layout != "row":
        return None
    key = "epilogue", graph.text, x.dtype, out
    if config.tiers() and key not in _compiled:

        def compile_aside() -> None:
            build.packed(problem, {})
            _compiled.add(key)

        tiers.aside(key, compile_aside)
        return None
    return InTiles(build.packed(problem, {}), prepared, out, merged)


_compiled: set[tuple[str, ...]] = set()


def _run_in_tiles(
    call: PreparedEpilogue, fused: InTiles, x: View, y: View, writings: Sequence[Writing], threads: int
) -> None:  # fmt: skip
    first, shapes = writings[0].memory, call.shapes
    shape = shapes.of("matrix")
    nested = first.strides == arrays.contiguous(shape, dtypes.get(first.dtype).size)
    c = first if first.dtype == fused.out and nested else arrays.scratch(shape, fused.out)
    table = ctypes.create_string_buffer(b"".join(_table(call, writings)))
    a, b, target = fused.prepared.operands(x, y, c)
    at = View(ctypes.addressof(table), (shapes.n,), (0,), "int8")
    fused.launch.run(fused.launch.job(a, b, target, 1, 0, at, threads), a, b)


def apply(function: Epilogue, sums: Sequence[Any], operands: Mapping[str, Any], result: str) -> Any:
    """Return what an epilogue makes of sums that are there already, arrays of one shape, in the type `result`."""
    views = [viewed("sums", total) for total in sums]
    *batch, m, n = views[0].shape
    shapes = Shapes(tuple(batch), m, n)
    call = _prepared(function, len(sums), operands, shapes, views[0].dtype, result)
    if any(node.op == "sum" for node in call.graph.nodes):  # else only the shape matters
        views = [view if _steps(view, "matrix", shapes) else _compact(view) for view in views]
    writings = _writings(sums[0], call, None, [])
    _run(call, views, writings, cpu_threads.get())
    return _results(sums[0], writings)


class PreparedEpilogue(NamedTuple):
    """A graph with what it reads, for a product."""

    graph: EpilogueGraph
    readings: list[OperandReading]
    shapes: Shapes
    element: str  # in which it computes
    sums: str  # the type of the sums


def _prepared(
    function: Epilogue, count: int, operands: Mapping[str, Any], shapes: Shapes, sums: str, result: str
) -> PreparedEpilogue:  # fmt: skip
    graph = function.graph(count)
    _check_values(function, operands, count)
    element = "double" if "f64" in (sums, result) else "float"
    readings = [_read(operand.name, operands[operand.name], shapes, element) for operand in graph.operands]
    graph = with_kinds(graph, [reading.operand for reading in readings], result)
    return PreparedEpilogue(graph, readings, shapes, element, sums)


def _check_values(function: Epilogue, operands: Mapping[str, Any], count: int) -> None:
    for name in function.parameters[count:]:
        if name not in operands:
            raise ArgumentError(
                f"epilogue {function.__name__} has no value for its parameter {name!r}: bind it by name, "
                f"{function.__name__}({name}=...), or pass operands={{{name!r}: ...}}"
            )


def _writings(like: Any, call: PreparedEpilogue, out: Any, operands: Sequence[View]) -> list[Writing]:
    inputs = [*operands, *(reading.memory for reading in call.readings if reading.memory)]
    return [
        _write(like, output, call.shapes, array, inputs)
        for output, array in zip(call.graph.outputs, _outs(out, len(call.graph.outputs)), strict=True)
    ]


def _results(like: Any, writings: Sequence[Writing]) -> Any:
    results = tuple(_finished(like, writing) for writing in writings)
    return results[0] if len(results) == 1 else results


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


def _outs(out: Any, count: int) -> tuple[Any, ...]:
    outs = out if isinstance(out, tuple) else (out,) * (1 if out is not None else count)
    if len(outs) != count:
        raise ArgumentError(
            f"out is {len(outs)} arrays, and the epilogue returns {count} results: pass a tuple of {count}"
        )
    return outs


def _shapes(x: View, ys: Sequence[View]) -> Shapes:
    shape = result_shape(x.shape, ys[0].shape)
    if any(result_shape(x.shape, y.shape) != shape for y in ys):
        raise ShapeError(f"the weights have shapes {ys[0].shape} and {ys[1].shape}; their products must have one shape")
    rows, columns = len(x.shape) > 1, len(ys[0].shape) > 1
    batch = shape[: len(shape) - rows - columns]
    return Shapes(batch, x.shape[-2] if rows else 1, ys[0].shape[-1] if columns else 1, rows, columns)


def _types(x: View, ys: Sequence[View], dtype: Any) -> tuple[str, str]:
    """Return the types of the sums and of the result."""
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
        return dtypes.get(result).accumulator, result
    result = ("f32" if row.size <= _EXACT else "f64") if dtype is None else dtype_name(dtype)
    if dtypes.get(result).kind != "f":
        raise DTypeError(
            f"the result of an epilogue of {row.numpy} is a floating-point type, not {result}: cast it after"
        )
    return row.accumulator, result


_EXACT = 2  # bytes of integers whose sums are converted to float32; those of longer ones to float64


def _read(name: str, value: Any, shapes: Shapes, element: str) -> OperandReading:
    """Return how a kernel reads an operand. Raises ShapeError for a shape that does not fit, DTypeError for a type."""
    if isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, np.complexfloating):
        return _number(name, float(value), element)
    view = viewed(f"operand {name!r}", value)
    if view.device != "cpu":
        raise ArgumentError(f"operand {name!r} is on {view.device}, and the product on the CPU: move one to the other")
    if dtypes.get(view.dtype).kind == "c":
        raise DTypeError(f"operand {name!r} is {view.dtype}: an epilogue computes real numbers")
    if view.dtype == "bool":
        view = view._replace(dtype="int8")
    elif view.dtype == "f64" and element == "float":
        view = arrays.converted(view, "f32")
    shape, (m, n) = view.shape, (shapes.m, shapes.n)
    batch, rows, columns = shape[:-2], *((1, 1, *shape)[-2:])
    broadcasts = len(batch) <= len(shapes.batch) and all(
        own in (1, full) for own, full in zip(reversed(batch), reversed(shapes.batch), strict=False)
    )
    if not broadcasts or rows not in (1, m) or columns not in (1, n):
        raise ShapeError(
            f"operand {name!r} has shape {shape}, and the product {shapes.of('matrix')}: an operand is a number, "
            f"({n},) for the columns, ({m}, 1) for the rows, or ({m}, {n}), with batch dimensions that broadcast"
        )
    if math.prod(shape) == 1:
        single = arrays.converted(view, "f64")
        return _number(name, float(np.asarray(single.owner).reshape(-1)[0]), element)
    kind = "row" if rows == 1 and columns == n else "column" if columns == 1 and (n > 1 or rows > 1) else "matrix"
    size = dtypes.get(view.dtype).size
    if kind != "column" and columns > 1 and view.strides[-1] != size:
        view = _compact(view)
    strides = (0,) * (2 - len(shape)) + view.strides
    step = _batch_step(batch, strides[:-2], shapes.batch)
    if step is None:
        full = np.broadcast_to(arrays.memory(view), (*shapes.batch, rows, columns))
        values = np.ascontiguousarray(full)
        view = View(values.ctypes.data, values.shape, values.strides, view.dtype, owner=values)
        strides, step = view.strides, rows * columns * size
    words = _slot(view.pointer, step, 0 if rows == 1 else strides[-2])
    return OperandReading(GraphOperand(name, kind, view.dtype), words, view, value)


def _compact(view: View) -> View:
    values = np.ascontiguousarray(arrays.memory(view))
    return View(values.ctypes.data, values.shape, values.strides, view.dtype, owner=values)


def _number(name: str, value: float, element: str) -> OperandReading:
    word = np.asarray(value, np.float64 if element == "double" else np.float32).tobytes()
    return OperandReading(GraphOperand(name, "number"), word.ljust(8 * WORDS, b"\0"), None, value)


def _slot(pointer: int, batch: int, row: int) -> bytes:
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


def _steps(view: View, kind: str, shapes: Shapes) -> tuple[int, int] | None:
    """Return the bytes from one matrix to the next and from row to row; None where columns are not adjacent."""
    size, strides = dtypes.get(view.dtype).size, list(view.strides)
    columns = shapes.columns or kind == "column"
    column = strides.pop() if columns else size
    row = strides.pop() if shapes.rows else 0
    if kind == "matrix" and shapes.n > 1 and column != size:
        return None
    batch = _batch_step(shapes.batch, tuple(strides), shapes.batch)
    return None if batch is None else (batch, row)


def _write(like: Any, output: GraphOutput, shapes: Shapes, out: Any, inputs: Sequence[View]) -> Writing:
    shape, stored = shapes.of(output.kind), "int8" if dtypes.get(output.dtype).size == 1 else output.dtype
    if out is None:
        return Writing(arrays.empty(like, shape, stored), output.dtype)
    view = arrays.view(out)
    if stored != output.dtype and view.dtype == output.dtype:
        view = view._replace(dtype=stored)
    writable(view, shape, stored)
    if view.dtype == stored and _steps(view, output.kind, shapes) and not any(arrays.overlap(view, x) for x in inputs):
        return Writing(view, output.dtype, out)
    return Writing(arrays.scratch(shape, stored), output.dtype, out, view)


def _array(view: View) -> Any:
    """Return memory as an array into which a product is written."""
    return view.owner if hasattr(view.owner, "shape") and not isinstance(view.owner, View) else arrays.as_numpy(view)


def _run(call: PreparedEpilogue, totals: Sequence[View], writings: Sequence[Writing], threads: int) -> None:
    """Apply the graph to sums in memory."""
    shapes = call.shapes
    if 0 in (*shapes.batch, shapes.m):
        return
    if not shapes.n:
        _without_columns(call.graph, shapes, writings)
        return
    words = [_slot(total.pointer, *(_steps(total, "matrix", shapes) or (0, 0))) for total in totals]
    table = ctypes.create_string_buffer(b"".join((*words, *_table(call, writings))))
    launch = row_pass.kernel(Pass(call.graph.text, call.element, (call.sums,) * len(totals)))
    count = math.prod(shapes.batch)
    job = row_pass.job(launch, count, shapes.m, shapes.n, ctypes.addressof(table), threads)
    launch.run(job, totals[0], totals[0])


def _table(call: PreparedEpilogue, writings: Sequence[Writing]) -> list[bytes]:
    """Return the slots of operands and outputs."""
    words = [reading.words for reading in call.readings]
    for output, writing in zip(call.graph.outputs, writings, strict=True):
        words.append(_slot(writing.memory.pointer, *(_steps(writing.memory, output.kind, call.shapes) or (0, 0))))
    return words


def _without_columns(graph: EpilogueGraph, shapes: Shapes, writings: Sequence[Writing]) -> None:
    """Write the statistics of rows without columns."""
    nothing = np.zeros((*shapes.batch, shapes.m, 0))
    operands = {operand.name: nothing for operand in graph.operands}
    for estimate, writing in zip(evaluate(graph, [nothing] * 2, operands), writings, strict=True):
        values = np.ascontiguousarray(estimate.value.reshape(writing.memory.shape))
        source = View(values.ctypes.data, values.shape, values.strides, "f64", owner=values)
        arrays.store(source, writing.memory)


def _finished(like: Any, writing: Writing) -> Any:
    """Return the caller's `out`, or the new array."""
    if writing.out is not None:
        if writing.copied is not None:
            arrays.store(writing.memory, writing.copied)
        arrays.written(writing.out)
        return writing.out
    array = writing.memory.owner
    if writing.memory.dtype != writing.dtype:
        array = bits_of(array, writing.dtype)
    return arrays.wrap(like, array)
