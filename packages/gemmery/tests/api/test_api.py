"""matmul, gemm and gemv as a user calls them: NumPy's semantics, and errors before anything is written to out."""

from __future__ import annotations

import itertools
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes, verify
from gemmery.api import explanation, promote
from gemmery.api.options import filling
from gemmery.arrays import view
from operands import numpy_dtype, random

NAMES = list(dtypes.NAMES)


def agrees(result, a, b, **options):
    """`result` is the product of a and b within the bound, whatever the number of dimensions of each."""
    a2 = a[None, :] if a.ndim == 1 else a
    b2 = b[:, None] if b.ndim == 1 else b
    result = np.asarray(result)
    if a.ndim == 1:
        result = np.expand_dims(result, -1 if b.ndim == 1 else -2)
    if b.ndim == 1:
        result = np.expand_dims(result, -1)
    found = verify.check(result, a2, b2, **options)
    assert found.error_over_bound <= 1, found
    return True


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


@pytest.mark.parametrize(
    ("one", "two", "word"),
    [
        ((3,), (4,), "3.*4"),
        ((2, 3), (4,), "only"),
        ((2, 3), (2, 3), r"transpose the first or the second\?$"),
        ((2, 3), (2, 5), r"transpose the first\?$"),
        ((3,), (5, 3), r"transpose the second\?$"),
        ((4,), (3, 5), "must be equal$"),  # where no transposition helps
        ((), (3,), "scalar"),
        ((3,), (), "scalar"),
        ((2, 5, 3), (4, 3, 2), "broadcast"),
    ],
)
def test_shapes_that_do_not_fit_are_value_errors(one, two, word):
    out = np.full((5, 5), 7.0)
    with pytest.raises(gm.ShapeError, match=f"(?s){word}") as caught:
        gm.matmul(np.ones(one), np.ones(two), out=out)
    assert isinstance(caught.value, ValueError)
    assert np.all(out == 7)


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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("f64", "float32"), ("f32", "float16"), ("int32", "int8"), ("int8", "uint8"), ("f32", "int64"),
     ("complex64", "float32"), ("f16", ml_dtypes.bfloat16),
     ("bf16", "float16"), ("int64", ml_dtypes.bfloat16)],
)  # fmt: skip
def test_a_narrower_dtype_is_a_type_error(name, dtype):
    a = random((3, 3), name, 1)
    with pytest.raises(gm.DTypeError, match=r"cannot represent every.*wider"):
        gm.matmul(a, a, dtype=dtype)


def test_a_dtype_that_is_none_is_a_type_error():
    for wrong in ("floaty", "object", bool, "S3"):
        with pytest.raises(gm.DTypeError):
            gm.matmul(np.eye(2), np.eye(2), dtype=wrong)


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


def test_out_of_another_type_takes_the_rounded_result():
    a, b = random((4, 3), "f64", 1), random((3, 5), "f64", 2)
    for dtype in ("float32", "float16", "complex64", ml_dtypes.bfloat16, ">f8", ">f4"):
        out = np.zeros((4, 5), dtype)
        if np.dtype(dtype).isnative:
            gm.matmul(a, b, out=out)
            assert np.array_equal(out, gm.matmul(a, b).astype(dtype))
        else:
            with pytest.raises(gm.LayoutError, match="foreign byte order"):
                gm.matmul(a, b, out=out)
    small = random((4, 3), "int8", 1)
    wide = gm.matmul(small, small.T, out=np.zeros((4, 4), "i4"))
    with np.errstate(over="ignore"):
        assert np.array_equal(wide, small @ small.T)  # wrapped in int8 first, as NumPy does


def test_byte_swapped_operands_are_right():
    a, b = random((4, 3), "f64", 1), random((3, 5), "int32", 2)
    assert agrees(gm.matmul(a.astype(">f8"), b.astype(">i4")), a, b.astype("f8"))


def bad_outs():
    read_only = np.zeros((3, 3))
    read_only.flags.writeable = False
    yield read_only, gm.LayoutError, "read-only"
    yield np.broadcast_to(np.zeros(3), (3, 3)), gm.LayoutError, "read-only"
    yield np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (0, 8)), gm.LayoutError, "share memory"
    yield np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (8, 8)), gm.LayoutError, "share memory"
    yield np.zeros((3, 4)), gm.ShapeError, "out has shape"
    yield np.zeros((3, 1, 3)), gm.ShapeError, "out has shape"
    yield np.zeros((3, 3), int), gm.DTypeError, "Cannot cast ufunc 'matmul' output from float64 to int64"
    yield np.zeros((3, 3), bool), gm.DTypeError, "bool"
    yield [[0.0] * 3] * 3, gm.LayoutError, "not an array"
    yield b"x" * 9, gm.ShapeError, "out has shape"


@pytest.mark.parametrize(("out", "error", "word"), list(bad_outs()), ids=lambda x: x if isinstance(x, str) else None)
def test_an_out_that_will_not_do_is_refused_and_not_written(out, error, word):
    before = np.array(out, copy=True) if isinstance(out, np.ndarray) else out
    with pytest.raises(error, match=word):
        gm.matmul(np.ones((3, 3)), np.ones((3, 3)), out=out)
    assert np.array_equal(out, before) if isinstance(out, np.ndarray) else out == before


def test_out_may_overlap_an_operand():
    for name, n in itertools.product(("f32", "int16", "bf16"), (6, 200)):
        base = random((n, n), name, 1)
        square = random((n, n), name, 2)
        x = base.copy()
        assert gm.matmul(x, square, out=x) is x
        assert agrees(x, base, square)
        x = base.copy()
        gm.matmul(square, x, out=x)
        assert agrees(x, square, base)
        x = base.copy()
        gm.matmul(x, x, out=x)
        assert agrees(x, base, base)
        x = base.copy()
        gm.matmul(x, square, out=x.T)
        assert agrees(x.T, base, square)
        x = random((n + 1, n), name, 3)
        first = x[:n].copy()
        gm.matmul(x[:n], square, out=x[1:])
        assert agrees(x[1:], first, square)
        x = base.copy()
        gm.gemm(2, x, square, 3, x, out=x)
        assert agrees(x, base, square, alpha=2, beta=3, c=base)
        x = random((n + 1, n), name, 3)
        old = x[1:].copy()
        gm.gemm(1, base, square, 1, x[1:], out=x[:n])
        assert agrees(x[:n], base, square, beta=1, c=old)


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


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda i, x: gm.gemm(0.5, i, i), gm.ArgumentError, "alpha must be an integer|beta must be an integer"),
        (
            lambda i, x: gm.gemm(1, i, i, np.nan, i),
            gm.ArgumentError,
            "alpha must be an integer|beta must be an integer",
        ),
        (
            lambda i, x: gm.gemm(1, i, i, np.inf, i),
            gm.ArgumentError,
            "alpha must be an integer|beta must be an integer",
        ),
        (lambda i, x: gm.gemm("2", i, i), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(1j, i, i), gm.ArgumentError, "alpha must be an integer|beta must be an integer"),
        (lambda i, x: gm.gemm(1j, x, x), gm.ArgumentError, "complex"),
        (lambda i, x: gm.gemm("two", x, x), gm.ArgumentError, r"alpha must be a number \(got 'two'\)"),
        (lambda i, x: gm.gemm(1, x, x, 1), gm.ArgumentError, "needs c"),
        (lambda i, x: gm.gemv(x, x[0], beta=1), gm.ArgumentError, "needs y.*pass y"),
        (lambda i, x: gm.gemm(1, x, x, 1, x[:2]), gm.ShapeError, "must be equal"),
        (lambda i, x: gm.gemm(1, x, x[0]), gm.ShapeError, "gemv"),
        (lambda i, x: gm.gemv(x, x), gm.ShapeError, "matmul"),
        (lambda i, x: gm.gemv(x, x[0], x[0, :2], beta=1), gm.ShapeError, "must be equal"),
        (lambda i, x: gm.gemm(1, i, i, 1, x, out=i), gm.DTypeError, "Cannot cast"),
        (lambda i, x: gm.matmul(x, x, threads=0), gm.ArgumentError, "threads=0"),
        (lambda i, x: gm.matmul(x, x, threads=1.5), gm.ArgumentError, "threads=1.5"),
        (lambda i, x: gm.matmul(x, x, threads=True), gm.ArgumentError, "threads=True"),
        (lambda i, x: gm.gemm(1, x, x, threads=-1), gm.ArgumentError, "threads=-1"),
        (lambda i, x: gm.set_num_threads(0), gm.ArgumentError, "threads=0"),
        (lambda i, x: gm.matmul(x, x, activation="tanh"), gm.ArgumentError, "relu, gelu, silu"),
        (lambda i, x: gm.matmul(x, x, activation=np.array(["relu"])), gm.ArgumentError, "relu, gelu, silu"),
        (lambda i, x: gm.matmul(i, i, activation="relu"), gm.DTypeError, "floating"),
        (lambda i, x: gm.matmul(x, x, bias=np.zeros(2)), gm.ShapeError, r"shape \(3,\)"),
        (lambda i, x: gm.matmul(x, x, bias=np.zeros((3, 3))), gm.ShapeError, r"shape \(3,\)"),
        (lambda i, x: gm.matmul(i, i, bias=np.zeros(3)), gm.DTypeError, "bias is float64"),
        (lambda i, x: gm.matmul(x, x, bias="x"), gm.DTypeError, "bias is a str; pass an array"),
        (lambda i, x: gm.gemm("nan", x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm("1_0", x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(b"2", x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(np.array([2.0]), x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(None, x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(10**400, x, x), gm.ArgumentError, r"below 2\*\*1024.*got 1000"),
        (lambda i, x: gm.gemm(1, x, x, -(10**5000), x), gm.ArgumentError, r"beta must be.*below 2\*\*1024"),
        (lambda i, x: gm.gemm(1.5, i, i), gm.ArgumentError, r"integer for int64 operands \(got 1.5\)"),
        (lambda i, x: gm.matmul(x.astype(object), x), gm.DTypeError, "object"),
        (lambda i, x: gm.matmul(x, "ab"), gm.DTypeError, "str"),
        (lambda i, x: gm.explain(x[:0], x), gm.ShapeError, "nothing to multiply"),
        (lambda i, x: gm.explain(x, x, threads=0), gm.ArgumentError, "threads=0"),
        (lambda i, x: gm.explain(x, x, activation="tanh"), gm.ArgumentError, "relu, gelu, silu"),
    ],
)
def test_wrong_arguments_are_named(call, error, word):
    whole, x = np.ones((3, 3), int), np.ones((3, 3))
    with pytest.raises(error, match=word) as caught:
        call(whole, x)
    assert isinstance(caught.value, gm.GemmeryError)
    assert np.all(whole == 1)


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: gm.matmul(a, "b"), "^b is a str; pass an array"),
        (lambda a: gm.matmul(a, a, out="c"), "^out is a str; pass an array"),
        (lambda a: gm.gemm(1.0, "a", a), "^a is a str"),
        (lambda a: gm.matmul(a, a, out=np.zeros((4, 4))), r"out has shape \(4, 4\), and the product \(3, 3\)"),
        (lambda a: gm.matmul(a, a, out=(a, a)), "out is a tuple of 2: pass one array"),
        (lambda a: gm.matmul(a, a, order="F"), "matmul has no order='F': pass an out of that order"),
        (lambda a: gm.matmul(a, a, axes=[(0, 1)] * 3), "matmul has no axes=.*np.moveaxis"),
        (lambda a: gm.matmul(a, a, transposed=True), "unexpected keyword argument 'transposed'"),
        (lambda a: gm.gemm(a, a), r"takes alpha before a and b: call gm.gemm\(1.0, a, b\)"),
        (lambda a: gm.warm(["f32", None]), "a dtype is None: name a type"),
        (lambda a: gm.dot, "use gm.matmul"),
        (lambda a: gm.bmm, "use gm.matmul"),
        (lambda a: gm.multi_dot, "use gm.einsum"),
    ],
)
def test_a_mistake_of_a_newcomer_is_told_the_way_out(call, words):
    for _ in range(2):  # the second time from the compiled entry
        with pytest.raises((gm.GemmeryError, TypeError, AttributeError), match=words):
            call(np.ones((3, 3)))
        gm.matmul(np.ones((3, 3)), np.ones((3, 3)))


def test_out_in_a_tuple_and_options_with_their_defaults():
    a = np.arange(9.0).reshape(3, 3)
    out = np.zeros((3, 3))
    for _ in range(2):
        assert gm.matmul(a, a, out=(out,), order="K", casting="same_kind") is out
        assert np.array_equal(out, a @ a)
        assert gm.gemm(2.0, a, a, out=(out,)) is out


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((3, 4), (4, 5), (2, 3, 5)),
        ((4,), (4, 5), (2, 5)),
        ((3, 4), (4,), (2, 3)),
        ((4,), (4,), (2, 3)),
        ((1, 3, 4), (1, 4, 5), (6, 3, 5)),
        ((2, 1, 3, 4), (1, 6, 4, 5), (7, 2, 6, 3, 5)),
    ],
)
def test_an_out_with_more_batches_is_filled(a, b, out):
    x, y, target, expected = random(a, "f64", 1), random(b, "f64", 2), np.zeros(out), np.zeros(out)
    np.matmul(x, y, out=expected)
    for _ in range(3):
        target[...] = 0
        assert gm.matmul(x, y, out=target) is target
        assert np.allclose(target, expected, rtol=1e-13)


def test_jax_tracing_is_told_of_gemmery_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    jax.config.update("jax_cuda_visible_devices", "0")
    with pytest.raises(gm.LayoutError, match=r"^a is a DynamicJaxprTracer: JAX is tracing.*gemmery\.jax\.matmul"):
        jax.jit(gm.matmul)(np.ones((2, 2)), np.ones((2, 2)))


@pytest.mark.process
def test_without_docstrings_the_entry_has_none():
    shown = "import numpy as np, gemmery as gm; gm.matmul(np.eye(2), np.eye(2)); print(repr(gm.matmul.__doc__))"
    output = subprocess.run([sys.executable, "-OO", "-c", shown], check=True, capture_output=True, text=True).stdout
    assert output.strip() in ("''", "None")


def test_an_operand_that_is_copied_lives_while_it_fills_an_out_with_more_batches():
    a, b = np.ones((16, 62), np.float16), np.ones((62, 55)).tolist()
    np.testing.assert_array_equal(gm.matmul(a, b, np.zeros((2, 16, 55))), np.full((2, 16, 55), 62.0))
    copied = view(b)
    memory = weakref.ref(copied.owner)
    _, wide = filling(view(a), copied, (2, 16, 55))
    del copied
    assert memory() is not None
    assert wide.shape == (2, 62, 55)


def test_an_operand_that_is_resized_before_it_fills_an_out():
    b = np.ones((62, 55))

    class Resizes:
        def __index__(self):
            b.resize((1, 1), refcheck=False)
            return 1

    with pytest.raises(gm.LayoutError, match="b was resized"):
        gm.matmul(np.ones((16, 62)), b, np.zeros((2, 16, 55)), threads=Resizes())
