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

from gemmery import arrays, dtypes
from gemmery.api.codes import bits_of
from gemmery.api.epilogue_terms import (
    OperandReading,
    Shapes,
    Writing,
    check_values,
    compact,
    outs_of,
    read,
    saved,
    shapes_of,
    slot,
    steps,
    types_of,
    weights_of,
    with_kinds,
    write,
)
from gemmery.api.options import only_on_devices, thread_count, viewed
from gemmery.api.promote import promoted
from gemmery.arrays import View
from gemmery.cpu import entry, entry_layout, entry_table, objects, row_pass
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.row_pass import Pass
from gemmery.epilogues.graph import EpilogueGraph
from gemmery.epilogues.reference import evaluate
from gemmery.epilogues.trace import BoundEpilogue, Epilogue
from gemmery.errors import ArgumentError, brief
from gemmery.keywords import NO_OPTIONS, Options
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
    plain = plain and type(options.epilogue) in (Epilogue, BoundEpilogue)  # others are traced in each call
    generation, tensor_call = cpu_threads.generation, None
    if getattr(a, "is_cuda", False) is True:
        from gemmery.api import known_epilogues

        rest = options._replace(epilogue=None, operands=None)
        if plain and all(value is usual for value, usual in zip(rest, NO_OPTIONS, strict=True)):
            tensor_call = known_epilogues.call_of(function, (a, *weights), operands, len(weights))
            result = known_epilogues.known(tensor_call)
            if result is not None:
                return result
    x, ys = viewed("a", a), [viewed("b", weight) for weight in weights]
    if any(view.device != "cpu" for view in (x, *ys)):
        from gemmery.api import finished_on_device

        check_values(function, operands, len(weights))
        graph, shapes = function.graph(len(weights)), shapes_of(x, ys)
        outs = outs_of(out, len(graph.outputs))
        return finished_on_device.product(a, weights, shapes, graph, operands, outs, options, multiply, tensor_call)
    only_on_devices(options)
    sums, result = types_of(x, ys, options.dtype)
    call = _prepared(function, len(weights), operands, shapes_of(x, ys), sums, result)
    threads = thread_count(options.threads) or cpu_threads.get()
    like = arrays.kind(a, *weights)
    writings = _writings(like, call, out, [x, *ys])
    dtype = None if sums == promoted(x.dtype, ys[0].dtype) else dtypes.get(sums).numpy
    invariant = bool(options.batch_invariant)
    keywords = NO_OPTIONS._replace(dtype=dtype, threads=options.threads, batch_invariant=invariant).passed()
    totals: list[View] = []
    for weight in weights:
        first, kind = writings[0], call.graph.outputs[0].kind
        if not totals and kind == "matrix" and first.dtype == sums:
            total = first.memory  # the kernel reads a sum before it writes there
        else:
            total = arrays.scratch(call.shapes.of("matrix"), sums)
        plain_array = hasattr(total.owner, "shape") and not isinstance(total.owner, View)
        multiply(a, weight, out=total.owner if plain_array else arrays.as_numpy(total), **keywords)
        totals.append(total)
    run = _run(call, totals, writings, threads)
    if run and plain:
        _remember(function, generation, a, weights, call, dtype, totals, writings, run)
    return _results(like, writings)


def _remember(
    function: Epilogue, generation: int, a: Any, weights: Sequence[Any], call: PreparedEpilogue, dtype: Any,
    totals: Sequence[View], writings: Sequence[Writing], job: bytes,
) -> None:  # fmt: skip
    """Store the recipe of a product for compiled code, if its arrays were used as they are and are NumPy's.

    An epilogue has its recipes, for arrays of the same shapes, strides and types (`cpu.entry_epilogue`). A recipe says
    what to allocate and which products to run, and has the job of the pass with its table.
    """
    numbers = all(type(x.value) in (int, float) for x in call.readings if x.memory is None)
    as_they_are = numbers and all(x.memory is None or x.memory.owner is x.value for x in call.readings)
    if not as_they_are or any(writing.memory.dtype != writing.dtype for writing in writings):
        return
    operands, most = (a, *weights), entry_layout.RECIPE_DIMENSIONS
    results: list[Any] = [writing.memory.owner for writing in writings]
    written = [*results, *(total.owner for total in totals)]
    known = [*operands, *(x.value for x in call.readings if x.memory is not None)]
    if (
        type(function) is not Epilogue
        or any(type(x) is not np.ndarray or x.ndim > most for x in (*known, *written))
        or not all(x.ndim for x in written)
        or len(call.readings) > entry_layout.RECIPE_OPERANDS
        or len(results) > entry_layout.RECIPE_OUTPUTS
    ):
        return
    fields = [entry.result_fields(x.dtype) for x in written]
    if not all(fields):
        return
    single, is_long = call.element == "float", math.prod(results[0].shape) >= _LONG
    words = [generation, len(totals), len(call.readings), len(results), single, is_long]
    words.append(0 if dtype is None else id(dtype))
    for x in operands:
        words += _known(x)
    names = {name: name for name in function.parameters}
    for x in call.readings:
        words += [id(names[x.operand.name]), *_known(x.value)]
    slots = [steps(total, "matrix", call.shapes) for total in totals]
    slots += [None if x.memory is None else struct.unpack("<3q", x.words)[1:] for x in call.readings]
    slots += [steps(x.memory, o.kind, call.shapes) for x, o in zip(writings, call.graph.outputs, strict=True)]
    words += [word for step in slots for word in (0, *(step or (0, 0)))]
    for place, x in enumerate(written):
        shared = place == len(results) and x is results[0]
        record = [0 if shared else fields[place][0], x.ndim, *x.shape]
        words += record + [0] * (entry_layout.MADE - len(record))
    key = entry_table.packed(words)
    stored = [recipe for recipe in function.recipes if not recipe.startswith(key)]
    function.recipes = (key + job, *stored[: _MOST - 1])
    entry.know_epilogues(function, BoundEpilogue, function.recipes)


def _known(x: Any) -> list[int]:
    """Return what a recipe knows of an array, or of a number."""
    words = [-1, 0]
    if type(x) is np.ndarray:
        words = [x.ndim, objects.element(x.dtype)]
        for both in zip(x.shape, x.strides, strict=True):
            words += both
    return words + [0] * (entry_layout.KNOWN - len(words))


_MOST = 64  # recipes of an epilogue; then the oldest goes
_LONG = 1 << 15  # elements: a pass of 20 us


def apply(function: Epilogue, sums: Sequence[Any], operands: Mapping[str, Any], result: str) -> Any:
    """Return what an epilogue makes of sums that are there already, arrays of one shape, in the type `result`."""
    tensor_call = None
    if getattr(sums[0], "is_cuda", False) is True:
        from gemmery.api import known_epilogues

        tensor_call = known_epilogues.call_of(function, sums, operands, result)
        known = known_epilogues.known(tensor_call)
        if known is not None:
            return known
    views = [viewed("sums", total) for total in sums]
    *batch, m, n = views[0].shape
    shapes = Shapes(tuple(batch), m, n)
    if views[0].device != "cpu":
        from gemmery.api import finished_on_device

        check_values(function, operands, len(sums))
        return finished_on_device.apply(sums, shapes, function.graph(len(sums)), operands, result, tensor_call)
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
        graph, fused = call.graph, False
    size = math.prod(shapes.batch) * dtypes.get(sums).size
    return saved(function.__name__, graph, shapes.m, shapes.n, size, fused)


def _run(call: PreparedEpilogue, totals: Sequence[View], writings: Sequence[Writing], threads: int) -> bytes:
    """Apply the graph to sums in memory; return the job that ran, b"" without one."""
    shapes = call.shapes
    # The code of an argument may have resized another one, which kernels would read where it was.
    arrays.unchanged(**{f"operand {x.operand.name!r}": x.memory for x in call.readings})
    arrays.unchanged(**{f"out {place}": writing.memory for place, writing in enumerate(writings)})
    if 0 in (*shapes.batch, shapes.m):
        return b""
    if not shapes.n:
        _without_columns(call.graph, shapes, writings)
        return b""
    slots = [(total, "matrix") for total in totals]
    outputs = [(x.memory, o.kind) for x, o in zip(writings, call.graph.outputs, strict=True)]
    sums, results = ([slot(z.pointer, *(steps(z, kind, shapes) or (0, 0))) for z, kind in x] for x in (slots, outputs))
    table = ctypes.create_string_buffer(b"".join((*sums, *(reading.words for reading in call.readings), *results)))
    launch = row_pass.kernel(Pass(call.graph.text, call.element, (call.sums,) * len(totals)))
    count = math.prod(shapes.batch)
    job = row_pass.job(launch, count, shapes.m, shapes.n, ctypes.addressof(table), threads)
    launch.run(job, totals[0], totals[0])
    return job


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
