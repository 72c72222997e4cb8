"""Sums and products rounded once, against Python's fractions."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from gemmery_emulator import exact
from rounding import FORMATS, decoded, encoded

FORMS = {np.float32: FORMATS["f32"], np.float64: FORMATS["f64"]}
MODES = ("rn", "rz", "rm", "rp")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def nearby(value, kind, mode):
    """A fraction in the format of a NumPy type, as a Python float."""
    return float(decoded(encoded(value or 0.0, FORMS[kind], mode), FORMS[kind]))


def operands(kind, count=1200):
    """Random bits, cancellation to the last bit, and sums close to the middle between two numbers."""
    rng = np.random.default_rng(3)
    bits = 8 * np.dtype(kind).itemsize
    x, y, z = rng.integers(0, 2**bits - 1, (3, 3 * count), np.uint64, endpoint=True).astype(f"u{bits // 8}").view(kind)
    cancel, tie = slice(count), slice(count, 2 * count)
    z[cancel] = -(x[cancel] * y[cancel])
    half = FORMS[kind].precision // 2 + 1
    x[tie], y[tie] = rng.integers(2 ** (half - 1), 2**half, (2, count))
    z[tie] = rng.integers(-1, 2, count) * np.exp2(rng.integers(-120, 20, count))
    scale = np.exp2(rng.integers(*(-100, 30) if kind == np.float32 else (-600, 400), count)).astype(kind)
    x[tie] *= scale
    z[tie] *= scale
    finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
    return x[finite], y[finite], z[finite]


def assert_rounded(got, exact_values, kind, mode):
    assert got.dtype == kind
    expected = [nearby(v, kind, mode) for v in exact_values]
    wrong = [(i, float(g), e) for i, (g, e) in enumerate(zip(got, expected, strict=True)) if float(g) != e]
    assert wrong == []


@pytest.mark.many(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", FORMS)
def test_fma(kind, mode):
    x, y, z = operands(kind)
    fused = exact.fma if mode == "rn" else partial(exact.directed_fma, mode)
    values = [Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)]
    assert_rounded(fused(x, y, z), values, kind, mode)
    for i in range(0, len(x), 97):
        one = fused(x[i], y[i], z[i])
        assert isinstance(one, kind)
        assert float(one) == nearby(values[i], kind, mode)


@pytest.mark.many(5)
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "sqrt"])
def test_directed(kind, mode, name):
    x, y, _ = operands(kind, 500)
    a, b = ([Fraction(float(v)) for v in values] for values in (x, y))
    if name == "sqrt":
        got = exact.directed_sqrt(mode, np.abs(x))
        steps = np.nextafter(got, kind(np.inf)), np.nextafter(got, kind(0))
        exactly = ([Fraction(float(v)) for v in values] for values in (got, *steps))
        for root, above, below, square in zip(*exactly, map(abs, a), strict=True):
            assert root**2 >= square > below**2 or not square if mode == "rp" else root**2 <= square < above**2
        return
    if name == "div":
        x, a, b, y = (values[: len(x)] for values in (x, a, b, y))
        keep = y != 0
        x, y = x[keep], y[keep]
        values = [p / q for p, q in zip(a, b, strict=True) if q]
    else:
        meaning = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__}[name]
        values = [meaning(p, q) for p, q in zip(a, b, strict=True)]
    assert_rounded(getattr(exact, f"directed_{name}")(mode, x, y), values, kind, mode)


@pytest.mark.parametrize("kind", FORMS)
def test_zeros_infinities_and_nans(kind):
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, float(np.finfo(kind).max), -float(np.finfo(kind).max)]
    for x in special:
        for y in special:
            for z in special:
                got = exact.fma(kind(x), kind(y), kind(z))
                if np.isfinite([x, y]).all() and np.isinf(z):
                    assert got == z  # however large the product
                elif np.isfinite([x, y, z]).all() and abs(x * y) > 1:
                    # A product of huge numbers in fractions.
                    value = Fraction(x) * Fraction(y) + Fraction(z)
                    assert float(got) == nearby(value, kind, "rn")
                else:
                    np.testing.assert_equal(got, kind(x) * kind(y) + kind(z))
    one = kind(1)
    for mode, zero in (("rm", -0.0), ("rz", 0.0), ("rp", 0.0)):
        assert np.signbit(exact.directed_fma(mode, one, one, -one)) == np.signbit(zero)
        assert np.signbit(exact.directed_mul(mode, kind(-0.0), one))
        assert not np.signbit(exact.directed_mul(mode, kind(0.0), one))
        assert np.signbit(exact.directed_sub(mode, one, one)) == np.signbit(zero)


def test_rounding_to_odd_keeps_what_was_lost():
    """1 + 2**-24 + 2**-60 is above the middle of two float32; through float64 alone it would be taken for it."""
    x = np.float64(1 + 2**-24)
    assert np.float32(x + 2.0**-60) == 1
    assert np.float32(exact.odd_sum(x, np.float64(2.0**-60))) == np.float32(1 + 2**-23)
    assert np.float32(exact.odd_sum(x, np.float64(-(2.0**-60)))) == 1
    assert exact.odd_sum(np.float64(1), np.float64(2)) == 3
    assert exact.odd_float32(np.float64(1 + 2**-30)) == np.float32(1 + 2**-23)
    assert exact.odd_float32(np.float64(1e300)) == np.finfo(np.float32).max
    assert exact.odd_float32(np.float64(np.inf)) == np.inf
