"""Products of bools: NumPy's, the "or" of "and"s."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery.api import explanation
from gemmery.errors import DTypeError


def bools(*shape, share=0.3, seed=0):
    return np.random.default_rng([seed, *shape]).random(shape) < share


def same(result, expected):
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert type(result) is type(expected)
    return np.array_equal(result, expected)


SHAPES = [
    ((4, 5), (5, 6)),
    ((1, 1), (1, 1)),
    ((5,), (5,)),
    ((5,), (5, 6)),
    ((4, 5), (5,)),
    ((0, 5), (5, 6)),
    ((4, 0), (0, 6)),
    ((0,), (0,)),
    ((3, 4, 5), (5, 6)),
    ((2, 1, 4, 5), (3, 5, 6)),
    ((40, 70), (70, 33)),
    ((200, 300), (300, 100)),
]


@pytest.mark.parametrize(("one", "two"), SHAPES, ids=str)
def test_matmul_of_bools_is_numpys(one, two):
    for share in (0.05, 0.5, 1.0):
        a, b = bools(*one, share=share, seed=1), bools(*two, share=share, seed=2)
        assert same(gm.matmul(a, b), a @ b)


def test_views_of_bools():
    a, b = bools(20, 30), bools(30, 18)
    for x, y in [(a.T, b.T), (a[::-1, ::-2], b[::2]), (a[:, ::-1], b[:, ::3]), (np.broadcast_to(a[:1], (9, 30)), b)]:
        k = min(x.shape[1], y.shape[0])
        assert same(gm.matmul(x[:, :k], y[:k]), x[:, :k] @ y[:k])


@pytest.mark.parametrize("k", [255, 256, 512, 65535, 65536, 2**17])
def test_a_sum_never_wraps_to_false(k):
    ones = np.ones((2, k), bool)
    assert gm.matmul(ones, ones.T).all()
    assert gm.matmul(ones[0], ones[0])


def test_a_sum_beyond_32_bits_does_not_wrap(monkeypatch):
    from gemmery.api import compute

    monkeypatch.setattr(compute, "_COUNTED", 256)  # the other way, for sums that 32 bits cannot count
    ones = np.ones((2, 1024), bool)
    assert gm.matmul(ones, ones.T).all()
    assert same(gm.matmul(bools(9, 300), bools(300, 7)), bools(9, 300) @ bools(300, 7))


def test_any_byte_but_zero_is_true():
    raw = np.array([[2, 0], [0, 128]], np.uint8).view(bool)
    assert same(gm.matmul(raw, raw), np.eye(2, dtype=bool))
    assert np.array_equal(gm.matmul(raw, raw, dtype="int32"), np.eye(2))
    assert np.array_equal(gm.matmul(raw, np.eye(2)), np.eye(2))


def test_out_of_bools():
    a, b = bools(6, 7), bools(7, 5)
    expected = a @ b
    for out in (
        np.ones((6, 5), bool),
        np.ones((5, 6), bool).T,
        np.ones((6, 5), np.float32),
        np.ones((12, 5), int)[::2],
    ):
        assert gm.matmul(a, b, out=out) is out
        assert np.array_equal(out, expected)
    square = bools(6, 6, share=0.2)
    expected = square @ square
    assert gm.matmul(square, square, out=square) is square
    assert np.array_equal(square, expected)
    with pytest.raises(DTypeError, match="Cannot cast"):
        gm.matmul(np.ones((2, 2)), np.ones((2, 2)), out=np.ones((2, 2), bool))


@pytest.mark.parametrize("other", ["i1", "u1", "i4", "u8", "f2", "f4", "f8", "c8"])
def test_bools_with_other_types_are_numbers(other):
    a, b = bools(6, 9, share=0.5), np.random.default_rng(0).integers(0, 9, (9, 4)).astype(other)
    assert same(gm.matmul(a, b), a @ b)
    assert same(gm.matmul(b.T, a.T), b.T @ a.T)
    assert gm.matmul(a, b.astype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


def test_a_wider_result_counts():
    a, b = bools(6, 700, share=0.9), bools(700, 4, share=0.9)
    for wider in map(np.dtype, ("u2", "i4", "i8", "f4", "c16")):
        result = gm.matmul(a, b, dtype=wider)
        assert result.dtype == np.dtype(wider)
        assert np.array_equal(result, a.astype(int) @ b.astype(int))
    assert same(gm.matmul(a, b, dtype="bool"), a @ b)
    with pytest.raises(DTypeError, match="cannot represent every int64 value"):
        gm.matmul(np.ones((2, 2), int), np.ones((2, 2), int), dtype=bool)


def test_products_that_only_numbers_have_are_refused():
    a = bools(3, 3)
    for call, words in [
        (lambda: gm.gemm(1.0, a, a), "use gm.matmul"),
        (lambda: gm.gemm(1, a, a, 1, a), "use gm.matmul"),
        (lambda: gm.gemv(a, a[0]), "use gm.matmul"),
        (lambda: gm.matmul(a, a, bias=True), "dtype='int32' to count"),
        (lambda: gm.matmul(a, a, activation="relu"), "floating"),
    ]:
        with pytest.raises(DTypeError, match=words):
            call()
    x = np.arange(9.0).reshape(3, 3)
    assert np.array_equal(gm.gemm(2.0, a, x, 1.0, a), 2 * (a @ x) + a)
    assert np.array_equal(gm.matmul(x, x, bias=a[0]), x @ x + a[0])


def test_bools_of_pytorch():
    torch = pytest.importorskip("torch")
    a, b = bools(5, 6), bools(6, 7)
    result = gm.matmul(torch.tensor(a), torch.tensor(b))
    assert result.dtype == torch.bool
    assert np.array_equal(result.numpy(), a @ b)
    assert gm.matmul(torch.tensor(a), torch.ones(6, 2)).dtype == torch.float32


def test_explain_says_how_bools_are_multiplied(monkeypatch):
    monkeypatch.setattr(explanation, "_limits", lambda dtype, threads: (100.0, 10.0, 0.0))
    text = str(gm.explain(bools(8, 8), bools(8, 8)))
    assert "a is converted from bool to uint8" in text
    assert "the result is bool" in text
    for m, n in itertools.product((1, 3), repeat=2):
        assert gm.explain(bools(m, 8), bools(8, n)).problem.out == "uint32"
