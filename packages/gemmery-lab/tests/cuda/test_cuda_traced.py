"""Functions after a product in every kernel with an epilogue, on the emulator; no GPU is needed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from checked_products import place
from gemmery.cuda import traced
from gemmery.epilogues.graph import STATISTICS, EpilogueGraph, GraphBuilder, GraphOperand, GraphOutput
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung
from operands import numpy_dtype, random

pytest.importorskip("cuda.bindings")

U = {"f32": 2.0**-24, "f64": 2.0**-53}
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24, "f64": 2.0**-53, "e4m3": 2.0**-4}
TINY = {"bf16": 2.0**-134, "f16": 2.0**-25, "f32": 2.0**-150, "f64": 0.0, "e4m3": 2.0**-10}
SHAPES = {"matrix": lambda m, n: (m, n), "row": lambda m, n: (n,), "column": lambda m, n: (m, 1)}
erf = np.vectorize(math.erf)


def evaluated(graph: EpilogueGraph, sums, error, operands, u: float):
    """Return the outputs in float64 and how far each may be off, with sums that are so far off.

    Each function of the special function unit is within 16 units of its argument's or result's size.
    """
    shape, values, errors = sums[0].shape, [], []

    def smooth(f, slope, x, e):
        value = f(x)
        return value, slope(x) * e + 16 * u * (np.abs(value) + np.abs(x) * slope(x))

    for node in graph.nodes:
        args = [values[i] for i in node.inputs]
        errs = [errors[i] for i in node.inputs]
        own = None
        with np.errstate(all="ignore"):
            if node.op == "sum":
                value, own = sums[int(node.value)], error
            elif node.op == "operand":
                value, own = np.broadcast_to(np.asarray(operands[node.value], np.float64), shape), np.zeros(shape)
            elif node.op == "constant":
                value, own = np.full(shape, node.number), np.full(shape, u * abs(node.number))
            elif node.op in ("row_index", "column_index"):
                value = np.indices(shape)[node.op == "column_index"].astype(np.float64)
                own = np.zeros(shape)
            elif node.op in ("add", "subtract"):
                value = args[0] + args[1] if node.op == "add" else args[0] - args[1]
                own = errs[0] + errs[1]
            elif node.op == "multiply":
                value = args[0] * args[1]
                own = np.abs(args[0]) * errs[1] + np.abs(args[1]) * errs[0] + errs[0] * errs[1]
            elif node.op == "divide":
                value = args[0] / args[1]
                own = (errs[0] + np.abs(value) * errs[1]) / np.maximum(np.abs(args[1]) - errs[1], 1e-300)
            elif node.op in ("maximum", "minimum"):
                value = getattr(np, node.op)(*args)
                own = np.maximum(*errs)
            elif node.op in ("less", "greater", "less_equal", "greater_equal"):
                value = getattr(np, node.op)(*args)
                own = np.where(np.abs(args[0] - args[1]) <= errs[0] + errs[1], np.inf, 0)
            elif node.op == "not":
                value, own = ~args[0], errs[0]
            elif node.op in ("and", "or"):
                value, own = getattr(np, f"logical_{node.op}")(*args), errs[0] + errs[1]
            elif node.op == "where":
                value = np.where(*args)
                own = np.where(args[0], errs[1], errs[2]) + np.where(errs[0] > 0, np.inf, 0)
            elif node.op == "negative":
                value, own = -args[0], errs[0]
            elif node.op == "absolute":
                value, own = np.abs(args[0]), errs[0]
            elif node.op == "relu":
                value, own = np.maximum(args[0], 0), errs[0]
            elif node.op == "cast":
                value = args[0].astype(numpy_dtype(node.value)).astype(np.float64)
                own = errs[0] + 2 * UNIT[node.value] * (np.abs(args[0]) + errs[0]) + TINY[node.value]
            elif node.op in STATISTICS:
                value, own = row_statistic(node.op, args[0], errs[0], u)
            else:
                value, own = smooth(*FUNCTIONS[node.op], args[0], errs[0])
        values.append(value)
        errors.append(own + 2 * u * np.abs(np.where(value == value, value, 0)) if value.dtype != bool else own)
    return [(values[each.node], errors[each.node]) for each in graph.outputs]


def row_statistic(op, x, e, u):
    n = x.shape[1]
    if op == "row_maximum":
        value, own = x.max(1), e.max(1)
    elif op == "row_sum":
        value, own = x.sum(1), e.sum(1) + n * u * np.abs(x).sum(1)
    elif op == "row_sum_of_squares":
        value, own = (x * x).sum(1), (2 * np.abs(x) * e + e * e).sum(1) + n * u * (x * x).sum(1)
    else:
        value = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
        own = e.max(1) + (n + 64) * u + 4 * u * np.abs(x).max(1)
    return np.repeat(value[:, None], n, 1), np.repeat(own[:, None], n, 1)


FUNCTIONS = {
    "exp": (np.exp, np.exp),
    "log": (np.log, lambda x: 1 / np.abs(x)),
    "tanh": (np.tanh, lambda x: np.ones_like(x)),
    "erf": (erf, lambda x: 1.13 * np.ones_like(x)),
    "sqrt": (np.sqrt, lambda x: 0.5 / np.sqrt(np.maximum(x, 1e-300))),
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda x: 0.5 * np.maximum(x, 1e-300) ** -1.5),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: 0.25 * np.ones_like(x)),
    "silu": (lambda x: x / (1 + np.exp(-x)), lambda x: 1.1 * np.ones_like(x)),
    "gelu": (lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))), lambda x: 1.13 * np.ones_like(x)),
}


def check(got, expected, name, rough=0.0):
    """Compare an output with its value: `rough` is what an approximation of gelu for bf16 may cost besides."""
    value, error = expected
    bound = error + (UNIT[name] + rough) * (np.abs(value) + error) + TINY[name]
    off = np.abs(got.astype(np.float64) - value)
    right = np.where(np.isfinite(value), off <= bound, True)
    assert right.all(), (off / bound).max()
    whole = np.isfinite(error) & ~np.isfinite(value)
    assert (np.isnan(got.astype(np.float64)) == np.isnan(value))[whole].all()


def operand(kind, name, m, n, layout, seed):
    """Return an operand of a graph in guarded memory, or a number."""
    if kind == "number":
        return 0.75, None
    rows, columns = {"matrix": (m, n), "row": (1, n), "column": (m, 1)}[kind]
    placed = place(random((1, rows, columns), name, seed), name, layout)
    return (placed.array[0] if kind != "row" else placed.array[0, 0]), placed


def vector(array, n):
    """Return the elements that are adjacent and aligned in each row."""
    if not isinstance(array, np.ndarray) or array.strides[-1] != array.itemsize:
        return 1
    sides = [array.ctypes.data, *array.strides[:-1]]
    return math.gcd(16, *sides) // array.itemsize and math.gcd(math.gcd(16, *sides) // array.itemsize, n, 8)


def run(rung, graph, shape, name, out, kinds, *, layout="row", b="col", config=None, weights=1, more=(), seed=0):
    """Run a graph after a product, and check all outputs and that nothing else was written."""
    m, n, k = shape
    draw = np.random.default_rng(seed)
    whole = [place(draw.integers(-3, 4, (1, *sides)).astype(numpy_dtype(name)), name, lies)
             for sides, lies in (((m, k), "row"), *(((k, n), b),) * weights)]  # fmt: skip
    c = place(np.full((1, m, n), np.nan).astype(numpy_dtype(out)), out)
    read = [operand(kind, kind_type, m, n, layout, 7 + i) for i, (kind, kind_type) in enumerate(kinds)]
    stored = [place(np.full((1, m, n), np.nan).astype(numpy_dtype(each)), each, layout) for each in more]
    names = [f"x{i}" for i in range(len(kinds))]
    graph = graph.bound([GraphOperand(x, *kind) for x, kind in zip(names, kinds, strict=True)], (out, *more))
    accumulator = "f64" if out == "f64" else "f32"
    arrays = [each for each, _ in read] + [each.array[0] for each in stored]
    function = traced.function(graph, accumulator, [vector(each, n) for each in arrays], matrices=weights)
    second = whole[2].array if weights == 2 else None
    given = Gemm(whole[0].array, whole[1].array, c.array, traced=tuple(arrays), second=second)
    problem = problem_of(given, name, out, "h200", epilogue=function.name)
    runs = run_rung(find(CUDA, rung), problem, config or {}, given)
    assert [str(one) for each in runs for one in each.findings] == []
    sums = [whole[0].array[0].astype(np.float64) @ each.array[0].astype(np.float64) for each in whole[1:]]
    bound = dict(zip(names, (each for each, _ in read), strict=True))
    results = evaluated(graph, sums, np.zeros((m, n)), bound, U[accumulator])
    rough = 2.0**-9 if rung.startswith("wgmma") and out == "bf16" else 0.0  # the polynomial of gelu
    for got, expected, each in zip((c, *stored), results, (out, *more), strict=True):
        check(got.array[0], expected, each, rough)
        assert got.untouched_around()
    assert all(each.untouched() for each in (*whole, *(each for _, each in read if each)))
    return runs


def gated():
    """residual + scale * silu(c) * up."""
    b = GraphBuilder()
    c, up, residual, scale = b.add("sum", value="0"), *(b.add("operand", value=f"x{i}") for i in range(3))
    y = b.add("add", residual, b.add("multiply", b.add("multiply", scale, b.add("silu", c)), up))
    return b.graph([GraphOutput(y)], [GraphOperand(f"x{i}") for i in range(3)])


def swiglu():
    b = GraphBuilder()
    y = b.add("multiply", b.add("silu", b.add("sum", value="0")), b.add("sum", value="1"))
    return b.graph([GraphOutput(y)])


def two_outputs():
    b = GraphBuilder()
    y = b.add("add", b.add("sum", value="0"), b.add("operand", value="x0"))
    return b.graph([GraphOutput(b.add("gelu", y)), GraphOutput(y)], [GraphOperand("x0")])


WGMMA = {"bm": 128, "bn": 128, "stages": 2, "cm": 1, "cn": 1, "band": 2, "blocks": 4}
RUNGS = [
    ("mma_general", "f16", "f16", {"tile": 64}),
    ("mma_general", "bf16", "f32", {"tile": 64}),
    ("simt_general", "f32", "f32", {"tile": 32}),
    ("simt_general", "f64", "f64", {"tile": 32}),
    ("wgmma_epilogue", "bf16", "bf16", WGMMA),
    ("wgmma_epilogue", "f16", "f32", {**WGMMA, "bm": 64, "bn": 64}),
    ("wgmma_epilogue", "f16", "f16", {**WGMMA, "bn": 256}),
]
KINDS = [
    [("matrix", ""), ("row", ""), ("number", "f32")],
    [("row", "f32"), ("matrix", "f32"), ("column", "")],
    [("column", "f32"), ("matrix", ""), ("row", "")],
]


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out", "config"), RUNGS)
@pytest.mark.parametrize(("kinds", "layout"), list(itertools.product(KINDS, ["row", "padded", "strided", "col"])))
def test_operands_of_every_kind_and_layout(rung, name, out, config, kinds, layout):
    own = "f64" if name == "f64" else name
    kinds = [(kind, (each or own) if own != "f64" or each != "f32" else "f64") for kind, each in kinds]
    for shape in ((72, 136, 64), (65, 67, 24)):
        b = "col" if shape[2] % 8 == 0 else "row"
        run(rung, gated(), shape, name, out, kinds, layout=layout, b=b, config=config)


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out", "config"), RUNGS)
@pytest.mark.parametrize("layout", ["row", "padded", "odd"])
def test_two_outputs(rung, name, out, config, layout):
    for shape, kind in (((72, 136, 64), "row"), ((130, 200, 40), "matrix")):
        run(rung, two_outputs(), shape, name, out, [(kind, out)], layout=layout, config=config, more=(out,))


@pytest.mark.many
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("b", ["row", "col"])
@pytest.mark.parametrize(("bm", "bn"), [(128, 128), (64, 128), (64, 256), (128, 256)])
@pytest.mark.parametrize("shape", [(72, 136, 64), (130, 200, 136), (1, 64, 72)])
def test_two_weights_in_one_launch(out, b, bm, bn, shape):
    run("wgmma_epilogue", swiglu(), shape, "bf16", out, [], b=b, config={**WGMMA, "bm": bm, "bn": bn}, weights=2)


@pytest.mark.parametrize(("m", "bn"), [(1, 64), (8, 128)])
def test_two_weights_and_few_rows(m, bn):
    config = {**WGMMA, "bm": 8, "bn": bn, "stages": 4}
    run("wgmma_epilogue", swiglu(), (m, 200, 512), "bf16", "bf16", [], b="col", config=config, weights=2)
