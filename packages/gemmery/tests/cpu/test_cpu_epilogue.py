"""Activations against 64-bit significands, down to the smallest results, and at the ends of the number line."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery import verify
from gemmery.cpu import build, images
from operands import numpy_dtype, place, problem

UNIT = {"f32": 2.0**-24, "f64": 2.0**-53}
# How far down x the results are normal numbers.
LOWEST = {("gelu", "f32"): -12.5, ("gelu", "f64"): -37.0, ("silu", "f32"): -85.0, ("silu", "f64"): -700.0}


def applied(activation, name, x):
    """The activation of the numbers x, as a product with 1 leaves it."""
    values = np.asarray(x, numpy_dtype(name)).reshape(1, -1, 1)
    a, b = place(values, name), place(np.ones((1, 1, 1), values.dtype), name)
    c = place(np.zeros_like(values), name)
    build.packed(problem(a, b, c, activation), {})(a.view, b.view, c.view)
    assert c.untouched_around()
    return c.array[0, :, 0]


def upper_tail(t):
    """1 - Phi(t) for t >= 0 in extended precision: a series of positive terms, and a continued fraction beyond 2."""
    term = total = t
    for i in range(1, 60):
        term = term * t * t / (2 * i + 1)
        total = total + term
    fraction = np.zeros_like(t)
    for i in range(400, 0, -1):
        fraction = i / (t + fraction)
    density = np.exp(-t * t / 2) / np.sqrt(8 * np.arctan(np.longdouble(1)))
    return np.where(t < 2, np.longdouble(0.5) - density * total, density / (t + fraction))


def exact(activation, x):
    wide = x.astype(np.longdouble)
    small = np.exp(-np.abs(wide)) if activation == "silu" else upper_tail(np.abs(wide))
    if activation == "silu":
        return wide * np.where(wide < 0, small, 1) / (1 + small)
    return wide * np.where(wide < 0, small, 1 - small)


@pytest.mark.skipif(not verify.EXTENDED, reason="needs a long double of 64 bits")
@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize(("activation", "ulps"), [("gelu", 7), ("silu", 4)])
def test_error_is_a_few_units_wherever_the_result_is_normal(activation, ulps, name):
    draw = np.random.default_rng(5)
    lowest = LOWEST[activation, name]
    parts = [np.linspace(lowest, 40, 3001), draw.uniform(-3, 3, 3000), draw.uniform(lowest, -3, 3000)]
    x = np.concatenate([*parts, 10.0 ** draw.uniform(-30, 30, 500)]).astype(numpy_dtype(name))
    right = exact(activation, x)
    error = np.abs(applied(activation, name, x).astype(np.longdouble) - right)
    assert (error <= ulps * UNIT[name] * np.abs(right)).all(), x[np.argmax(error / np.maximum(np.abs(right), 1e-300))]


@pytest.mark.parametrize("name", ["f32", "f64", "f16", "bf16"])
def test_ends_of_the_number_line(name):
    largest = 60000.0 if name == "f16" else 1e30
    x = [np.nan, np.inf, largest, 0.0, -largest, -np.inf]
    for activation, last in (("relu", 0.0), ("gelu", np.nan), ("silu", np.nan)):
        got = applied(activation, name, x).astype(float)
        wanted = np.array([np.nan, np.inf, largest, 0.0, 0.0, last]).astype(numpy_dtype(name)).astype(float)
        np.testing.assert_array_equal(got, wanted, err_msg=activation)


@pytest.mark.skipif(not verify.EXTENDED, reason="needs a long double of 64 bits")
@pytest.mark.parametrize("name", ["f32", "f64"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_results_fade_through_the_subnormal_numbers_to_zero(activation, name):
    info = np.finfo(numpy_dtype(name))
    x = np.linspace(LOWEST[activation, name], 1.25 * LOWEST[activation, name], 400).astype(info.dtype)
    got, right = applied(activation, name, x).astype(np.longdouble), exact(activation, x)
    # What multiplies x may be off by the smallest subnormal number.
    assert (np.abs(got - right) <= 7 * UNIT[name] * np.abs(right) - x * np.longdouble(info.smallest_subnormal)).all()
    assert ((got < 0) & (got > -info.tiny)).any()
    assert got[-1] == 0


def test_an_activation_that_is_not_known_is_refused():
    a = place(np.ones((1, 2, 2), np.float32), "f32")
    assert "tanh" in images.packed_refuses(problem(a, a, a, "tanh"))
