"""matmul, gemm and gemv as a user calls them, with NumPy's semantics."""

from __future__ import annotations

import itertools
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes, verify
from gemmery.api import explanation, promote
from operands import agrees, numpy_dtype, random

NAMES = list(dtypes.NAMES)

SHAPES = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((5, 3), (3,)),
    ((5, 3), (3, 4)),
    ((2, 5, 3), (3,)),
    ((3,), (2, 3, 4)),
    ((2, 5, 3), (3, 4)),
    ((5, 3), (2, 3, 4)),
    ((2, 5, 3), (2, 3, 4)),
    ((2, 1, 5, 3), (6, 3, 4)),
    ((7, 1, 2, 5, 3), (6, 1, 3, 4)),
    ((7, 1, 2, 1, 3), (6, 1, 3, 1)),
    ((4, 1, 1, 3), (5, 3, 2)),
    ((1, 1, 1), (1, 1, 1)),
]


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("one", "two"), SHAPES, ids=str)
def test_broadcasting_and_vectors(one, two, name):
    a, b = random(one, name, 1), random(two, name, 2)
    result = gm.matmul(a, b)
    assert np.shape(result) == np.matmul(a.astype("c16"), b.astype("c16")).shape
    assert np.asarray(result).dtype == numpy_dtype(name)
    assert agrees(result, a, b)


@pytest.mark.parametrize("one", [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_every_pattern_of_broadcast_batches_of_tiny_products(one, monkeypatch):
    monkeypatch.setattr(explanation, "_limits", lambda dtype, threads: (100.0, 10.0, 0.0))
    draw = np.random.default_rng(0)
    for others in itertools.product([(1, 1), (1, 2), (3, 1), (2, 2)], repeat=2):
        of_a, of_b = zip(one, *others, strict=True)
        for m, n, k in itertools.product((0, 1, 2), repeat=3):
            a, b = draw.integers(-9, 9, (*of_a, m, k)).astype(float), draw.integers(-9, 9, (*of_b, k, n)).astype(float)
            expected = a @ b
            assert np.array_equal(gm.matmul(a, b), expected)
            assert np.array_equal(gm.matmul(a, b, bias=1, activation="relu"), np.maximum(expected + 1, 0))
            out = np.empty(expected.shape[::-1]).T
            assert gm.matmul(a, b, out=out) is out
            assert np.array_equal(out, expected)
            if m == n == k == 1:
                assert gm.explain(a, b).problem.k == 1


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ((0,), (0,)),
        ((0, 3), (3, 4)),
        ((5, 3), (3, 0)),
        ((5, 0), (0, 4)),
        ((0, 5, 3), (3, 4)),
        ((2, 5, 0), (0,)),
        ((150, 0), (0, 140)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "complex128"])
def test_dimensions_of_zero(one, two, name):
    a, b = random(one, name, 1), random(two, name, 2)
    expected = np.matmul(a.astype("c16"), b.astype("c16"))
    result = gm.matmul(a, b)
    assert np.shape(result) == expected.shape
    assert np.array_equal(np.asarray(result).astype("c16"), expected)
    out = np.full(expected.shape, 7, numpy_dtype(name))
    assert gm.matmul(a, b, out=out) is out
    assert np.array_equal(out.astype("c16"), expected)


def test_an_empty_sum_still_has_its_bias_and_its_old_c():
    a, b, c = np.zeros((2, 0)), np.zeros((0, 3)), np.arange(6.0).reshape(2, 3)
    assert np.array_equal(gm.matmul(a, b, bias=[1, -2, 3], activation="relu"), [[1, 0, 3]] * 2)
    assert np.array_equal(gm.gemm(5, a, b, 2, c), 2 * c)
    assert np.array_equal(gm.gemm(5, a, b, 0, np.full((2, 3), np.nan)), np.zeros((2, 3)))


def layouts(x):
    """x in every layout that NumPy can make."""
    yield x
    yield np.asfortranarray(x)
    for axes in itertools.product((1, 2), repeat=x.ndim):
        big = np.full([n * s for n, s in zip(x.shape, axes, strict=True)], 77).astype(x.dtype)
        big[tuple(slice(None, None, s) for s in axes)] = x
        yield big[tuple(slice(None, None, s) for s in axes)]
    yield np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    yield np.ascontiguousarray(x[::-1])[::-1]
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    unaligned = np.ndarray(x.shape, x.dtype, raw)
    unaligned[...] = x
    yield unaligned


@pytest.mark.parametrize("name", ["f32", "f16", "int8", "complex64"])
def test_operands_and_out_of_any_strides(name):
    a, b = random((9, 7), name, 1), random((7, 5), name, 2)
    for x, y in itertools.product(layouts(a), layouts(b)):
        assert agrees(gm.matmul(x, y), a, b)
    for out in layouts(np.zeros((9, 5), numpy_dtype(name))):
        memory = out.base if out.base is not None else out
        assert gm.matmul(a, b, out=out) is out
        assert agrees(out, a, b)
        assert memory is out or memory.dtype != out.dtype or set(np.unique(memory)) <= {*np.unique(out), 0, 77}


@pytest.mark.parametrize("name", ["f64", "int16"])
def test_batches_of_any_strides(name):
    a, b = random((4, 3, 9, 7), name, 1), random((4, 3, 7, 5), name, 2)
    variants = [
        lambda x: x,
        lambda x: x[::-1],
        lambda x: x[:, ::-1],
        lambda x: x[::2],
        lambda x: x[:, ::2],
        lambda x: x.transpose(1, 0, 2, 3),
        lambda x: x[0],
        lambda x: x[:1],
        lambda x: x[:, :1],
        lambda x: np.broadcast_to(x[:1, :1], x.shape),
    ]
    for change in variants:
        assert agrees(gm.matmul(change(a), change(b)), change(a), change(b))
        result = np.zeros((*change(a).shape[:-1], 5), a.dtype)
        swapped = np.zeros_like(result.swapaxes(0, -1)).swapaxes(0, -1)
        gm.matmul(change(a), change(b), out=swapped)
        assert agrees(swapped, change(a), change(b))
    assert agrees(gm.matmul(a, b[:1, :1]), a, b[:1, :1])
    assert agrees(gm.matmul(a[:1, :1], b), a[:1, :1], b)
    assert agrees(gm.matmul(a[:, :1], b[:1]), a[:, :1], b[:1])


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(NAMES, 2)))
def test_mixed_types_promote_as_numpy_says(one, two):
    a, b = random((4, 3), one, 1), random((3, 5), two, 2)
    try:
        expected = np.result_type(a, b)
    except TypeError:
        with pytest.raises(gm.DTypeError, match="convert both to float32"):
            gm.matmul(a, b)
        return
    result = gm.matmul(a, b)
    assert result.dtype == expected
    assert agrees(result, a.astype(expected), b.astype(expected))


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        *itertools.product(["int8", "uint8"], ["int16", "int32", "int64", "float32", "float64"]),
        *itertools.product(["f16", "bf16"], ["float32", np.float64, "complex64"]),
        ("f32", np.dtype("f8")),
        ("complex64", complex),
        ("int16", "<i8"),
        ("bf16", ml_dtypes.bfloat16),
    ],
    ids=str,
)
def test_a_wider_result_neither_wraps_nor_rounds_in_between(name, wider):
    a, b = random((9, 300), name, 1), random((300, 5), name, 2)
    result = gm.matmul(a, b, dtype=wider)
    assert result.dtype == np.dtype(wider)
    if result.dtype == a.dtype:
        assert agrees(result, a, b)
    elif result.dtype.kind in "iu":
        assert np.array_equal(result, a.astype(wider) @ b.astype(wider))
    else:
        kept = a.astype(wider), b.astype(wider)
        narrow = verify.check(result, a, b) if a.dtype.kind in "fV" and result.dtype == np.float32 else None
        assert agrees(result, *kept) if narrow is None else narrow.ok


@pytest.mark.parametrize("name", NAMES)
def test_casting_rules_are_numpys(name):
    for other in NAMES:
        for rule in ("safe", "same_kind"):
            if {name, other} == {"f16", "bf16"}:
                assert promote.can_cast(name, other, rule) == (rule == "same_kind")
            elif other == "bf16" and name in (
                "complex64",
                "complex128",
            ):  # NumPy would drop the imaginary part without a word
                assert not promote.can_cast(name, other, rule)
            else:
                expected = np.can_cast(numpy_dtype(name), numpy_dtype(other), rule)
                assert promote.can_cast(name, other, rule) == expected, (name, other, rule)


def test_byte_swapped_operands_are_right():
    a, b = random((4, 3), "f64", 1), random((3, 5), "int32", 2)
    assert agrees(gm.matmul(a.astype(">f8"), b.astype(">i4")), a, b.astype("f8"))


@pytest.mark.parametrize("name", NAMES)
def test_gemm_is_that_of_blas(name):
    a, b, c = random((5, 7), name, 1), random((7, 4), name, 2), random((5, 4), name, 3)
    before = c.copy()
    result = gm.gemm(2, a, b, 3, c)
    assert result is not c
    assert np.array_equal(c, before)
    assert agrees(result, a, b, alpha=2, beta=3, c=c)
    assert gm.gemm(2, a, b, 3, c, out=c) is c
    assert agrees(c, a, b, alpha=2, beta=3, c=before)
    out = np.zeros((4, 5), c.dtype).T
    gm.gemm(1, a, b, 1, before, out=out)
    assert agrees(out, a, b, beta=1, c=before)
    assert agrees(gm.gemm(2, b.T, a.T), b.T, a.T, alpha=2)


@pytest.mark.parametrize("name", NAMES)
def test_gemv_is_that_of_blas(name):
    a, x, y = random((9, 14), name, 1)[:, ::2], random((7,), name, 2), random((18,), name, 3)[::2]
    before = y.copy()
    assert agrees(gm.gemv(a, x), a, x)
    assert agrees(gm.gemv(a.T, before), a.T, before)
    assert gm.gemv(a, x, y, alpha=2, beta=3, out=y) is y
    assert agrees(y, a, x, alpha=2, beta=3, c=before[:, None])


def test_scalars_of_any_type_of_number():
    for name in ("f32", "f64", "complex64", "int32"):
        a = random((3, 3), name, 1)
        for two in (2, 2.0, np.float32(2), np.int8(2), np.float64(2), 2 + 0j, ml_dtypes.bfloat16(2), np.array(2)):
            assert agrees(gm.gemm(two, a, a, two, a), a, a, alpha=2, beta=2, c=a)
    one = np.ones((1, 1), np.float32)
    with np.errstate(over="ignore"):
        for large in (1e300, -1e300, 3.4028235e38, 3.4028236e38, np.inf):
            assert gm.gemm(large, one, one)[0, 0] == np.float32(large)
    assert np.isnan(gm.gemm(np.nan, one, one)[0, 0])
    big = np.full((1, 1), 2**40, np.int64)
    assert gm.gemm(2**62 + 1, big, big)[0, 0] == 2**80 * (2**62 + 1) % 2**64
    assert gm.gemm(-(2**62) - 1, np.ones((1, 1), int), np.ones((1, 1), int))[0, 0] == -(2**62) - 1


def test_zero_scalars_do_not_read():
    a, b, nothing = np.ones((3, 3)), np.ones((3, 3)), np.full((3, 3), np.nan)
    assert np.all(gm.gemm(1, a, b, 0, nothing) == 3)
    assert np.all(gm.gemm(1, a, b, 0.0, nothing, out=nothing) == 3)
    assert np.all(gm.gemm(0, np.full((3, 3), np.nan), b, 2, a) == 2)
    assert np.all(gm.gemm(0, np.full((3, 3), np.inf), b) == 0)
    assert np.all(gm.gemv(a, np.ones(3), np.full(3, np.nan)) == 3)


def test_gemm_promotes_c_too():
    small, wide = random((4, 4), "int8", 1), random((4, 4), "int32", 2)
    result = gm.gemm(1, small, small, 1, wide)
    assert result.dtype == np.int32
    assert np.array_equal(result, small.astype("i4") @ small.astype("i4") + wide)
    half, single = random((4, 4), "f16", 1), random((4, 4), "f32", 2)
    assert gm.gemm(1, half, half, 1, single).dtype == np.float32
    assert gm.gemm(1, single, single, 1, half).dtype == np.float32
    assert gm.gemm(2, half, half, 1, np.ones((4, 4), complex)).dtype == np.complex128


@pytest.mark.many(5)
@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_the_epilogue(name, activation):
    a, b = random((3, 9, 7), name, 1), random((7, 5), name, 2)
    bias = random((90,), name, 3)
    tall, wide = random((70, 60), name, 4), random((60, 90), name, 5)
    out = np.zeros((90, 70), a.dtype).T
    gm.matmul(tall, wide, out, bias=bias, activation=activation)
    assert agrees(out, tall, wide, bias=bias, activation=activation or "")
    shared = random((7, 4, 5), name, 6).transpose(1, 0, 2)  # one matrix after the other along the columns
    out = np.zeros((9, 4, 5), a.dtype).transpose(1, 0, 2)
    gm.matmul(a[0], shared, out, bias=bias[:5], activation=activation)
    assert agrees(out, a[0], shared, bias=bias[:5], activation=activation or "")
    held = dtypes.get(name).accumulator
    for bias in (None, 0.5, random((5,), held, 3), random((10,), name, 3)[::2], random((1,), name, 4), [1, 2, 3, 4, 5]):
        row = None if bias is None else np.atleast_1d(np.asarray(bias)).astype(numpy_dtype(held))
        options = {"bias": row, "activation": activation or ""}
        assert agrees(gm.matmul(a, b, bias=bias, activation=activation), a, b, **options)
        out = np.zeros((9, 3, 5), a.dtype).transpose(1, 0, 2)
        assert agrees(gm.matmul(a, b, out, bias=bias, activation=activation), a, b, **options)
        out = np.zeros((5, 9, 3), a.dtype).transpose(2, 1, 0)
        assert agrees(gm.matmul(a, b, out, bias=bias, activation=activation), a, b, **options)


@pytest.mark.parametrize("name", ["int8", "int16", "uint32", "int64", "complex64"])
def test_a_bias_of_other_types(name):
    a, b, bias = random((9, 7), name, 1), random((7, 5), name, 2), random((5,), name, 3)
    assert agrees(gm.matmul(a, b, bias=bias), a, b, bias=bias)
    assert agrees(gm.matmul(a[0], b, bias=bias), a[0], b, bias=bias)


def test_a_vector_result_has_one_column_and_so_one_bias():
    a, x = np.ones((4, 3)), np.ones(3)
    assert np.array_equal(gm.matmul(a, x, bias=1), [4, 4, 4, 4])
    assert gm.matmul(x, x, bias=[2]) == 5
    with pytest.raises(gm.ShapeError, match=r"shape \(1,\)"):
        gm.matmul(a, x, bias=np.ones(4))


def test_threads_are_set_and_come_back():
    gm.set_num_threads(None)  # a number that was first asked for under another test's environment is kept
    default = gm.get_num_threads()
    assert default >= 1
    gm.set_num_threads(3)
    try:
        assert gm.get_num_threads() == 3
        a = random((130, 140), "f32", 1)
        assert agrees(gm.matmul(a, a.T), a, a.T)
    finally:
        gm.set_num_threads(None)
    assert gm.get_num_threads() == default


def test_the_result_does_not_depend_on_the_number_of_threads():
    for name in ("f32", "f64", "bf16"):
        a, b = random((301, 270), name, 1), random((270, 333), name, 2)
        assert gm.matmul(a, b, threads=1).tobytes() == gm.matmul(a, b, threads=2).tobytes()


def test_explain_names_the_rung_and_the_limit():
    x = np.ones((300, 200), np.float32)
    found = gm.explain(x, x.T, threads=1)
    assert (found.problem.m, found.problem.n, found.problem.k) == (300, 300, 200)
    assert found.flops == 2 * 300 * 300 * 200
    assert found.bound in ("compute", "memory")
    assert 0 < found.attainable_gflops <= found.peak_gflops
    text = str(found)
    assert found.rung in text
    assert found.reason in text
    assert "GFLOP/s" in text
    mixed = gm.explain(np.ones((4, 4), int), np.ones((4, 4)), threads=1)
    assert mixed.copies == ("a is converted from int64 to float64",)
    looped = gm.explain(np.ones((2, 3, 4, 5)).transpose(1, 0, 2, 3), np.ones((3, 2, 5, 4)), threads=1)
    assert looped.runs * looped.problem.batch == 6


def test_explain_says_which_kernel_runs_and_which_takes_over(monkeypatch):
    large, small = np.ones((60, 60)), np.ones((50, 4, 4))
    assert gm.explain(large, large, threads=1).kernel == "for every shape"
    tiers = gm.explain(small, small, threads=1)
    assert tiers.rung == "direct"
    assert tiers.kernel.startswith("for every shape; if this shape comes often, batched is compiled for it (")
    assert tiers.kernel in str(tiers)
    monkeypatch.setenv("GEMMERY_TIERS", "off")
    small = np.ones((51, 4, 4))
    off = gm.explain(small, small, threads=1)
    assert (off.rung, off.kernel) == ("batched", "compiled for this shape")


@pytest.mark.process
def test_without_docstrings_the_entry_has_none():
    shown = "import numpy as np, gemmery as gm; gm.matmul(np.eye(2), np.eye(2)); print(repr(gm.matmul.__doc__))"
    output = subprocess.run([sys.executable, "-OO", "-c", shown], check=True, capture_output=True, text=True).stdout
    assert output.strip() in ("''", "None")
