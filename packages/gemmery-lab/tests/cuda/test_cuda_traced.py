"""Functions after a product in every kernel with an epilogue, on the emulator; no GPU is needed."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from checked_products import place
from gemmery.cuda import nvrtc, traced_function
from gemmery.epilogues.graph import GraphBuilder, GraphOperand, GraphOutput
from gemmery.epilogues.reference import rounded
from gemmery.errors import EmulationError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from operands import numpy_dtype, random
from random_functions import check

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

U = {"f32": 2.0**-24, "f64": 2.0**-53}


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


def run(
    rung,
    graph,
    shape,
    name,
    out,
    kinds,
    *,
    layout="row",
    b="col",
    config=None,
    weights=1,
    more=(),
    seed=0,
    mapped=False,
):
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
    staged = mapped and len(stored) == 1
    arrays = [each for each, _ in read] + [each.array[0] for each in stored[staged:]]
    vectors = [vector(each, n) for each in arrays]
    carried = tuple(
        i
        for i, (operand, wide) in enumerate(zip(graph.operands, vectors, strict=False))
        if rung == "wgmma_epilogue" and operand.kind in ("matrix", "row") and operand.dtype != "f32" and wide >= 8
    )
    form = {"staged": staged, "carried": carried, "mapped": rung == "wgmma_epilogue"}
    function = traced_function.function(graph, accumulator, vectors, matrices=weights, **form)
    second = whole[2].array if weights == 2 else None
    given = Gemm(whole[0].array, whole[1].array, c.array, traced=tuple(arrays), second=second,
                 second_output=stored[0].array if staged else None)  # fmt: skip
    problem = problem_of(given, name, out, "h200", epilogue=function.name)
    runs = run_rung(find(CUDA, rung), problem, config or {}, given)
    assert [str(one) for each in runs for one in each.findings] == []
    sums = [whole[0].array[0].astype(np.float64) @ each.array[0].astype(np.float64) for each in whole[1:]]
    bound = dict(zip(names, (each for each, _ in read), strict=True))
    check([each.array[0] for each in (c, *stored)], graph, sums, bound, out, U[accumulator])
    assert all(each.untouched_around() for each in (c, *stored))
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
    c = b.add("multiply", b.add("sum", value="0"), b.constant(0.25))  # exp of the sums is no subnormal number
    y = b.add("multiply", b.add("silu", c), b.add("sum", value="1"))
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
    ("wgmma_epilogue", "f16", "f16", {**WGMMA, "bn": 256}),
    ("wgmma_epilogue", "f16", "f32", {**WGMMA, "bm": 64, "bn": 64}),
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


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("layout", ["row", "padded"])
def test_a_matrix_in_several_tiles_of_four_pieces(name, layout):
    config = {**WGMMA, "bn": 256, "blocks": 2}
    for shape in ((200, 520, 72), (264, 264, 200)):
        run("wgmma_epilogue", gated(), shape, name, name, [("matrix", name), ("row", "f32"), ("number", "f32")],
            layout=layout, config=config)  # fmt: skip


@pytest.mark.many
@pytest.mark.parametrize(("rung", "name", "out", "config"), RUNGS)
@pytest.mark.parametrize("layout", ["row", "padded", "odd"])
def test_two_outputs(rung, name, out, config, layout):
    for shape, kind in (((72, 136, 64), "row"), ((130, 200, 40), "matrix")):
        run(rung, two_outputs(), shape, name, out, [(kind, out)], layout=layout, config=config, more=(out,))


@pytest.mark.many
@pytest.mark.parametrize("kind", ["row", "matrix"])
@pytest.mark.parametrize(("bm", "bn"), [(64, 64), (128, 128), (128, 256)])
def test_two_outputs_by_tensor_copies(bm, bn, kind):
    config = {**WGMMA, "bm": bm, "bn": bn, "blocks": 1, "stages": 4 if bn == 256 else 2}
    for shape in (72, 136, 64), (200, 296, 40):
        run(
            "wgmma_epilogue",
            two_outputs(),
            shape,
            "f16",
            "f16",
            [(kind, "f16")],
            config=config,
            more=("f16",),
            mapped=True,
        )


@pytest.mark.many
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("b", ["row", "col"])
@pytest.mark.parametrize(("bm", "bn"), [(128, 128), (64, 128), (64, 256), (128, 256)])
@pytest.mark.parametrize("shape", [(72, 136, 64), (130, 200, 136), (1, 64, 72)])
def test_two_weights_in_one_launch(out, b, bm, bn, shape):
    run("wgmma_epilogue", swiglu(), shape, "bf16", out, [], b=b, config={**WGMMA, "bm": bm, "bn": bn}, weights=2)


@pytest.mark.sampled(1)
@pytest.mark.many(2)
@pytest.mark.parametrize(("m", "bm", "bn"), [(1, 8, 64), (8, 8, 128), (3, 8, 112), (17, 64, 112), (64, 64, 224)])
def test_two_weights_and_few_rows(m, bm, bn):
    """Of tiles that end in a piece over a part of the one before, too."""
    config = {**WGMMA, "bm": bm, "bn": bn, "stages": 4}
    run("wgmma_epilogue", swiglu(), (m, 200, 512), "bf16", "bf16", [], b="col", config=config, weights=2)


@pytest.mark.parametrize(
    ("n", "k", "config"),
    [
        (72, 136, {}),
        (67, 2048, {"team": 32}),
        (5, 4096, {"rows": 4, "team": 8}),
        (33, 512, {"team": 64, "threads": 256}),
    ],
)
def test_two_weights_and_one_row_in_one_launch(n, k, config):
    run("gemv_vectorized", swiglu(), (1, n, k), "bf16", "bf16", [], config=config, weights=2)


@pytest.mark.parametrize(
    ("b", "shape", "config"),
    [
        ("row", (1, 72, 136), {}),
        ("col", (1, 72, 136), {"split": 2}),
        ("col", (9, 1, 64), {}),
        ("col", (1, 72, 136), {"rows": 1}),
    ],
)
def test_two_weights_that_one_launch_does_not_read(b, shape, config):
    with pytest.raises(RefusedError):
        run("gemv_vectorized", swiglu(), shape, "bf16", "bf16", [], b=b, config=config, weights=2)


def quantized_rows(out):
    """quantize_rows: codes, and a factor for each row."""
    b = GraphBuilder()
    c = b.add("sum", value="0")
    top = b.add("divide", b.add("row_maximum", b.add("absolute", c)), b.constant(127.0 if out == "int8" else 448.0))
    factor = b.add("maximum", top, b.constant(2.0**-126))
    codes = b.add("multiply", c, b.add("divide", b.constant(1.0), factor))
    return b.graph([GraphOutput(b.add("cast", codes, value=out), "matrix", out), GraphOutput(factor, "column", "f32")])


def exchanged(out, shape, bn=128, texts=None, seed=None):
    """Return what blocks that exchange the largest elements of rows make of small whole numbers, and what is right."""
    (m, n, k), draw = shape, np.random.default_rng(3)
    a, b = (draw.integers(-3, 4, (1, *sides)).astype(np.float16) for sides in ((m, k), (n, k)))
    c, factors = np.zeros((1, m, n), {"int8": np.int8, "e4m3": np.uint8}[out]), np.zeros((m, 1), np.float32)
    tiles, across = -(-m // 128), n // bn
    words = np.zeros(tiles * (128 * across + 8), np.int32)
    function = traced_function.function(quantized_rows(out), "f32", (1,))
    given = Gemm(a, b.transpose(0, 2, 1), c, offsets=words, traced=(factors,))
    problem = problem_of(given, "f16", out, "h200", epilogue=function.name)
    config = {**WGMMA, "bn": bn, "blocks": 2 * across}
    runs = run_rung(find(CUDA, "wgmma_epilogue"), problem, config, given, EmulationOptions(seed=seed, texts=texts))
    sums = (a[0].astype(np.float32) @ b[0].T.astype(np.float32)).astype(np.float32)
    top = np.abs(sums).max(1, keepdims=True) / np.float32(127.0 if out == "int8" else 448.0)
    codes = rounded(sums * (np.float32(1) / top), out)
    got = c[0].astype(np.float64)
    if out == "e4m3":
        size, sign = c[0] & 127, np.where(c[0] > 127, -1.0, 1.0)
        got = sign * np.where(size < 8, size * 2.0**-9, (8 + size % 8) * 2.0 ** (size // 8 - 10.0))
    faults = [str(one) for each in runs for one in each.findings]
    return faults, np.array_equal(got, codes) and np.array_equal(factors, top), words.any(), c.tobytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("out", ["e4m3", "int8"])
@pytest.mark.parametrize(("shape", "bn"), [((200, 256, 64), 128), ((640, 512, 72), 256)])
def test_blocks_exchange_numbers_of_rows(out, shape, bn):
    faults, right, left, bits = exchanged(out, shape, bn)
    assert (faults, right, left) == ([], True, False)
    assert exchanged(out, shape, bn, seed=5)[3] == bits


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("while (!come);", "while (false);"),
        ("*words.at(of_warp, i) = 0;", ";"),
        ("words.readers[of_warp / 16] = 0;", ";"),
        ("(lane % 4 == 0) ptx::st_relaxed", "(lane % 8 == 0) ptx::st_relaxed"),
        ("lane < 2 ? here : there)", "here)"),
    ],
)
def test_an_exchange_without_its_flag_is_seen(old, new):
    text = nvrtc.text("wgmma_rows.cu")
    assert old in text
    texts = {"wgmma_rows.cu": text.replace(old, new)}
    try:
        faults, right, left, _ = exchanged("e4m3", (200, 256, 64), texts=texts, seed=2)
    except EmulationError as error:  # a number that never comes
        faults, right, left = [str(error)], True, False
    assert faults or not right or left
