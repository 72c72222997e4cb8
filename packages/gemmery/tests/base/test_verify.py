"""The reference, the bound and the check: they are right on known cases, and the check can fail."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from gemmery import verify
from gemmery.errors import ArgumentError, CheckError

FLOATS = ["float32", "float64", "float16", ml_dtypes.bfloat16, "complex64", "complex128"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def some(shape, dtype, seed=0):
    draw = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return draw.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    value = draw.standard_normal(shape)
    return (value + 1j * draw.standard_normal(shape) if dtype.kind == "c" else value).astype(dtype)


def rounded_once(a, b):
    """The exact product of float matrices, by fractions, rounded to float64."""
    rows = [[Fraction(float(x)) for x in row] for row in a]
    columns = [[Fraction(float(x)) for x in column] for column in b.T]
    return np.array([[float(sum(x * y for x, y in zip(r, c, strict=True))) for c in columns] for r in rows])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_correctly_rounded_product_passes_and_one_wrong_element_fails(dtype):
    a, b = some((7, 9), dtype), some((9, 5), dtype, 1)
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    result = (a.astype(wide) @ b.astype(wide)).astype(dtype)
    assert verify.check(result, a, b).ok
    wrong = result.copy()
    wrong[3, 2] += np.asarray(np.abs(wrong[3, 2]) * 2.0**-6).astype(dtype)
    found = verify.check(wrong, a, b)
    assert not found.ok
    assert found.worst == (3, 2)
    with pytest.raises(CheckError, match=r"element \(3, 2\)"):
        verify.require(wrong, a, b)


def test_the_float64_reference_knows_more_than_float64():
    a = np.array([[1e16, 1.0, -1e16]])
    b = np.array([[1.0], [1.0], [1.0]])
    assert float(verify.reference(a, b, out="f64")[0, 0]) == 1.0


def test_without_extended_precision_the_compensated_product_serves(monkeypatch):
    monkeypatch.setattr(verify, "EXTENDED", False)
    a, b = some((5, 40), "float64"), some((40, 6), "float64", 1)
    exact = rounded_once(a, b)
    got = verify.reference(a, b, out="f64")
    assert np.all(np.abs(got - exact) <= 2.0**-53 * np.abs(exact))
    x, y = some((3, 4), "complex128"), some((4, 3), "complex128", 1)
    assert verify.check(x @ y, x, y).ok


def test_the_compensated_product_keeps_infinities_and_nans():
    a = np.array([[np.inf, 1.0], [np.nan, 1.0], [1.0, 2.0]])
    got = verify._compensated_product(a, np.ones((2, 1)))
    assert got[0, 0] == np.inf
    assert np.isnan(got[1, 0])
    assert got[2, 0] == 3.0


@pytest.mark.parametrize("out", INTEGERS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_integer_reference_is_python_arithmetic_wrapped(dtype, out):
    a, b, c = some((3, 6), dtype), some((6, 4), dtype, 1), some((3, 4), out, 2)
    exact = -3 * (a.astype(object) @ b.astype(object)) + 5 * c.astype(object)
    info = np.iinfo(out)
    span = 2**info.bits
    wrapped = np.vectorize(lambda v: (v - info.min) % span + info.min, otypes=[object])(exact).astype(out)
    assert np.array_equal(verify.reference(a, b, out=out, alpha=-3, beta=5, c=c), wrapped)


def test_the_rectified_integers():
    a, b = some((4, 4), "int32"), some((4, 4), "int32", 1)
    assert verify.check(np.maximum(a @ b, 0), a, b, activation="relu").ok
    assert not verify.check(a @ b, a, b, activation="relu").ok


def test_integers_must_be_equal():
    a, b = some((4, 4), "int32"), some((4, 4), "int32", 1)
    assert verify.check(a @ b, a, b).error_over_bound == 0
    assert verify.check(a @ b + (np.arange(16).reshape(4, 4) == 6).astype("int32"), a, b).worst == (1, 2)


@pytest.mark.parametrize("planted", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_fails_where_the_reference_is_finite(planted):
    a, b = some((4, 4), "float32"), some((4, 4), "float32", 1)
    result = a @ b
    result[2, 1] = planted
    found = verify.check(result, a, b)
    assert found.error_over_bound == math.inf
    assert found.worst == (2, 1)


@pytest.mark.parametrize("planted", [np.nan, np.inf])
def test_a_value_that_is_not_finite_must_be_there_when_the_reference_has_it(planted):
    a, b = np.ones((4, 4), "float32"), np.ones((4, 4), "float32")
    a[1, 2] = planted
    with np.errstate(invalid="ignore"):
        right = a @ b
    assert verify.check(right, a, b).ok
    for other in (0.0, 4.0, -np.inf):
        wrong = right.copy()
        wrong[1, 3] = other
        assert not verify.check(wrong, a, b).ok


def test_a_half_that_overflows_must_be_infinite_with_the_right_sign():
    a, b = np.full((1, 2), -60000, "float16"), np.full((2, 1), 2, "float16")
    assert verify.check(np.full((1, 1), -np.inf, "float16"), a, b).ok
    assert not verify.check(np.full((1, 1), np.inf, "float16"), a, b).ok
    assert not verify.check(np.full((1, 1), -65504, "float16"), a, b).ok


def test_half_precision_is_held_to_one_final_rounding_not_to_k():
    k = 512
    a, b = some((4, k), "float16"), some((k, 4), "float16", 1)
    summed = np.zeros((4, 4), "float16")
    for i in range(k):
        summed += a[:, i, None] * b[None, i]
    assert not verify.check(summed, a, b).ok


def test_the_bound_is_the_one_that_is_stated():
    a, b = some((3, 8), "float32"), some((8, 2), "float32", 1)
    stated = 8 * 2.0**-24 * (np.abs(a.astype("f8")) @ np.abs(b.astype("f8")))
    assert np.allclose(verify.bound(a, b, out="f32"), stated, rtol=1e-12)
    assert np.all(verify.bound(a, b, lambda k: 3.0 * k, out="f32") > 2.9 * stated)
    assert np.allclose(verify.bound(a, b, out="f32", alpha=-4), 4 * (1 + 3 / 8) * stated, rtol=1e-12)
    largest = 8 * 2.0**-24 * np.abs(a).max().astype("f8") * np.abs(b).max()
    assert np.allclose(verify.bound(a, b, out="f32", normwise=True), largest, rtol=1e-12)
    a[0, 0] = np.nan  # the other elements are measured by the largest finite one
    assert np.isfinite(verify.bound(a, b, out="f32", normwise=True)).all()
    assert verify.check(a @ b, a, b, normwise=True).ok


def test_alpha_beta_bias_and_activation_are_part_of_the_reference():
    a, b, c = some((4, 5), "float64"), some((5, 3), "float64", 1), some((4, 3), "float64", 2)
    bias = some((3,), "float64", 3)
    linear = 0.5 * (a @ b) - 2 * c + bias
    options = {"alpha": 0.5, "beta": -2.0, "c": c, "bias": bias}
    erf = np.vectorize(math.erf)
    for name, result in {
        "": linear,
        "relu": np.maximum(linear, 0),
        "gelu": 0.5 * linear * (1 + erf(linear / math.sqrt(2))),
        "silu": linear / (1 + np.exp(-linear)),
    }.items():
        assert verify.check(result, a, b, activation=name, **options).ok, name
        assert not verify.check(result + 1e-9, a, b, activation=name, **options).ok, name
    with pytest.raises(ArgumentError, match="tanh"):
        verify.reference(a, b, out="f64", activation="tanh")


def test_the_bound_passes_through_a_bias_and_an_activation():
    a, b, bias = some((3, 8), "float32"), some((8, 2), "float32", 1), some((2,), "float32", 2)
    u, sums = 2.0**-24, a.astype("f8") @ b.astype("f8")
    before = verify.bound(a, b, out="f32")
    added = np.abs(sums + bias) + before
    assert np.allclose(verify.bound(a, b, out="f32", bias=bias), before + u * added, rtol=1e-12)
    silu = np.abs(sums / (1 + np.exp(-sums))) + 1.1 * before
    stated = 1.1 * before + 8 * u * silu + 16 * u * (np.abs(sums) + before)
    assert np.allclose(verify.bound(a, b, out="f32", activation="silu"), stated, rtol=1e-12)
    assert np.allclose(verify.bound(a, b, out="f32", activation="relu"), before, rtol=1e-12)
    gelu = [verify.bound(a, b, out=out, activation="gelu") for out in ("f16", "bf16")]
    value = np.abs(verify.reference(a, b, out="f32", activation="gelu"))
    assert np.allclose(gelu[1] - gelu[0], 2.0**-11 * value, rtol=1e-3)  # a polynomial of less degree


def test_beta_zero_does_not_read_c():
    a, b = some((4, 5), "float32"), some((5, 3), "float32", 1)
    nothing = np.full((4, 3), np.nan, "float32")
    assert verify.check(a @ b, a, b, beta=0, c=nothing).ok
    assert np.all(np.isfinite(verify.reference(a, b, out="f32", beta=0, c=nothing)))
    assert np.all(np.isfinite(verify.bound(a, b, out="f32", beta=0, c=nothing)))


def test_a_sample_sees_the_first_and_the_last_row_and_says_so():
    a, b = some((300, 64), "float32"), some((64, 50), "float32", 1)
    result = a @ b
    found = verify.check(result, a, b, most_flops=1e5)
    assert found.ok
    assert found.sampled
    assert not verify.check(result, a, b).sampled
    for row in (0, 299):
        wrong = result.copy()
        wrong[row, 7] += 1
        assert verify.check(wrong, a, b, most_flops=1e5).worst == (row, 7)


def test_a_sample_of_a_broadcast_batch_names_the_element_of_the_whole():
    a, b = some((40, 1, 6, 8), "float32"), some((5, 8, 7), "float32", 1)
    result = a @ b
    assert verify.check(result, a, b, most_flops=1e4).ok
    result[39, 4, 5, 3] += 1
    assert verify.check(result, a, b, most_flops=1e4).worst == (39, 4, 5, 3)


def test_empty_products_have_nothing_to_fail():
    assert verify.check(np.zeros((0, 3), "f4"), np.zeros((0, 2), "f4"), np.zeros((2, 3), "f4")).ok
    assert verify.check(np.zeros((2, 3), "f4"), np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4")).ok
    assert not verify.check(np.ones((2, 3), "f4"), np.zeros((2, 0), "f4"), np.zeros((0, 3), "f4")).ok
    with pytest.raises(ArgumentError, match="at least two dimensions"):
        verify.check(np.zeros(3), np.zeros((3, 1)), np.zeros((1, 1)))


@pytest.mark.process
@pytest.mark.parametrize("number", ["abc", "9999999"])
def test_a_wrong_variable_is_no_wrong_product(number):
    """In a process of its own: the number of threads is read once."""
    command = [sys.executable, "-m", "gemmery", "verify", "--products", "3"]
    env = {**os.environ, "GEMMERY_NUM_THREADS": number}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(rf"gemmery: GEMMERY_NUM_THREADS='?{number}'?: [^\n]+\n", done.stderr)
