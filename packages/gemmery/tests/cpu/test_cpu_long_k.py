"""A long k: errors beside NumPy's, the third chain of sums, and the same bits for a row of any product."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import gemmery as gm
from gemmery import arrays, tiers, verify
from gemmery.cpu import build, entry, target
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from operands import adds_bf16_in_pairs, random

pytestmark = pytest.mark.sampled(3)

TYPES = ("f4", "f8", "c8", "c16", "f2")
SHAPES = ((1, 1), (1, 4), (4, 1), (4, 4), (3, 40), (40, 5), (170, 9))
LEAST = 2.0  # roundings that NumPy's error counts as at least: some of its sums are exact
STEP = 1 << 18


def operand(shape, dtype, seed, column_major=False):
    """Positive numbers, whose sums grow: chains of additions then lose most."""
    draw = np.random.default_rng(seed)
    x = draw.random(shape[::-1] if column_major else shape, np.float32)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * draw.random(x.shape, np.float32)
    x = x.astype(dtype)
    return x.T if column_major else x


def exact(a, b):
    wide = {"c": np.clongdouble, "f": np.longdouble}[a.dtype.kind] if a.dtype.itemsize // 8 else np.float64
    wide = np.complex128 if a.dtype == np.complex64 else wide
    k = a.shape[1]
    return sum(a[:, p : p + STEP].astype(wide) @ b[p : p + STEP].astype(wide) for p in range(0, k, STEP))


def roundings(result, expected, unit):
    return float((np.abs(result - expected) / np.abs(expected)).max()) / unit


def compare(a, b):
    expected, unit = exact(a, b), float(np.finfo(a.dtype).eps) / 2
    ours, theirs = (roundings(multiply(a, b), expected, unit) for multiply in (gm.matmul, np.matmul))
    assert ours <= 4 * max(theirs, LEAST), (a.shape, b.shape, a.dtype, ours, theirs)


@pytest.mark.many(4)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_at_most_four_times_numpys(shape, dtype):
    m, n = shape
    for k, a_columns, b_columns in itertools.product((300, 8000), (False, True), (False, True)):
        scale = 1 if dtype != "f2" else 2.0**-10  # no sum beyond the largest float16
        a, b = operand((m, k), dtype, 0, a_columns), operand((k, n), dtype, 1, b_columns)
        compare((a * scale).astype(dtype), b)


@pytest.mark.many(3)
@pytest.mark.parametrize(("shape", "dtype", "k"), [
    ((1, 1), "f4", 10**7), ((2, 3), "f4", 10**7), ((1, 3), "f8", 10**6), ((3, 1), "c8", 10**6), ((4, 4), "f8", 10**6),
    ((4, 4), "c8", 10**6), ((2, 2), "c16", 300_000), ((64, 64), "f4", 10**5), ((200, 200), "f4", 10**4),
])  # fmt: skip
def test_errors_of_a_very_long_k(shape, dtype, k):
    compare(operand((shape[0], k), dtype, 2), operand((k, shape[1]), dtype, 3))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_sums_of_ones_are_exact(m, n):
    k = 10**7
    product = gm.matmul(np.ones((m, k), "f4"), np.ones((k, n), "f4"))
    assert (product == k).all()


@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
def test_narrow_types_are_rounded_once(dtype):
    a, b = (
        random((4, 5000), {"f2": "f16"}.get(dtype, "bf16"), 0),
        random((5000, 3), {"f2": "f16"}.get(dtype, "bf16"), 1),
    )
    checked = verify.check(gm.matmul(a, b), a, b, verify.blocked)
    assert checked.ok, checked


RUNGS = ("packed", "direct", "streamed", "gemv")


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "complex64"])
def test_the_chain_of_runs_of_blocks(name, dtype):
    """k of three runs of 1024 blocks (two for c64), for the kernels that take so many."""
    rung, block = find(CPU, name), target.k_block(target.host(), 1)
    m, n = (1, 3) if name == "gemv" else (3, 2)
    k = 2 * block * target.FAN + 5000 if dtype != "complex64" else block * target.FAN + 5000
    problem = Problem(m, n, k, dtype, dtype)
    if name == "direct" or rung.refuses(problem) or dtype not in rung.dtypes:
        pytest.skip("it takes no such k, or type")
    a, b, c = random((1, m, k), dtype, 0), random((1, k, n), dtype, 1), np.ones((1, m, n), arrays.numpy_dtype(dtype))
    old = c.copy()
    kernel = rung.build(problem._replace(scaled=True), rung.default)
    kernel(arrays.view(a), arrays.view(b), arrays.view(c), alpha=0.5, beta=2.0)
    checked = verify.check(c, a, b, rung.bound, alpha=0.5, beta=2.0, c=old)
    assert checked.ok, checked


def test_all_kernels_give_a_row_the_same_bits_at_any_k():
    for k in (400, 5000, target.deepest(target.host()) + 999):
        a, b = random((1, 3, k), "f32", 0), random((1, k, 5), "f32", 1)
        results = {}
        for name, m in (("packed", 3), ("streamed", 3), ("direct", 3), ("gemv", 1)):
            if name == "direct" and k > target.deepest(target.host()):
                continue
            rung, c = find(CPU, name), np.zeros((1, m, 5), np.float32)
            kernel = rung.build(Problem(m, 5, k, "f32", "f32"), rung.default)
            kernel(arrays.view(a[:, :m]), arrays.view(b), arrays.view(c))
            results[name] = c[0, 0].tobytes()
        assert len(set(results.values())) == 1, (k, results)


def test_chains_are_short_where_c_is_narrow_or_small():
    lanes, whole = target.host().lanes(4), target.k_block(target.host())
    wide, column_major = Problem(500, lanes + 1, 900, "f32", "f32"), Problem(2, 512, 900, "f32", "f32", b_layout="col")
    assert build.chain(wide._replace(n=lanes)) == build.chain(column_major) == 128
    longer = (wide, column_major._replace(n=513), column_major._replace(invariant=True), wide._replace(n=2, out="f64"))
    assert {build.chain(problem) for problem in longer} == {whole}
    for m, n, b_columns in ((500, lanes, False), (2, 512, True), (500, lanes + 1, False)):
        a, b = operand((m, 900), "f4", 0), operand((900, n), "f4", 1, b_columns)
        block = build.even(900, 128 if n != lanes + 1 else whole, 1)
        parts = [gm.matmul(a[:, p : p + block], b[p : p + block]) for p in range(0, 900, block)]
        assert (gm.matmul(a, b) == sum(parts[1:], parts[0])).all(), (m, n)


def test_a_symmetric_product_of_several_runs_of_blocks():
    a = random((40, target.deepest(target.host()) + 3000), "f32", 0)
    product = gm.matmul(a, a.T)
    assert (product == product.T).all()
    assert (product == gm.matmul(a, a.T.copy())).all()
    compare(np.abs(a), np.abs(a).T)


LAYOUTS = {"rows": (1, False), "columns": (1, True), "every second": (2, False), "every third": (3, False)}


def placed(shape, dtype, layout, seed):
    step, by_columns = LAYOUTS[layout]
    x = random(shape, dtype, seed)
    room = np.zeros((shape[0], step * shape[1]), x.dtype, order="F" if by_columns else "C")[:, ::step]
    room[...] = x
    return room


def rows_that_differ(a, b, options):
    whole = gm.matmul(a, b, **options)
    heights = [m for m in (1, 2, 3, 8, 15, 16, 64, 161) if m <= len(a)]
    different = [m for m in heights if gm.matmul(a[:m], b, **options).tobytes() != whole[:m].tobytes()]
    return different + ["vector"] * (gm.matmul(a[1], b, **options).tobytes() != whole[1].tobytes())


@pytest.mark.many(5)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "complex64", "complex128", "int32"])
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_a_row_has_the_same_bits_in_every_number_of_rows(dtype, b_layout):
    otherwise = {"bf16": adds_bf16_in_pairs(), "f16": target.host().has_tiles}.get(dtype, False)  # with many rows
    exempt = b_layout == "columns" or dtype[0] == "c" or otherwise
    borders = ((3, 7), (64, 383), (5, 385), (60, 1000), (1, 600), (2, 47), (2, 48), (4, 1500))
    borders += ((700, 500),) if (dtype, b_layout) == ("f32", "rows") else ()  # a B beyond L2: streamed, then packed
    for a_layout, (n, k) in itertools.product(("rows", "columns", "every third"), borders):
        a, b = placed((170 if n > 50 else 20, k), dtype, a_layout, 0), placed((k, n), dtype, b_layout, 1)
        for options in ({"batch_invariant": True},) if exempt else ({"batch_invariant": True}, {}):
            assert rows_that_differ(a, b, options) == [], (a_layout, n, k, options)


def test_an_epilogue_and_an_explanation_of_an_invariant_row():
    a, b = placed((9, 700), "f32", "rows", 0), placed((700, 40), "f32", "columns", 1)
    options = {"batch_invariant": True, "bias": np.ones(40, "f4"), "activation": "gelu"}
    assert rows_that_differ(a, b, options) == []
    assert gm.explain(a[:1], b, batch_invariant=True).rung == "packed"
    assert gm.explain(a[:1], b).rung == "gemv"


def test_a_kernel_for_the_shape_is_asked_for_by_the_work_done():
    """A batch of many products is worth one at once, a few calls of large ones soon, one product in 64 calls."""
    assert [entry.calls_until_often(count) for count in (1, 2000, 2048, 10_000, 300_000)] == [64, 64, 32, 13, 1]
    x = random((300_000, 3), "f32", 0)
    gm.vecdot(x[:20], x[:20])
    tiers.wait()
    before = tiers.state().finished
    for _ in range(2):
        gm.vecdot(x, x)
    tiers.wait()
    if tiers.enabled():
        assert tiers.state().finished == before + 1
