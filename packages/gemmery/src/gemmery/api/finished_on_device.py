"""Products with an epilogue that is a Python function, on a CUDA device.

Where one kernel multiplies and applies the function, its operands lie behind the kernel's argument, and two weights
share a launch. Else sums go to memory and `traced_rows` applies the function to their rows: of functions that ask for
statistics of whole rows, of types whose products take several launches, and of operands with factors. Which of them it
is depends on the product alone, so that its bits do not change while a program runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api.codes import bits_of, library_of
from gemmery.api.device_call import DeviceCall, described, table, tell_once
from gemmery.api.device_operands import located, operand_type, resolved, types
from gemmery.api.device_readings import READ, DeviceReading, operand_of, place_of, reading_of, vector_of
from gemmery.api.epilogue_terms import Shapes, out_of, stored_as, types_of, with_kinds
from gemmery.api.on_device import copy, finished, new, scratch, write
from gemmery.api.prepared import operand_views
from gemmery.api.promote import promoted
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered, tensormaps, traced_function
from gemmery.cuda.launch import CudaLaunch, Ready, first_arguments, product_argument
from gemmery.cuda.traced_function import TracedFunction
from gemmery.dispatch.cuda import with_function
from gemmery.epilogues.graph import EpilogueGraph, GraphOutput
from gemmery.errors import ArgumentError, CompileError, LayoutError, RefusedError, ShapeError
from gemmery.keywords import Options, for_kernel
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

_SMALLER = {"bm": 128, "bn": 128, "stages": 5, "cm": 1, "cn": 1}  # a tile of wgmma_epilogue with registers to spare
_THREADS, _BLOCKS = 256, 16  # of a block of traced_rows, and its blocks for each multiprocessor


class Fused(NamedTuple):
    """The launch of a product and its function, and what maps of the second weight and output describe."""

    run: Ready
    function: TracedFunction
    maps: tuple[tensormaps.MapShape, ...]
    matrices: int  # weights in the launch


class RowsPass(NamedTuple):
    """The launch of a function on rows of sums."""

    run: Ready
    function: TracedFunction


def product(
    x: Any, weights: Sequence[Any], shapes: Shapes, graph: EpilogueGraph, operands: Mapping[str, Any],
    outs: Sequence[Any], options: Options, multiply: Callable[..., Any],
) -> Any:  # fmt: skip
    """Return what the epilogue of a product of arrays on one device returns: an array, or a tuple of arrays."""
    if options.threads is not None:
        raise ArgumentError("threads= applies to products on the CPU only: leave it out")
    (batch, m, n), xp = shapes[:3], library_of(x)
    inputs = {"a": view(x), "b": view(weights[0]), "the second b": view(weights[-1])}
    arrays.together(**inputs, **{f"out {i}": view(out) for i, out in enumerate(outs) if out is not None})
    call = _described(x, weights, shapes, graph, operands, options)
    x, weights, graph, bound = call.x, call.weights, call.graph, call.bound
    terms = call.common, call.sums, options, multiply
    for output, out in zip(graph.outputs, outs, strict=True):
        if out is not None:
            out_of(out, output, shapes.of(output.kind))
    rows, first = call.rows, located(view(x))
    results = [_result(first, output.kind, output.dtype, batch, m, n) for output in graph.outputs]
    if 0 not in (*batch, m, n):
        if rows == m and not batch:
            _matrix(x, weights, graph, bound, (), results, *terms)
        elif rows:
            whole = [view(each.array.reshape((rows, each.shape[-1]))) for each in results]
            _matrix(
                x.reshape((rows, x.shape[-1])),
                weights,
                graph,
                bound,
                (),
                whole,
                call.common,
                call.sums,
                options,
                multiply,
            )
        else:
            full = [xp.broadcast_to(each, (*batch, *each.shape[-2:])) for each in (x, *weights)]
            for index in np.ndindex(*batch):
                a, *bs = (each[index] for each in full)
                part = [view(each.array[index]) for each in results]
                _matrix(a, bs, graph, bound, index, part, *terms)
    elif graph.statistics and 0 not in (*batch, m):
        raise ShapeError(f"C is {m} x {n}: statistics of rows without columns are for products on the CPU")
    ended = [
        _ended(first, each, output, shapes, out) for each, output, out in zip(results, graph.outputs, outs, strict=True)
    ]
    return ended[0] if len(ended) == 1 else tuple(ended)


_with_kinds = lru_cache(maxsize=1024)(with_kinds)


class DescribedProduct(NamedTuple):
    """A product with a function as kernels take it; `rows` are those of all matrices in one, 0 where none has them."""

    x: Any
    weights: Sequence[Any]
    graph: EpilogueGraph
    bound: Mapping[str, View | float]
    common: str  # the type to which operands are converted
    sums: str  # that of sums in memory
    rows: int


def _described(
    x: Any, weights: Sequence[Any], shapes: Shapes, graph: EpilogueGraph, operands: Mapping[str, Any], options: Options
) -> DescribedProduct:  # fmt: skip
    """Return a product with vectors as matrices, its operands, and its graph with kinds and types."""
    (batch, m, n), count = shapes[:3], math.prod(shapes.batch)
    plain = not batch and shapes.rows and shapes.columns
    if not plain and not arrays.allocates(x):
        raise LayoutError(f"a {type(x).__name__} on a device: with an epilogue pass matrices, or tensors of PyTorch")
    x = x if shapes.rows else x[None, :]
    weights = [weight if shapes.columns else weight[:, None] for weight in weights]
    reads_rows = any(node.op == "row_index" for node in graph.nodes)
    alike = not (reads_rows and count > 1) and all(len(view(weight).shape) == 2 for weight in weights)
    joined = bool(batch) and alike
    common, sums, result = _types(view(x), [view(weight) for weight in weights], options)
    element, xp = "f64" if result == "f64" else "f32", library_of(x)
    bound = {
        each.name: operand_of(xp, each.name, operands[each.name], batch, m, n, joined, element)
        for each in graph.operands
    }
    known = [reading_of(each.name, bound[each.name], (), element).operand for each in graph.operands]
    rows = count * m if joined else 0 if batch else m
    return DescribedProduct(x, weights, _with_kinds(graph, tuple(known), result), bound, common, sums, rows)


def _types(x: View, ys: Sequence[View], options: Options) -> tuple[str, str, str]:
    """Return the type to which operands are converted, that of sums in memory, and that of the result."""
    if any(z.dtype in dtypes.FLOAT8 for z in (x, *ys)):
        (common, result), *_ = (types(x, y, options.dtype) for y in ys)
        return common, "f32", result
    sums, result = types_of(x, ys, options.dtype)
    common = promoted(x.dtype, ys[0].dtype)
    if dtypes.get(common).kind == "f":
        return operand_type(common, result), sums, result
    has_factors = options.scale_a is not None or options.scale_b is not None
    return common, dtypes.get(result).accumulator if has_factors else sums, result


def fuses(
    x: Any, weights: Sequence[Any], shapes: Shapes, graph: EpilogueGraph, operands: Mapping[str, Any], options: Options
) -> tuple[EpilogueGraph, int]:  # fmt: skip
    """Return the graph with kinds and types, and the weights in the launch that applies it: 0 where none multiplies."""
    call = _described(x, weights, shapes, graph, operands, options)
    a, *bs = (located(view(each)) for each in (call.x, *call.weights))
    alike = all(z.dtype == call.common for z in (a, *bs)) and len(bs[0].shape) == 2
    if not alike or not call.rows:
        return call.graph, 0
    k, n = bs[0].shape
    a = a if len(a.shape) == 2 else a._replace(shape=(call.rows, k), strides=arrays.contiguous((1, k), a.strides[-1]))
    values = [reading_of(each.name, call.bound[each.name], (), "f32").value for each in call.graph.operands]
    outputs = [
        View(0, (call.rows, n), arrays.contiguous((1, n), dtypes.get(each.dtype).size), each.dtype, a.device)
        for each in call.graph.outputs
    ]
    launch = _fused(a, bs, call.graph, values, outputs, options)
    return call.graph, 0 if launch is None else launch.matrices


def apply(sums: Sequence[Any], shapes: Shapes, graph: EpilogueGraph, operands: Mapping[str, Any], result: str) -> Any:
    """Return what an epilogue makes of sums that are there already, matrices, in the type `result`."""
    (batch, m, n), xp = shapes[:3], library_of(sums[0])
    element = "f64" if "f64" in (result, view(sums[0]).dtype) else "f32"
    values = {each.name: operand_of(xp, each.name, operands[each.name], batch, m, n, False, element)
              for each in graph.operands}  # fmt: skip
    readings = [reading_of(each.name, values[each.name], (), element) for each in graph.operands]
    graph = _with_kinds(graph, tuple(each.operand for each in readings), result)
    totals = [located(view(each)) for each in sums]
    if any(node.op == "sum" for node in graph.nodes):
        totals = [z if z.dtype in READ else located(view(arrays.astype(z.array, element))) for z in totals]
        totals = [z if z.strides == arrays.contiguous(z.shape, dtypes.get(z.dtype).size) else
                  located(view(z.array.contiguous())) for z in totals]  # fmt: skip
    first = totals[0]
    results = [_result(first, each.kind, each.dtype, batch, m, n) for each in graph.outputs]
    if 0 not in (m, n):
        outputs = [each._replace(dtype=output.dtype) for each, output in zip(results, graph.outputs, strict=True)]
        _rows(totals, graph, readings, [located(each) for each in outputs], element, first.stream)
    ended = [_ended(first, each, output, shapes, None) for each, output in zip(results, graph.outputs, strict=True)]
    return ended[0] if len(ended) == 1 else tuple(ended)


def _result(x: View, kind: str, dtype: str, batch: tuple[int, ...], m: int, n: int) -> View:
    """Return new memory for an output, (*batch, m, n) or (*batch, m, 1)."""
    return new(x, (*batch, m, n if kind == "matrix" else 1), stored_as(dtype))


def _converted(z: View, array: Any, dtype: str) -> View:
    """Return an array in another element type."""
    return z if z.dtype == dtype else view(arrays.astype(array, dtype))


def _ended(x: View, result: View, output: GraphOutput, shapes: Shapes, out: Any) -> Any:
    """Return an output in the caller's shape and type, or the caller's `out`."""
    if out is not None:
        copy(result._replace(dtype=output.dtype), located(view(out)))
        arrays.written(out)
        return out
    array = finished(x, result)
    array = bits_of(array, output.dtype) if dtypes.get(output.dtype).size == 1 else array
    return array if tuple(array.shape) == shapes.of(output.kind) else array.reshape(shapes.of(output.kind))


def _matrix(
    x: Any, weights: Sequence[Any], graph: EpilogueGraph, bound: Mapping[str, View | float], index: tuple[int, ...],
    results: Sequence[View], common: str, sums: str, options: Options, multiply: Callable[..., Any],
) -> None:  # fmt: skip
    """Write the outputs of one matrix."""
    element = "f64" if graph.outputs[0].dtype == "f64" else "f32"
    readings = [reading_of(each.name, bound[each.name], index, element) for each in graph.operands]
    a, bs = located(view(x)), [located(view(weight)) for weight in weights]
    m, n = a.shape[0], bs[0].shape[1]
    outputs = [located(each)._replace(dtype=output.dtype) for each, output in zip(results, graph.outputs, strict=True)]
    memories = [each.value for each in readings if isinstance(each.value, View)]
    arrays.together(**{"a": a, "b": bs[-1], **{f"operand {i}": each for i, each in enumerate(memories)}})
    if common not in dtypes.FLOAT8:  # each of the two is multiplied by both
        a, *bs = (_converted(z, each, common) for z, each in ((a, x), *zip(bs, weights, strict=True)))
    others = {each.stream for each in (*bs, *memories)} - {a.stream}
    for other in others:
        ordered.wait(a.stream, other, a.ordinal)
    read = [each.value for each in readings]
    launch = _fused(a, bs, graph, read, outputs, options)
    if launch is not None:
        _run_fused(launch, a, bs, read, outputs)
    else:
        totals = [new(a, (m, n), sums) for _ in weights]
        values = {"scale_a": options.scale_a, "scale_b": options.scale_b, "precision": options.precision}
        keywords = {name: value for name, value in values.items() if value is not None}
        keywords |= {"batch_invariant": True} if options.batch_invariant else {}
        for weight, y, total in zip(weights, bs, totals, strict=True):
            if keywords:
                multiply(x, weight, out=total.array, dtype=dtypes.get(sums).numpy, **keywords)
            else:
                write(a, y, total)
        _rows(totals, graph, readings, outputs, element, a.stream)
    for other in others:
        ordered.wait(other, a.stream, a.ordinal)


def _fused(
    a: View, bs: Sequence[View], graph: EpilogueGraph, values: Sequence[View | float], outputs: Sequence[View],
    options: Options,
) -> Fused | None:  # fmt: skip
    """Return the launch of the product and its function, if a kernel does both."""
    c, n = outputs[0], bs[0].shape[1]
    if graph.statistics or options.scale_a is not None or options.scale_b is not None or c.dtype not in READ:
        return None
    if a.dtype not in ("f16", "bf16", "f32") or resolved(options.precision, a.dtype, c.dtype, a.device):
        return None
    staged = _is_staged(outputs)
    terms = for_kernel(options._replace(batch_invariant=bool(options.batch_invariant), precision=None))
    call = DeviceCall(_still(a), _still(bs[0]), _still(c), options=terms)
    for matrices in (2, 1) if len(bs) == 2 and bs[0].strides == bs[1].strides else (1,):
        stored = [*values, *[_sums(c)] * (len(bs) - matrices), *outputs[1 + staged :]]
        vectors = tuple(vector_of(each, n) for each in stored)
        low = bs[1].pointer & 15 if matrices == 2 else 0
        launch = _fused_launch(call, graph, vectors, len(bs), matrices, staged, low)
        if not isinstance(launch, str):
            return launch
    return None


def _sums(c: View) -> View:
    """Return sums in float32 for C, without memory."""
    return View(0, c.shape, arrays.contiguous(c.shape, 4), "f32", c.device)


def _run_fused(
    launch: Fused, a: View, bs: Sequence[View], values: Sequence[View | float], outputs: Sequence[View]
) -> None:  # fmt: skip
    """Launch a product and its function; before it, the sums with a second weight that is not in the same launch."""
    function, run, read = launch.function, launch.run, [*values]
    if len(bs) > launch.matrices:
        sums = new(a, outputs[0].shape, "f32")
        write(a, bs[1], sums)
        read.append(sums)
    mapped = [*bs[1 : launch.matrices], *outputs[1 : 1 + function.staged]]
    with driver.on(a.ordinal):  # a thread of autograd may have no context
        maps = [tensormaps.encoded(shape, z.pointer) for shape, z in zip(launch.maps, mapped, strict=True)]
    stored = map(place_of, (*read, *outputs[1 + function.staged :]))
    packed = function.packed(stored, maps, bs[-1].pointer - bs[0].pointer)
    workspace = scratch(a, run.workspace) if run.workspace else None
    start = workspace.pointer if workspace else 0
    run(a.pointer, bs[0].pointer, outputs[0].pointer, a.stream, 0, start, None, (), packed)


def _is_staged(outputs: Sequence[View]) -> bool:
    """Return True if the second output lies as the first, and tensor copies can write both: see `describable`."""
    first, second = outputs[0], outputs[min(1, len(outputs) - 1)]
    size = dtypes.get(first.dtype).size
    alike = len(outputs) > 1 and first[1:4] == second[1:4] and size == 2
    lines = first.strides[1] == size and min(first.shape) > 1 and first.shape[1] * size % 16 == 0
    copies = driver.find(first.device).capability == 90
    return alike and lines and copies and not (first.pointer | second.pointer | first.strides[0]) % 16


def _still(z: View) -> View:
    """Return a view without its memory, as DeviceCall has it."""
    return View(z.pointer & 15, z.shape, z.strides, z.dtype, z.device)


@table.once
def _fused_launch(
    call: DeviceCall,
    graph: EpilogueGraph,
    vectors: tuple[int, ...],
    weights: int,
    matrices: int,
    staged: bool,
    low: int,
) -> Fused | str:
    """Return the launch of a product with a function, or why there is none."""
    if weights == 2 and matrices == 1:
        graph = traced_function.second_as_operand(graph, "f32")
    try:
        function = traced_function.function(graph, "f32", vectors, matrices=matrices, staged=staged)
        form, problem = described(call._replace(epilogue=function.name))
        if form.runs > 1 or (form.m, form.n, problem.c_layout, form.batch) != (*call.c.shape, "row", 1):
            return "the product is taken in another form than by rows"
        if low:
            problem = problem._replace(alignments=(problem.alignments[0], 2, problem.alignments[2]))
        rung, config, _ = with_function(problem)
        try:
            kernel = rung.build(problem, config)
        except CompileError:  # the largest tiles leave no registers for long functions
            kernel = rung.build(problem, {**config, **{key: value for key, value in _SMALLER.items() if key in config}})
        assert isinstance(kernel, CudaLaunch)
        views = operand_views(form, problem, None)
        run = kernel.ready(*views)
    except CompileError as error:
        tell_once(rung.name, str(error))
        return str(error)
    except (RefusedError, LayoutError) as error:
        return str(error)
    boxes = {each.operand: each for each in kernel.geometry.maps}
    if matrices == 2 and boxes["b"].packed >= 0:
        return "B is packed first, and only one of two is"
    places = [("b", views[1])] * (matrices == 2) + [("c", views[2])] * staged
    maps = tuple(tensormaps.shape(boxes[name], problem, each) for name, each in places)
    return Fused(run, function, maps, matrices)


def _rows(
    totals: Sequence[View], graph: EpilogueGraph, readings: Sequence[DeviceReading], outputs: Sequence[View],
    element: str, stream: int,
) -> None:  # fmt: skip
    """Apply a function to rows of sums in memory, in the arithmetic of `element`."""
    stored = [*(each.value for each in readings), *outputs]
    m, n = totals[0].shape
    vectors = tuple(vector_of(each, n) for each in stored)
    launch = _rows_launch(graph, vectors, (m, n), totals[0].dtype, element, totals[0].device)
    packed = launch.function.packed(map(place_of, stored))
    launch.run(totals[0].pointer, totals[-1].pointer, 0, stream, 0, 0, None, (), packed)


@table.once
def _rows_launch(
    graph: EpilogueGraph, vectors: tuple[int, ...], shape: tuple[int, int], sums: str, element: str, device: str
) -> RowsPass:
    """Return the launch of traced_rows for sums that lie row after row."""
    (m, n), card = shape, driver.find(device)
    function = traced_function.function(graph, element, vectors, rows=True)
    kernel = traced_function.rows_kernel(function, sums, n, _THREADS)
    size = dtypes.get(sums).size
    memory = View(0, (1, m, n), (0, n * size, size), sums)
    problem = Problem(m, n, 1, sums, element)
    argument = product_argument(problem, memory, memory, memory)
    handle = int(driver.function("traced_rows.cu", kernel, card.ordinal))
    grid = min(m, _BLOCKS * card.sms), 1, 1
    launch = first_arguments(handle, grid, (_THREADS, 1, 1), 0)
    return RowsPass(Ready([launch], argument, card.ordinal, 0, False, operands=function.size), function)
