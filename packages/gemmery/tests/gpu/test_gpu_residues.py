"""Float64 on int8 tensor cores, on a device of sm_90: bits, the bound, the largest sums, what is left to CUDA cores."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from gemmery.cuda import driver
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.int8_pieces import MODULI, MOST, norms
from gemmery.ladder.rung import find
from gpu_operands import built, matrices, place, problem, run
from residue_rules import U, expected, scaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(driver.missing()), reason=driver.missing()),
    pytest.mark.skipif(
        bool(driver.missing()) or driver.find("cuda:0").capability != 90, reason="needs a device of sm_90"
    ),
]
RUNG = find(CUDA, "ozaki_int8")


def multiplied(a, b, **config):
    """A B by the rung on the device."""
    x, y = place(a[None], "f64"), place(b[None], "f64")
    c = place(np.full((1, a.shape[0], b.shape[1]), np.nan), "f64")
    built(RUNG, problem(x, y, c), {**RUNG.default, **config})(x.view(), y.view(), c.view())
    driver.synchronize()
    return c.result()[0]


@pytest.mark.parametrize("moduli", [14, 15])
@pytest.mark.parametrize("k", [16, 17, 127, 128, 129, 700])
def test_bits(k, moduli):
    draw = np.random.default_rng(k)
    a, b = draw.standard_normal((70, k)), draw.standard_normal((k, 300))
    assert np.array_equal(multiplied(a, b, moduli=moduli), expected(a, b, moduli))


@pytest.mark.parametrize("k", [0, 1, 15])
def test_a_short_k(k):
    draw = np.random.default_rng(k)
    a, b = draw.standard_normal((70, k)), draw.standard_normal((k, 30))
    assert (abs(multiplied(a, b) - a @ b) <= 2 * k * U * (abs(a) @ abs(b))).all()


def with_residues(moduli):
    """A number that is p // 2 modulo each p when a row of MOST of it has been scaled."""
    whole = prod(moduli)
    for t in range(64):
        wanted = {p: p // 2 * pow(2, -t, p) for p in moduli}
        least = sum(r * (whole // p) * pow(whole // p, -1, p) for p, r in wanted.items()) % whole
        for number in range(least + whole, least + 4 * whole, whole):
            if scaling(np.array([[number * float(MOST) ** 0.5]]), 15)[0] == t:
                return number
    raise AssertionError(f"no scale leaves {moduli} such residues")


def test_the_largest_sums_of_residues():
    """For a few moduli at a time, every element of a row has the largest residue there is."""
    numbers = [with_residues(MODULI[first : first + 5]) for first in range(1, 15, 5)]
    numbers.append(-numbers[0])
    a = np.repeat(np.array(numbers, float)[:, None], MOST, 1)
    c = multiplied(a, a.T.copy())
    wanted = np.array([[float(x * y * MOST) for y in numbers] for x in numbers])
    assert (abs(c - wanted) <= 4 * U * abs(wanted)).all()


def test_the_bound_of_random_products():
    """Kinds of operands that lose most; in extended precision."""
    draw = np.random.default_rng(1)
    for number in range(60):
        m, n, k = (int(2 ** draw.uniform(0, 8)) for _ in range(3))
        a, b = draw.standard_normal((m, k)), draw.standard_normal((k, n))
        if number % 3 == 1:
            a, b = a * np.exp(4 * draw.standard_normal((m, k))), b * np.exp(4 * draw.standard_normal((k, n)))
        if number % 3 == 2:
            steps = 2.0 ** np.linspace(-20, 20, k)
            a, b = abs(a) * steps, abs(b) / steps[:, None]
        exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
        sizes = np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)
        moduli = 14 + number % 2
        allowed = np.maximum(norms(k, moduli), k) * U * sizes  # a short k has the bound of float64
        assert (abs(multiplied(a, b, moduli=moduli) - exact) <= allowed).all(), (number, m, n, k)


@pytest.mark.parametrize("planted", [np.inf, np.nan, 1e300])
def test_what_cuda_cores_take(planted):
    draw = np.random.default_rng(2)
    a, b = draw.standard_normal((70, 200)), draw.standard_normal((200, 30))
    a[7, 9] = planted
    c, wanted = multiplied(a, b), a @ b
    assert np.array_equal(np.isfinite(c), np.isfinite(wanted))
    whole = np.isfinite(wanted)
    assert (abs(c - wanted)[whole] <= (400 * U * (abs(a) @ abs(b)))[whole]).all()


def test_the_same_bits_each_time():
    """Also of launches that overlap, into one C after the other."""
    a, b, first = matrices((500, 600, 520), "f64", "f64")
    others = [matrices((500, 600, 520), "f64", "f64")[2] for _ in range(6)]
    kernel = built(RUNG, problem(a, b, first))
    for c in (first, *others):
        kernel(a.view(), b.view(), c.view())
    driver.synchronize()
    bits = first.result().tobytes()
    assert all(c.result().tobytes() == bits for c in others)


def test_batches_that_share_an_operand():
    for shared in ((True, False), (False, True)):
        assert run(RUNG, *matrices((100, 72, 200), "f64", "f64", batch=5, shared=shared))
