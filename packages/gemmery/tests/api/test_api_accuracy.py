"""The error bound that gm.matmul and gm.gemm promise, for numbers chosen to break it."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import dtypes, verify
from operands import numpy_dtype

ETA = {"f32": 2.0**-149, "f64": 2.0**-1074}  # smallest subnormal number
LEAST = {"f64": -1074, "f32": -149, "f16": -24, "bf16": -133}  # its exponent
NORMAL = {"f64": -1022, "f32": -126, "f16": -14, "bf16": -126}  # exponent of the smallest normal number
LARGEST = {"f64": 500, "f32": 60, "f16": 7, "bf16": 60}  # exponents below it do not overflow here


def exact(x):
    """`x` in a type with a wider range and precision."""
    return x.astype(np.longdouble if x.dtype == np.float64 else np.float64)


def promised(a, b, result, expected, alpha=1.0, beta=0.0, c=None):
    """The bound in the words of docs/promises.md, element by element."""
    name, k = dtypes.get(a.dtype.name).name, a.shape[1]
    row = dtypes.get(name)
    kept = "f64" if name == "f64" else "f32"
    unit = dtypes.get(kept).unit_roundoff
    size_a, size_b = abs(exact(a)), abs(exact(b))
    bound = k * unit * (size_a @ size_b) + 2 * k * ETA[kept]
    if name == "bf16":
        bound += 2.0**-126 * (size_a.sum(1)[:, None] + size_b.sum(0) + k)
    bound = abs(alpha) * bound
    if alpha != 1 or beta != 0:
        after = abs(alpha) * (size_a @ size_b) + (0 if c is None else abs(beta) * abs(exact(c)))
        bound = bound + 3 * unit * after
    return bound + row.unit_roundoff * abs(expected) + 2.0 ** LEAST[name]


def numbers(draw, shape, name, low, high):
    """Random signs and fractions, with exponents between two; many of them the same, so that sums cancel."""
    exponents = draw.integers(low, high + 1, shape)
    fractions = draw.choice([1.0, 1.5, 1 + 2.0**-7, 2 - 2.0**-8, draw.random() + 1], shape)
    return np.ldexp(fractions * draw.choice([-1, 1], shape), exponents).astype(numpy_dtype(name))


def ranges(draw, name):
    """Exponents of A and of B: such that products are subnormal, near the smallest normal number, or anything."""
    least, normal, largest = LEAST[name], NORMAL[name], LARGEST[name]
    target = draw.integers(least - 3, normal + 6)
    of_a = draw.integers(max(least, target - largest), largest)
    spread = draw.integers(0, 8)
    cases = [
        ((of_a, of_a + spread), (target - of_a, target - of_a + spread)),  # results near the end of the range
        ((least, normal + 1), (0, 3)),  # subnormal operands
        ((least, normal + 1), (-largest, largest)),
        ((-largest // 2, largest // 2), (-largest // 2, largest // 2)),
        ((0, 0), (0, 0)),  # sums that cancel
    ]
    return cases[draw.integers(len(cases))]


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
def test_no_product_breaks_the_promised_bound(name):
    if name == "f64" and not verify.EXTENDED:
        pytest.skip("no type here is wider than float64")
    draw = np.random.default_rng(8)
    worst = 0.0
    for _ in range(300):
        m, n, k = (int(draw.choice(sides)) for sides in ((1, 3, 33), (1, 5, 40), (1, 2, 7, 64, 300)))
        of_a, of_b = ranges(draw, name)
        a, b, c = (numbers(draw, shape, name, *of) for shape, of in (((m, k), of_a), ((k, n), of_b), ((m, n), of_b)))
        alpha, beta = float(draw.choice([1.0, 2.0**-20, -1.7, 2.0**12])), float(draw.choice([0.0, 0.3, -1.0]))
        with np.errstate(all="ignore"):
            for scaled in (False, True):
                result = gm.gemm(alpha, a, b, beta, c) if scaled else gm.matmul(a, b)
                options = {"alpha": alpha, "beta": beta, "c": c} if scaled else {}
                expected = exact(a) @ exact(b)
                if scaled:
                    expected = alpha * expected + beta * exact(c)
                finite = abs(expected) < 0.9 * float(ml_dtypes.finfo(result.dtype).max)
                error = abs(exact(result) - expected)[finite]
                bound = promised(a, b, result, expected, **options)[finite]
                assert (error <= bound).all(), (m, n, k, of_a, of_b, scaled)
                worst = max(worst, float(np.max(error / bound, initial=0)))
    assert 0.2 < worst <= 1  # the numbers come near the bound


def test_the_check_of_the_library_allows_no_more_than_is_promised():
    draw = np.random.default_rng(1)
    for name in ("f32", "f16", "bf16"):
        for of in ((-3, 3), (LEAST[name], NORMAL[name])):
            a, b = numbers(draw, (9, 30), name, *of), numbers(draw, (30, 8), name, 0, 2)
            expected = exact(a) @ exact(b)
            allowed = verify.bound(a, b, out=name) + dtypes.get(name).unit_roundoff * abs(expected) + 2.0 ** LEAST[name]
            assert np.allclose(allowed, promised(a, b, None, expected), rtol=1e-12)


def test_the_document_names_both_terms_of_small_numbers():
    text = (Path(__file__).parents[4] / "docs" / "promises.md").read_text()
    assert "2 k η" in text
    assert "2⁻¹²⁶ (r + c + k)" in text
    assert "docs/promises.md" in gm.matmul.__doc__
