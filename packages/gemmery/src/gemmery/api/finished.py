"""Products with an epilogue that is a Python function: `epilogue=` of `gm.matmul`.

Those of arrays on a device go to `finished_on_device`. On the CPU the sums are computed by the kernel that is fastest
for their shape, in the type of its accumulator, and a second kernel applies the function row by row while they are in
cache.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemmery import arrays, config, dtypes, tiers
from gemmery.api import epilogue_recipes
from gemmery.api.codes import bits_of
from gemmery.api.compute import prepared_for
from gemmery.api.epilogue_operands import OperandReading, Writing, compact, read, slot, steps, write
from gemmery.api.epilogue_terms import Shapes, check_values, outs_of, shapes_of, types_of, weights_of, with_kinds
from gemmery.api.options import only_on_devices, thread_count, viewed
from gemmery.api.promote import promoted
from gemmery.api.repeats import Prepared
from gemmery.arrays import View
from gemmery.cpu import build, row_pass
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.cpu.row_pass import Pass
from gemmery.cpu.target import host
from gemmery.epilogues.graph import EpilogueGraph
from gemmery.epilogues.reference import evaluate
from gemmery.epilogues.trace import BoundEpilogue, Epilogue
from gemmery.errors import ArgumentError, brief
from gemmery.keywords import Options
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple


def bound(option: Any, operands: Any) -> tuple[Epilogue, Mapping[str, Any]]:
    """Return the epilogue and the operands that a caller passed as `epilogue=` and `operands=`."""
    if type(option) is BoundEpilogue and operands is None:
        return option
    if isinstance(option, BoundEpilogue):
        function, own = option
    elif callable(option):
        function, own = option if isinstance(option, Epilogue) else Epilogue(option), {}
    else:
        raise ArgumentError(
            f"epilogue={brief(option)} must be a function of the product's element, such as gm.gelu or a lambda"
        )
    if operands is not None and not (isinstance(operands, Mapping) and all(isinstance(x, str) for x in operands)):
        raise ArgumentError(f"operands={brief(operands)} must be a dict of arrays and numbers by names of parameters")
    return function, {**function.defaults, **own, **function(**(operands or {})).operands}


def product(a: Any, b: Any, out: Any, options: Options, multiply: Callable[..., Any]) -> Any:
    """Return what the epilogue of a product returns: an array, or a tuple of arrays; `multiply` is `gm.matmul`."""
    weights = weights_of(b, options)
    function, operands = bound(options.epilogue, options.operands)
    plain = out is options.threads is options.dtype is None and not options.batch_invariant
    generation = cpu_threads.generation
    x, ys = viewed("a", a), [viewed("b", weight) for weight in weights]
    if any(view.device != "cpu" for view in (x, *ys)):
        from gemmery.api import finished_on_device

        check_values(function, operands, len(weights))
        graph, shapes = function.graph(len(weights)), shapes_of(x, ys)
        outs = outs_of(out, len(graph.outputs))
        return finished_on_device.product(a, weights, shapes, graph, operands, outs, options, multiply)
    only_on_devices(options)
    sums, result = types_of(x, ys, options.dtype)
    call = _prepared(function, len(weights), operands, shapes_of(x, ys), sums, result)
    threads = thread_count(options.threads) or cpu_threads.get()
    like = arrays.kind(a, *weights)
    writings = _writings(like, call, out, [x, *ys])
    if len(ys) == 1 and (fused := in_tiles(call, x, ys[0], result, bool(options.batch_invariant), writings)):
        _run_in_tiles(call, fused, x, ys[0], writings, threads)
        return _results(like, writings)
    keywords: dict[str, Any] = {} if sums == promoted(x.dtype, ys[0].dtype) else {"dtype": dtypes.get(sums).numpy}
    keywords |= {} if options.threads is None else {"threads": options.threads}
    keywords |= {"batch_invariant": True} if options.batch_invariant else {}
    totals: list[View] = []
    for weight in weights:
        first, kind = writings[0], call.graph.outputs[0].kind
        if not totals and kind == "matrix" and first.dtype == sums:
            total = first.memory  # the kernel reads a sum before it writes there
        else:
            total = arrays.scratch(call.shapes.of("matrix"), sums)
        multiply(a, weight, out=_array(total), **keywords)
        totals.append(total)
    run = _run(call, totals, writings, threads)
    if run and plain and not _is_large(call):
        _remember(function, generation, a, weights, call, keywords.get("dtype"), totals, writings, run)
    return _results(like, writings)


def _remember(
    function: Epilogue, generation: int, a: Any, weights: Sequence[Any], call: PreparedEpilogue, dtype: Any,
    totals: Sequence[View], writings: Sequence[Writing], job: bytes,
) -> None:  # fmt: skip
    """Let compiled code run such products, if their operands were read as they are and their results are NumPy's."""
    numbers = all(type(x.value) in (int, float) for x in call.readings if x.memory is None)
    as_they_are = numbers and all(x.memory is None or x.memory.owner is x.value for x in call.readings)
    if not as_they_are or any(writing.memory.dtype != writing.dtype for writing in writings):
        return
    table = [steps(total, "matrix", call.shapes) for total in totals]
    table += [None if x.memory is None else struct.unpack("<3q", x.words)[1:] for x in call.readings]
    table += [steps(x.memory, o.kind, call.shapes) for x, o in zip(writings, call.graph.outputs, strict=True)]
    results, sums = ([x.owner for x in views] for views in ([w.memory for w in writings], totals))
    read = [(operand.name, x.value) for operand, x in zip(call.graph.operands, call.readings, strict=True)]
    single, is_long = call.element == "float", math.prod(results[0].shape) >= _LONG
    epilogue_recipes.remember(
        function, (a, *weights), read, results, sums, table, (generation, single, is_long), dtype, job
    )


_LONG = 1 << 15  # elements: a pass of 20 us


def _is_large(call: PreparedEpilogue) -> bool:
    """Return True where the sums do not stay in the cache for a pass."""
    size = math.prod(call.shapes.batch) * call.shapes.m * call.shapes.n * dtypes.get(call.sums).size
    return size > (host().l2 or 1 << 20) // 2


class InTiles(NamedTuple):
    """A product whose kernel applies the graph to each tile of sums before it is stored."""

    launch: Launch
    prepared: Prepared


def tiled(
    call: PreparedEpilogue, x: View, y: View, result: str, invariant: bool, writings: Sequence[Writing] = ()
) -> tuple[Prepared, Problem] | None:  # fmt: skip
    """Return the plain product, and that with the graph applied in tiles; None where it is not.

    It is where `packed` computes the plain product, in the same order, and C does not stay in the cache for a pass.
    """
    graph, shapes = call.graph, call.shapes
    plain = x.dtype == y.dtype and dtypes.get(x.dtype).kind == "f" and call.sums == dtypes.get(x.dtype).accumulator
    if not (_is_large(call) and plain and shapes.rows and shapes.columns) or graph.statistics:
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
    words += [(0, *(steps(w.memory, "matrix", shapes) or (-1, 0))) for w in writings]
    follow = all(batch == shapes.m * row for _, batch, row in words)
    if form.n != shapes.n or (merged and not (follow and all(node.op != "row_index" for node in graph.nodes))):
        return None
    refused = build.packed_refuses(problem) or build.chain(problem) != build.chain(prepared.problem)
    if refused or problem.c_layout != "row":
        return None
    return prepared, problem


def in_tiles(
    call: PreparedEpilogue, x: View, y: View, result: str, invariant: bool, writings: Sequence[Writing]
) -> InTiles | None:  # fmt: skip
    """Return how the graph is applied in tiles; None where it is not, or its kernel is still compiled aside."""
    plan = tiled(call, x, y, result, invariant, writings)
    if plan is None:
        return None
    prepared, problem = plan
    key = "epilogue", problem.epilogue, problem.dtype, problem.out
    if config.tiers() and key not in _compiled:

        def compile_aside() -> None:
            build.packed(problem, {})
            _compiled.add(key)

        tiers.aside(key, compile_aside)
        return None
    return InTiles(build.packed(problem, {}), prepared)


_compiled: set[tuple[str, ...]] = set()


def _run_in_tiles(
    call: PreparedEpilogue, fused: InTiles, x: View, y: View, writings: Sequence[Writing], threads: int
) -> None:  # fmt: skip
    _unchanged(call, writings, a=x, b=y)
    first, shapes = writings[0].memory, call.shapes
    shape, out = shapes.of("matrix"), fused.prepared.problem.out
    nested = first.strides == arrays.contiguous(shape, dtypes.get(first.dtype).size)
    c = first if first.dtype == out and nested else arrays.scratch(shape, out)
    table = ctypes.create_string_buffer(b"".join(_table(call, writings)))
    a, b, target = fused.prepared.operands(x, y, c)
    at = View(ctypes.addressof(table), (shapes.n,), (0,), "int8")
    fused.launch.run(fused.launch.job(a, b, target, 1, 0, at, threads), a, b)


def apply(function: Epilogue, sums: Sequence[Any], operands: Mapping[str, Any], result: str) -> Any:
    """Return what an epilogue makes of sums that are there already, arrays of one shape, in the type `result`."""
    views = [viewed("sums", total) for total in sums]
    *batch, m, n = views[0].shape
    shapes = Shapes(tuple(batch), m, n)
    if views[0].device != "cpu":
        from gemmery.api import finished_on_device

        check_values(function, operands, len(sums))
        return finished_on_device.apply(sums, shapes, function.graph(len(sums)), operands, result)
    call = _prepared(function, len(sums), operands, shapes, views[0].dtype, result)
    if any(node.op == "sum" for node in call.graph.nodes):  # else only the shape matters
        views = [view if steps(view, "matrix", shapes) else compact(view) for view in views]
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
    check_values(function, operands, count)
    element = "double" if "f64" in (sums, result) else "float"
    readings = [read(operand.name, operands[operand.name], shapes, element) for operand in graph.operands]
    graph = with_kinds(graph, [reading.operand for reading in readings], result)
    return PreparedEpilogue(graph, readings, shapes, element, sums)


def _writings(like: Any, call: PreparedEpilogue, out: Any, operands: Sequence[View]) -> list[Writing]:
    inputs = [*operands, *(reading.memory for reading in call.readings if reading.memory)]
    writings = list[Writing]()
    for output, array in zip(call.graph.outputs, outs_of(out, len(call.graph.outputs)), strict=True):
        writings.append(write(like, output, call.shapes, array, inputs))
        inputs += [writings[-1].memory]  # so that of results which share memory the last one is written whole
    return writings


def _results(like: Any, writings: Sequence[Writing]) -> Any:
    results = tuple(_finished(like, writing) for writing in writings)
    return results[0] if len(results) == 1 else results


def explained(a: Any, b: Any, options: Options) -> str:
    """Return in words where the epilogue of a product is applied, and the bytes of matrices that are not written."""
    weights = weights_of(b, options)
    function, operands = bound(options.epilogue, options.operands)
    x, ys = viewed("a", a), [viewed("b", weight) for weight in weights]
    shapes = shapes_of(x, ys)
    if x.device != "cpu":
        from gemmery.api import finished_on_device

        check_values(function, operands, len(weights))
        traced, sums = function.graph(len(weights)), "f32"
        graph, count = finished_on_device.fuses(a, weights, shapes, traced, operands, options)
        fused = count > 0
    else:
        sums, result = types_of(x, ys, options.dtype)
        call = _prepared(function, len(weights), operands, shapes, sums, result)
        fused = len(ys) == 1 and tiled(call, x, ys[0], result, bool(options.batch_invariant)) is not None
        graph = call.graph
    kinds = graph.kinds()
    operations = sum(bool(node.inputs) for node in graph.nodes)
    results = {output.node for output in graph.outputs}
    between = [i for i, kind in enumerate(kinds) if kind == "matrix" and graph.nodes[i].op != "operand"]
    count = len([i for i in between if i not in results and (fused or graph.nodes[i].op != "sum")])
    size = math.prod(shapes.batch) * shapes.m * shapes.n * dtypes.get(sums).size
    where = "to each tile before it is stored" if fused else "by rows, in a pass over the sums"
    return (
        f"{function.__name__}, {operations} operations, {where}; {count} matrices of {shapes.m} x {shapes.n} between "
        f"them are not written and read: {2 * count * size:,} bytes"
    )


def _array(view: View) -> Any:
    """Return memory as an array into which a product is written."""
    return view.owner if hasattr(view.owner, "shape") and not isinstance(view.owner, View) else arrays.as_numpy(view)


def _run(call: PreparedEpilogue, totals: Sequence[View], writings: Sequence[Writing], threads: int) -> bytes:
    """Apply the graph to sums in memory; return the job that ran, b"" without one."""
    shapes = call.shapes
    _unchanged(call, writings)
    if 0 in (*shapes.batch, shapes.m):
        return b""
    if not shapes.n:
        _without_columns(call.graph, shapes, writings)
        return b""
    words = [slot(total.pointer, *(steps(total, "matrix", shapes) or (0, 0))) for total in totals]
    table = ctypes.create_string_buffer(b"".join((*words, *_table(call, writings))))
    launch = row_pass.kernel(Pass(call.graph.text, call.element, (call.sums,) * len(totals)))
    count = math.prod(shapes.batch)
    job = row_pass.job(launch, count, shapes.m, shapes.n, ctypes.addressof(table), threads)
    launch.run(job, totals[0], totals[0])
    return job


def _unchanged(call: PreparedEpilogue, writings: Sequence[Writing], **operands: View) -> None:
    """Raise LayoutError if the code of an argument resized another one, which kernels would read where it was."""
    read = {reading.operand.name: reading.memory for reading in call.readings}
    arrays.unchanged(**operands, **{f"operand {name!r}": memory for name, memory in read.items()})
    arrays.unchanged(**{f"out {place}": writing.memory for place, writing in enumerate(writings)})


def _table(call: PreparedEpilogue, writings: Sequence[Writing]) -> list[bytes]:
    """Return the slots of operands and outputs."""
    words = [reading.words for reading in call.readings]
    for output, writing in zip(call.graph.outputs, writings, strict=True):
        words.append(slot(writing.memory.pointer, *(steps(writing.memory, output.kind, call.shapes) or (0, 0))))
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
