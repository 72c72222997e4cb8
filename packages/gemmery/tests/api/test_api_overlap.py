"""Operands of a product that share memory with `out`, and element types that share memory with each other."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm


def shared(count, dtype, draw):
    """Whole numbers, and a function that makes n x n or 1-D views of them anywhere, of any order and sign."""
    memory = draw.integers(-4, 5, count).astype(dtype)

    def piece(*shape):
        size = int(np.prod(shape))
        start = draw.integers(0, count - size + 1)
        view = memory[start : start + size].reshape(shape)
        view = view[tuple(slice(None, None, draw.choice([1, -1])) for _ in shape)]
        return view.T if draw.integers(2) else view

    return memory, piece


def products(piece, n):
    """Each product with operands anywhere: the call, the same by NumPy, and out."""
    a, b, c, out, bias = piece(n, n), piece(n, n), piece(n, n), piece(n, n), piece(n)
    x, y, vector = piece(n), piece(n), piece(n)
    yield lambda: gm.matmul(a, b, bias=bias, out=out), lambda: a @ b + bias, out
    yield lambda: gm.matmul(a, b, out=out), lambda: a @ b, out
    yield lambda: gm.gemm(2, a, b, 3, c, out=out), lambda: 2 * (a @ b) + 3 * c, out
    yield lambda: gm.gemm(2, a, b, 3, out, out=out), lambda: 2 * (a @ b) + 3 * out, out
    yield lambda: gm.gemv(a, x, y, alpha=2, beta=3, out=vector), lambda: 2 * (a @ x) + 3 * y, vector


@pytest.mark.parametrize("dtype", ["f4", "i4"])
@pytest.mark.parametrize("n", [5, 160])
def test_any_operand_may_overlap_out(dtype, n):
    draw = np.random.default_rng(n)
    for _ in range(8):
        memory, piece = shared(2 * n * n + 3, dtype, draw)
        before = memory.copy()
        for call, by_numpy, target in products(piece, n):
            memory[:] = before
            expected = by_numpy()
            assert call() is target
            assert np.array_equal(target, expected)


@pytest.mark.parametrize("n", [3, 200])
def test_a_row_of_out_may_be_the_bias(n):
    a, b = np.random.default_rng(0).integers(-9, 9, (2, n, n)).astype("f4")
    for row, activation in itertools.product((0, n - 1), (None, "relu")):
        out = np.arange(n * n, dtype="f4").reshape(n, n)
        expected = a @ b + out[row]
        gm.matmul(a, b, bias=out[row], activation=activation, out=out)
        assert np.array_equal(out, expected if activation is None else np.maximum(expected, 0))


def test_memory_seen_as_another_type_may_overlap_out():
    memory = np.random.default_rng(0).integers(0, 9, 2 * 64).astype("f8")
    a, b = memory[:64].reshape(8, 8), memory[64:].reshape(8, 8)
    expected = (a @ b).astype("c16")
    out = memory.view("c16").reshape(8, 8)
    gm.matmul(a, b, out=out)
    assert np.array_equal(out, expected)


def test_bfloat16_and_uint16_products_are_not_confused():
    a, b, small = np.full((8, 8), 3, "u2"), np.full((8, 8), 5, "u2"), np.ones((8, 8), "i1")
    bf = np.full((8, 8), 3, ml_dtypes.bfloat16)
    for _ in range(3):
        assert (gm.matmul(a, b) == 120).all()
        assert (gm.matmul(bf, bf) == 72).all()
        for out in (np.empty((8, 8), "f4"), np.empty((8, 8), ml_dtypes.bfloat16)):
            assert (gm.matmul(small, small, dtype="bfloat16", out=out) == 8).all()
            assert (gm.matmul(small, bf, out=out) == 24).all()
        assert (gm.matmul(small, small, dtype="bfloat16") == 8).all()
