"""The compiled fused multiply-add against the emulator's, bit by bit."""

import numpy as np
import pytest

from gemmery.cpu import fused, target
from gemmery_emulator import exact

TYPES = {np.float32: np.uint32, np.float64: np.uint64}

needs_fma = pytest.mark.skipif(not target.host().has_fma, reason="this CPU has no fused multiply-add")


def any_bits(rng, kind, n):
    return rng.integers(0, 2 ** np.iinfo(TYPES[kind]).bits, n, np.uint64, endpoint=False).astype(TYPES[kind]).view(kind)


def assert_same(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    bits = TYPES[got.dtype.type]
    assert np.array_equal(got[~nan].view(bits), expected[~nan].view(bits))


@needs_fma
@pytest.mark.parametrize("kind", TYPES)
def test_equals_the_exact_one(kind):
    rng = np.random.default_rng(1)
    x, y, z = (any_bits(rng, kind, 30_000) for _ in range(3))
    with np.errstate(all="ignore"):
        z[:10_000] = -(x[:10_000] * y[:10_000])  # all that is left is the product's rounding error
        x[::100], y[3::100], z[5::100] = np.inf, 0, -np.inf
        assert_same(fused.fma()(x, y, z), exact.fma(x, y, z))


@needs_fma
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n", [1, 3, 31, 32, 33, 130])
def test_strides_scalars_and_tails(kind, n):
    rng = np.random.default_rng(n)
    x, y, z = (rng.standard_normal(2 * n).astype(kind) for _ in range(3))
    s, t = kind(1.7), kind(-0.3)
    a, b, c = x[:n], y[:n], z[:n]
    cases = [
        (a, b, c),
        (s, b, c),
        (a, s, c),
        (a, b, s),
        (a, s, t),
        (x[::2], b, c),
        (a[::-1], s, z[1::2]),
        (a, b, y[::2]),
    ]
    for operands in cases:
        assert_same(fused.fma()(*operands), exact.fma(*operands))


@needs_fma
@pytest.mark.parametrize("kind", TYPES)
def test_output_may_be_an_input_or_overlap_one(kind):
    rng = np.random.default_rng(5)
    x, y, z = (rng.standard_normal(101).astype(kind) for _ in range(3))
    expected = exact.fma(x, y, z)
    out = z.copy()
    fused.fma()(x, y, out, out=out)
    assert_same(out, expected)
    shifted = np.concatenate([x, x[:1]])
    fused.fma()(shifted[:-1], y, z, out=shifted[1:])
    assert_same(shifted[1:], expected)
    wide = np.zeros(202, kind)
    fused.fma()(x, y, z, out=wide[::2])
    assert_same(wide[::2], expected)
    assert not wide[1::2].any()


@needs_fma
def test_scalars_stay_scalars():
    assert isinstance(fused.fma()(np.float32(2), np.float32(3), np.float32(4)), np.float32)
    assert fused.fma() is fused.fma()


def test_none_without_the_instruction(monkeypatch):
    monkeypatch.setattr(target, "host", lambda: target.Target("generic", frozenset()))
    assert fused.fma.__wrapped__() is None


@needs_fma
def test_chains_are_the_emulators():
    """Every bit of a chain of four, for numbers of all sizes, infinities and NaN among them."""
    draw = np.random.default_rng(5)
    given = [draw.standard_normal((37, 32)) * 10.0 ** draw.integers(-200, 200, (37, 32)) for _ in range(4)]
    for one in given:
        one.ravel()[draw.choice(one.size, 20, replace=False)] = np.resize([np.inf, -np.inf, np.nan, 0.0, -0.0], 20)
    with np.errstate(all="ignore"):
        for found, expected in zip(fused.chain()(*given), exact.chain(*given), strict=True):
            assert_same(found, expected)
