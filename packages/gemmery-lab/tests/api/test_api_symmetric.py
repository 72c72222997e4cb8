"""Products of a matrix with its own transpose on a device, on the emulator: half of C is computed, then mirrored."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import halved

pytest_plugins = ["card_fixtures"]

pytest.importorskip("cuda.bindings")


@pytest.fixture
def card(card, monkeypatch):
    """The card, on which nothing has run, and products of which halves are worth it from 64 rows on."""
    for name, number in (("LEAST", 64), ("DEEP", 32), ("SMALLEST", 24), ("UNIT", 8)):
        monkeypatch.setattr(halved, name, number)
    return card


def test_pieces_cover_what_is_below_the_diagonal_once():
    for n in (1, 255, 256, 1024, 4096, 5000, 8192, 16384, 16383, 20001):
        lower = sum(batch * rows * columns for batch, rows, columns, *_ in halved.pieces(n))
        assert n * (n + 1) // 2 <= lower <= n * n
        assert lower <= 0.63 * n * n or n < halved.LEAST
    for n in (2048, 4096, 5000):
        covered = np.zeros((n // 8, n // 8), np.int8)
        for batch, rows, columns, row, step in halved.pieces(n):
            for i in range(batch):
                top, left = (row + i * step) // 8, i * step // 8
                covered[top : top + rows // 8, left : left + columns // 8] += 1
        assert np.all(covered[np.tril_indices(n // 8)] >= 1)
        assert covered.max() == 1


@pytest.mark.many(3)
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64", "int8"])
@pytest.mark.parametrize("n", [64, 100])
def test_half_is_computed_and_mirrored(card, dtype, n):
    x = np.random.default_rng(1).integers(-3, 4, (n, 48)).astype(np.float64)
    a, c = card.put(x, dtype), card.empty((n, n), "int32" if dtype == "int8" else dtype)
    gm.matmul(a, a.T, c)
    assert np.array_equal(c.numbers, x @ x.T)
    assert card.launched.count("mirror") == 1
    assert len(card.launched) == (3 if n == 64 else 5)
    card.launched.clear()
    b = card.put(x, dtype)
    gm.matmul(a, b.T, c)  # the same kernel for other memory
    assert np.array_equal(c.numbers, x @ x.T)
    assert "mirror" not in card.launched


def test_beta_and_bias_take_the_whole_product(card):
    x = np.random.default_rng(2).integers(-3, 4, (64, 48)).astype(np.float64)
    a, bias = card.put(x, "f32"), card.put(np.arange(64.0), "f32")
    old = card.put(np.arange(4096.0).reshape(64, 64), "f32")
    c = card.empty((64, 64), "f32")
    gm.matmul(a, a.T, c, bias=bias)
    assert np.array_equal(c.numbers, x @ x.T + np.arange(64))
    gm.gemm(1.0, a, a.T, 1.0, old, out=old)
    assert np.array_equal(old.numbers, x @ x.T + np.arange(4096).reshape(64, 64))
    assert "mirror" not in card.launched


SIDED = [(name, None) for name in ("bf16", "f16", "f32", "f64")] + [
    *[("f32", precision) for precision in ("tf32", "f32_tensor", "f32_strict", "f32_plus")],
    ("f64", "f64_normwise"),
]


@pytest.mark.many(3)
@pytest.mark.parametrize(("dtype", "precision"), SIDED)
def test_every_precision_is_symmetric_to_the_last_bit(card, monkeypatch, dtype, precision):
    monkeypatch.setattr(halved, "LEAST", 4096)  # all of it, mirrored where a rung adds in an order of its own
    x = np.random.default_rng(3).standard_normal((40, 640))
    a, c = card.put(x, dtype), card.empty((40, 40), dtype)
    gm.matmul(a, a.T, c, precision=precision)
    assert np.array_equal(c.numbers, c.numbers.T)
    assert np.allclose(c.numbers.astype(float), x @ x.T, rtol=0.02, atol=1)
