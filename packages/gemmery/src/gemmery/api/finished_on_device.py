"""Products with an epilogue that is a Python function, on a CUDA device.

Where one kernel multiplies and applies the function, its operands lie behind the kernel's argument, two weights share a
launch, and blocks tell each other numbers of rows. Else sums go to memory, and `traced_rows` applies the function to
rows: of functions that ask for other statistics, of types whose products take several launches, and of operands with
factors. Which of them it is depends on the product alone, so that its bits do not change while a program runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.api import known_epilogues
from gemmery.api.codes import bits_of, library_of
from gemmery.api.device_call import DeviceCall, described, located, still, table, tell_once
from gemmery.api.device_operands import operand_type, resolved, types
from gemmery.api.epilogue_terms import (
    READ,
    Shapes,
    at_index,
    kind_of,
    out_of,
    read_on_device,
    stored_as,
    types_of,
    with_kinds,
)
from gemmery.api.known_epilogues import EpilogueLaunch, TensorCall
from gemmery.api.on_device import converted, copy, finished, new, scratch, write
from gemmery.api.prepared import operand_views
from gemmery.api.promote import promoted
from gemmery.arrange import Ints
from gemmery.arrays import View, view
from gemmery.cuda import driver, ordered, tensormaps, traced_function
from gemmery.cuda.choose.data import MANY_EXCHANGED, WIDEST_EXCHANGED
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.launch import CudaLaunch, Ready, loaded, product_argument
from gemmery.cuda.traced_function import Strides, TracedFunction
from gemmery.dispatch.cuda import with_function
from gemmery.epilogues.graph import EpilogueGraph
from gemmery.errors import ArgumentError, CompileError, LayoutError, RefusedError, ShapeError
from gemmery.keywords import NO_OPTIONS, Options, for_kernel
from gemmery.problem import Problem
from gemmery.tuples import NamedTuple

_SMALLER = {"bm": 128, "bn": 128, "stages": 5, "cm": 1, "cn": 1}  # a tile of wgmma_epilogue with registers to spare
_THREADS, _BLOCKS = 256, 16  # of a block of traced_rows, and its blocks for each multiprocessor


class Fused(NamedTuple):
    """The launch of a function, or of a product and it, and what maps of a second weight, output and operands say."""

    run: Ready
    function: TracedFunction
    maps: tuple[tensormaps.MapShape, ...] = ()
    matrices: int = 0  # weights in the launch


def product(
    x: Any, weights: Sequence[Any], shapes: Shapes, graph: EpilogueGraph, operands: Mapping[str, Any],
    outs: Sequence[Any], options: Options, multiply: Callable[..., Any], tensor_call: TensorCall | None,
) -> Any:  # fmt: skip
    """Return what the epilogue of a product of arrays on one device returns: an array, or a tuple of arrays.

    `tensor_call` is the call for `known_epilogues`, if they may know it next time.
    """
    if options.threads is not None:
        raise ArgumentError("threads= applies to products on the CPU only: leave it out")
    batch, m, n = shapes[:3]
    inputs = {"a": view(x), "b": view(weights[0]), "the second b": view(weights[-1])}
    arrays.together(**inputs, **{f"out {i}": view(out) for i, out in enumerate(outs) if out is not None})
    call = _described(x, weights, shapes, graph, operands, options)
    for output, out in zip(call.graph.outputs, outs, strict=True):
        if out is not None:
            out_of(out, output, shapes.of(output.kind))
    first = located(view(call.x))
    results = _results(first, call.graph, shapes)
    launch = None
    if 0 not in (*batch, m, n):
        if not batch:
            launch = _matrix(call, (), results, options, multiply)
        elif call.rows:
            whole = [view(each.array.reshape((call.rows, each.shape[-1]))) for each in results]
            joined = call._replace(x=call.x.reshape((call.rows, call.x.shape[-1])))
            _matrix(joined, (), whole, options, multiply)
        else:
            xp = library_of(x)
            full = [xp.broadcast_to(each, (*batch, *each.shape[-2:])) for each in (call.x, *call.weights)]
            for index in np.ndindex(*batch):
                a, *bs = (each[index] for each in full)
                part = [view(each.array[index]) for each in results]
                _matrix(call._replace(x=a, weights=bs), index, part, options, multiply)
    elif call.graph.statistics and 0 not in (*batch, m):
        raise ShapeError(f"C is {m} x {n}: statistics of rows without columns are for products on the CPU")
    ended = _ended(first, results, call.graph, shapes, outs)
    known_epilogues.remember(tensor_call, launch, ended)
    return ended


_with_kinds = lru_cache(maxsize=1024)(with_kinds)


class DescribedProduct(NamedTuple):
    """A product with a function as kernels take it; `rows` are those of all matrices in one, 0 where none has them."""

    x: Any
    weights: Sequence[Any]
    graph: EpilogueGraph
    values: Sequence[View | float]  # of the operands, for all matrices
    common: str  # the type to which operands are converted
    sums: str  # that of sums in memory
    rows: int


def _described(
    x: Any, weights: Sequence[Any], shapes: Shapes, graph: EpilogueGraph, operands: Mapping[str, Any], options: Options
) -> DescribedProduct:  # fmt: skip
    """Return a product with vectors as matrices, its operands, and its graph with kinds and types."""
    batch, m, count = shapes.batch, shapes.m, math.prod(shapes.batch)
    plain = not batch and shapes.rows and shapes.columns
    if not plain and not arrays.allocates(x):
        raise LayoutError(f"a {type(x).__name__} on a device: with an epilogue pass matrices, or tensors of PyTorch")
    x = x if shapes.rows else x[None, :]
    weights = [weight if shapes.columns else weight[:, None] for weight in weights]
    reads_rows = any(node.op == "row_index" for node in graph.nodes)
    alike = not (reads_rows and count > 1) and all(len(view(weight).shape) == 2 for weight in weights)
    joined = bool(batch) and alike
    common, sums, result = _types(view(x), [view(weight) for weight in weights], options)
    graph, values = _bound(library_of(x), graph, operands, shapes, joined, "f64" if result == "f64" else "f32", result)
    rows = count * m if joined else 0 if batch else m
    return DescribedProduct(x, weights, graph, values, common, sums, rows)


def _bound(
    xp: Any, graph: EpilogueGraph, operands: Mapping[str, Any], shapes: Shapes, joined: bool, element: str, result: str
) -> tuple[EpilogueGraph, list[View | float]]:  # fmt: skip
    """Return the graph with kinds and types, and its operands for all matrices."""
    names = [each.name for each in graph.operands]
    values = [read_on_device(xp, name, operands[name], shapes, joined, element) for name in names]
    values = [located(z) if isinstance(z, View) else z for z in values]
    known = tuple(kind_of(name, z, element) for name, z in zip(names, values, strict=True))
    return _with_kinds(graph, known, result), values


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
    outputs = [
        View(0, (call.rows, n), arrays.contiguous((1, n), dtypes.get(each.dtype).size), each.dtype, a.device)
        for each in call.graph.outputs
    ]
    launch = _fused(a, bs, call.graph, [at_index(z, ()) for z in call.values], outputs, options)
    return call.graph, 0 if launch is None else launch.matrices


def apply(
    sums: Sequence[Any], shapes: Shapes, graph: EpilogueGraph, operands: Mapping[str, Any], result: str,
    tensor_call: TensorCall | None,
) -> Any:  # fmt: skip
    """Return what an epilogue makes of sums that are there already, matrices, in the type `result`."""
    element = "f64" if "f64" in (result, view(sums[0]).dtype) else "f32"
    graph, values = _bound(library_of(sums[0]), graph, operands, shapes, False, element, result)
    totals = [located(view(each)) for each in sums]
    if any(node.op == "sum" for node in graph.nodes):
        totals = [z if z.dtype in READ else located(view(arrays.astype(z.array, element))) for z in totals]
        totals = [z if z.strides == arrays.contiguous(z.shape, dtypes.get(z.dtype).size) else
                  located(view(z.array.contiguous())) for z in totals]  # fmt: skip
    results = _results(totals[0], graph, shapes)
    launch = None
    if 0 not in (shapes.m, shapes.n):
        stored = [at_index(z, ()) for z in values], _outputs(results, graph)
        launch = _rows(totals, graph, *stored, element, totals[0].stream)
    ended = _ended(totals[0], results, graph, shapes, (None,) * len(results))
    known_epilogues.remember(tensor_call, launch, ended)
    return ended


def _results(x: View, graph: EpilogueGraph, shapes: Shapes) -> list[View]:
    """Return new memory for the outputs, (*batch, m, n) or (*batch, m, 1)."""
    sides = [(shapes.m, shapes.n if each.kind == "matrix" else 1) for each in graph.outputs]
    return [
        new(x, (*shapes.batch, *side), stored_as(each.dtype)) for side, each in zip(sides, graph.outputs, strict=True)
    ]


def _outputs(results: Sequence[View], graph: EpilogueGraph) -> list[View]:
    """Return the memory of outputs as elements of their types."""
    return [located(z)._replace(dtype=output.dtype) for z, output in zip(results, graph.outputs, strict=True)]


def _ended(x: View, results: Sequence[View], graph: EpilogueGraph, shapes: Shapes, outs: Sequence[Any]) -> Any:
    """Return the outputs in the caller's shapes and types, or in the caller's `out`."""
    ended = []
    for result, output, out in zip(results, graph.outputs, outs, strict=True):
        if out is not None:
            copy(result._replace(dtype=output.dtype), located(view(out)))
            arrays.written(out)
            ended.append(out)
            continue
        array, shape = finished(x, result), shapes.of(output.kind)
        array = bits_of(array, output.dtype) if dtypes.get(output.dtype).size == 1 else array
        ended.append(array if tuple(array.shape) == shape else array.reshape(shape))
    return ended[0] if len(ended) == 1 else tuple(ended)


def _matrix(
    call: DescribedProduct, index: Ints, results: Sequence[View], options: Options, multiply: Callable[..., Any]
) -> EpilogueLaunch | None:
    """Write the outputs of one matrix, that with this index, of `call.x` and `call.weights`.

    Return the launch that did it, if it was one.
    """
    graph, common = call.graph, call.common
    values = [at_index(z, index) for z in call.values]
    a, *bs = (located(view(each)) for each in (call.x, *call.weights))
    outputs = _outputs(results, graph)
    memories = [z for z in values if isinstance(z, View)]
    arrays.together(**{"a": a, "b": bs[-1], **{f"operand {i}": each for i, each in enumerate(memories)}})
    if common not in dtypes.FLOAT8:  # each of the two is multiplied by both
        a, *bs = (converted(z, common) for z in (a, *bs))
    with ordered.between(a, {z.stream for z in (*bs, *memories)}):
        launch = _fused(a, bs, graph, values, outputs, options)
        if launch is not None:
            return _run_fused(launch, a, bs, values, outputs)
        totals = [new(a, (a.shape[0], bs[0].shape[1]), call.sums) for _ in bs]
        terms = NO_OPTIONS._replace(scale_a=options.scale_a, scale_b=options.scale_b, precision=options.precision)
        keywords = terms._replace(batch_invariant=bool(options.batch_invariant)).passed()
        for weight, b, total in zip(call.weights, bs, totals, strict=True):
            if keywords:
                multiply(call.x, weight, out=total.array, dtype=dtypes.get(call.sums).numpy, **keywords)
            else:
                write(a, b, total)
        _rows(totals, graph, values, outputs, "f64" if graph.outputs[0].dtype == "f64" else "f32", a.stream)
    return None


def _fused(
    a: View, bs: Sequence[View], graph: EpilogueGraph, values: Sequence[View | float], outputs: Sequence[View],
    options: Options,
) -> Fused | None:  # fmt: skip
    """Return the launch of the product and its function, if a kernel does both."""
    c, n = outputs[0], bs[0].shape[1]
    if options.scale_a is not None or options.scale_b is not None:
        return None
    # Tiles add up a row in another order than traced_rows: one of the two serves every number of rows.
    few = c.shape[0] * n < MANY_EXCHANGED or n > WIDEST_EXCHANGED
    if graph.statistics and (options.batch_invariant or few):
        return None
    if not graph.statistics and c.dtype not in READ:
        return None
    if a.dtype not in ("f16", "bf16", "f32") or resolved(options.precision, a.dtype, c.dtype, a.device):
        return None
    staged = not graph.statistics and _is_staged(outputs)
    sums = View(0, c.shape, arrays.contiguous(c.shape, 4), "f32", c.device)
    terms = for_kernel(options._replace(batch_invariant=bool(options.batch_invariant), precision=None))
    call = DeviceCall(still(a), still(bs[0]), still(c), options=terms)
    for matrices in (2, 1) if len(bs) == 2 and bs[0].strides == bs[1].strides else (1,):
        stored = [*values, *[sums] * (len(bs) - matrices), *outputs[1 + staged :]]
        vectors = tuple(_vector_of(each, n) for each in stored)
        carried = () if graph.statistics else _carried(graph, values, vectors, c)
        low = bs[1].pointer & 15 if matrices == 2 else 0
        launch = _fused_launch(call, graph, vectors, len(bs), matrices, staged, low, carried)
        if not isinstance(launch, str):
            return launch
    return None


def _place_of(z: View | float) -> Strides | float:
    """Return where an operand or output lies, as the argument has it; a dimension of 1 is repeated."""
    if not isinstance(z, View):
        return z
    size = dtypes.get(z.dtype).size
    row, column = (step // size if length > 1 else 0 for step, length in zip(z.strides, z.shape, strict=True))
    return Strides(z.pointer, row, column)


def _vector_of(z: View | float, n: int) -> int:
    """Return the elements of a row that are adjacent and aligned."""
    if not isinstance(z, View) or z.shape[1] != n or n == 1:
        return 1
    size = dtypes.get(z.dtype).size
    if z.strides[1] != size or not 0 <= z.strides[0] * z.shape[0] < size << 31:  # kernels count in 32 bits there
        return 1
    aligned = math.gcd(16, z.pointer, z.strides[0] if z.shape[0] > 1 else 16)
    return max(1, math.gcd(aligned // size, n))


def _run_fused(
    launch: Fused, a: View, bs: Sequence[View], values: Sequence[View | float], outputs: Sequence[View]
) -> EpilogueLaunch | None:  # fmt: skip
    """Launch a product and its function; before it, the sums with a second weight that is not in the same launch."""
    function, run, read = launch.function, launch.run, [*values]
    if len(bs) > launch.matrices:
        sums = new(a, outputs[0].shape, "f32")
        write(a, bs[1], sums)
        read.append(sums)
    operands = [z for z in (values[i] for i in function.carried) if isinstance(z, View)]
    second = bs[1 : launch.matrices] if function.mapped else []
    mapped = [*second, *outputs[1 : 1 + function.staged], *operands]
    described = list(zip(launch.maps, mapped, strict=True))
    maps = [(shape, z.pointer) for shape, z in described]
    stored = [_place_of(z) for z in (*read, *outputs[1 + function.staged :])]
    workspace = scratch(a, run.workspace) if run.workspace else None
    pointers, apart = (a.pointer, bs[0].pointer, outputs[0].pointer), bs[-1].pointer - bs[0].pointer
    start = workspace.pointer if workspace else 0
    known_epilogues.launch(run, function, pointers, stored, maps, apart, a.stream, start)
    if len(bs) > launch.matrices:
        return None
    return EpilogueLaunch(run, function, (a, bs[0], outputs[0]), stored, described, bs[-1])


def _is_staged(outputs: Sequence[View]) -> bool:
    """Return True if the second output lies as the first, and tensor copies can write both: see `describable`."""
    first, second = outputs[0], outputs[min(1, len(outputs) - 1)]
    size = dtypes.get(first.dtype).size
    alike = len(outputs) > 1 and first[1:4] == second[1:4] and size == 2
    lines = first.strides[1] == size and min(first.shape) > 1 and first.shape[1] * size % 16 == 0
    copies = driver.find(first.device).capability == 90
    return alike and lines and copies and not (first.pointer | second.pointer | first.strides[0]) % 16


def _carried(
    graph: EpilogueGraph, values: Sequence[View | float], vectors: Sequence[int], c: View
) -> tuple[tuple[int, View], ...]:  # fmt: skip
    """Return the operands that tensor copies can bring, with their places, at no address: matrices and rows."""
    if driver.find(c.device).capability != 90 or min(c.shape) == 1:
        return ()
    carried = []
    for i, (known, z, wide) in enumerate(zip(graph.operands, values, vectors, strict=False)):
        if not isinstance(z, View) or known.dtype not in ("f16", "bf16") or wide < 8:
            continue
        if known.kind == "row" or (known.kind == "matrix" and z.strides[0]):
            carried.append((i, View(0, z.shape, z.strides, z.dtype)))
    return tuple(carried[:4])


@table.once
def _fused_launch(
    call: DeviceCall, graph: EpilogueGraph, vectors: tuple[int, ...], weights: int, matrices: int, staged: bool,
    low: int, carried: tuple[tuple[int, View], ...],
) -> Fused | str:  # fmt: skip
    """Return the launch of a product with a function, or why there is none."""
    if weights == 2 and matrices == 1:
        graph = traced_function.second_as_operand(graph, "f32")
    try:
        brought = tuple(i for i, _ in carried)
        make = partial(traced_function.function, graph, "f32", vectors, matrices=matrices, staged=staged)
        function = make(carried=brought)
        form, problem = described(call._replace(epilogue=function.name))
        if form.runs > 1 or (form.m, form.n, problem.c_layout, form.batch) != (*call.c.shape, "row", 1):
            return "the product is taken in another form than by rows"
        if low:
            problem = problem._replace(alignments=(problem.alignments[0], 2, problem.alignments[2]))
        rung, config, _ = with_function(problem)
        if matrices == 2 and rung.name.startswith("gemv"):
            function = make(mapped=False)
            problem = problem._replace(epilogue=function.name)
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
    of_second = matrices == 2 and function.mapped
    if of_second and boxes["b"].packed >= 0:
        return "B is packed first, and only one of two is"
    places = [("b", views[1])] * of_second + [("c", views[2])] * staged
    maps = [tensormaps.shape(boxes[name], problem, each) for name, each in places]
    maps += [tensormaps.of_operand(kernel.geometry, problem, each) for _, each in carried]
    return Fused(run, function, tuple(maps), matrices)


def _rows(
    totals: Sequence[View], graph: EpilogueGraph, values: Sequence[View | float], outputs: Sequence[View],
    element: str, stream: int,
) -> EpilogueLaunch:  # fmt: skip
    """Apply a function to rows of sums in memory, in the arithmetic of `element`."""
    memories, (m, n) = [*values, *outputs], totals[0].shape
    vectors = tuple(_vector_of(each, n) for each in memories)
    launch = _rows_launch(graph, vectors, (m, n), totals[0].dtype, element, totals[0].device)
    stored = [_place_of(z) for z in memories]
    pointers = totals[0].pointer, totals[-1].pointer, 0
    known_epilogues.launch(launch.run, launch.function, pointers, stored, (), 0, stream)
    return EpilogueLaunch(launch.run, launch.function, (totals[0], totals[-1], None), stored)


@table.once
def _rows_launch(
    graph: EpilogueGraph, vectors: tuple[int, ...], shape: tuple[int, int], sums: str, element: str, device: str
) -> Fused:
    """Return the launch of traced_rows for sums that lie row after row."""
    (m, n), card = shape, driver.find(device)
    function = traced_function.function(graph, element, vectors, rows=True)
    kernel = traced_function.rows_kernel(function, sums, n, _THREADS)
    size = dtypes.get(sums).size
    memory = View(0, (1, m, n), (0, n * size, size), sums)
    problem = Problem(m, n, 1, sums, element)
    argument = product_argument(problem, memory, memory, memory)
    launch = Geometry("traced_rows.cu", kernel, (min(m, _BLOCKS * card.sms), 1, 1), (_THREADS, 1, 1))
    run = Ready([loaded(launch, card.ordinal)], argument, card.ordinal, 0, False, operands=function.size)
    return Fused(run, function)
