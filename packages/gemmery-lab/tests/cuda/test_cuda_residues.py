"""Float64 on int8 tensor cores: bit for bit as the rules say, within its bound; no GPU is needed."""

from __future__ import annotations

from math import gcd, prod, sqrt
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import include
from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.int8_pieces import MODULI, MOST, norms
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung
from layouts import laid
from residue_rules import U, expected

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

RUNG = find(CUDA, "ozaki_int8")
KERNELS = Path(include.__file__).parent / "kernels"


def operands(m, n, k, seed=0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal((m, k)), draw.standard_normal((k, n))


def multiplied(a, b, layouts=("row", "row", "row"), config=(), **options):
    """A B by the rung on the emulator."""
    a, b = (x if x.ndim == 3 else x[None] for x in (a, b))
    batch = max(a.shape[0], b.shape[0])
    images = []
    for x, layout in zip((a, b), layouts, strict=False):
        shared = x.shape[0] < batch
        images.append(laid(np.broadcast_to(x, (batch, *x.shape[1:])), layout, shared)[1])
    c = laid(np.full((batch, a.shape[1], b.shape[2]), np.nan), layouts[2])[1]
    gemm = Gemm(*images, c, **{key: options.pop(key) for key in ("bias", "alpha", "beta") if key in options})
    case = problem_of(gemm, "f64", "f64", "h200", **options)
    runs = run_rung(RUNG, case, {"bn": 128, "blocks": 3, **dict(config)}, gemm)
    assert [str(each) for run in runs for each in run.findings] == []
    return c[0] if batch == 1 else c


def norm_products(a, b):
    """The norm of each row of A times that of each column of B."""
    return np.linalg.norm(a, axis=1)[:, None] * np.linalg.norm(b, axis=0)


def units(c, a, b):
    """The largest error, in u of the norms."""
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    return float((np.abs(c - exact) / norm_products(a, b)).max()) / U


# ---- bits ----


@pytest.mark.many
@pytest.mark.parametrize(("k", "moduli"), [(16, 15), (17, 14), (128, 15), (129, 14)])
def test_each_k(k, moduli):
    a, b = operands(24, 40, k)
    assert np.array_equal(multiplied(a, b, config={"moduli": moduli}), expected(a, b, moduli))


@pytest.mark.parametrize("k", [0, 1, 15])
def test_cuda_cores_take_a_short_k(k):
    a, b = operands(24, 40, k)
    c = multiplied(a, b)
    assert (np.abs(c - a @ b) <= 2 * k * U * (np.abs(a) @ np.abs(b))).all()


@pytest.mark.parametrize(("m", "n", "bn"), [(136, 23, 128), (9, 264, 256)])
def test_tiles_of_a_ragged_product(m, n, bn):
    a, b = operands(m, n, 40)
    assert np.array_equal(multiplied(a, b, ("row", "col", "row"), {"bn": bn}), expected(a, b))


@pytest.mark.parametrize(
    "layouts", [("odd", "padded col", "row"), ("strided", "reversed", "padded"), ("col", "one row", "col")]
)
def test_no_layout_shows(layouts):
    a, b = operands(40, 23, 72)
    if "one row" in layouts:
        b[:] = b[:1]
    assert np.array_equal(multiplied(a, b, layouts), expected(a, b))


@pytest.mark.many
@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_batches(shared):
    """Each matrix has its own scales; residues of one for all follow each other without gaps."""
    pairs = [operands(9, 10, 40, seed) for seed in range(3)]
    a, b = (np.stack(side) for side in zip(*pairs, strict=True))
    a, b = np.ldexp(a[:1] if shared == "a" else a, 3), b[:1] if shared == "b" else b
    c = multiplied(a, b)
    for at in range(3):
        assert np.array_equal(c[at], expected(a[at % len(a)], b[at % len(b)]))


def test_steps_after_a_product_are_those_of_float64():
    a, b = operands(24, 41, 80)
    bias = np.arange(41.0) / 4 - 5
    c = multiplied(a, b, alpha=0.5, bias=bias, epilogue="bias+relu", scaled=True)
    assert np.array_equal(c, np.maximum(0.5 * expected(a, b) + bias, 0))


def test_a_row_is_the_same_in_any_product():
    a, b = operands(40, 24, 80)
    whole = multiplied(a, b)
    assert np.array_equal(multiplied(a[7:8], b[:, :5]), whole[7:8, :5])


def test_integers_are_exact():
    draw = np.random.default_rng(0)
    a, b = draw.integers(-(2**20), 2**20, (24, 64)).astype(float), draw.integers(-999, 999, (64, 40)).astype(float)
    assert np.array_equal(multiplied(a, b, config={"moduli": 14}), a @ b)


# ---- the theorem ----


@pytest.mark.parametrize("moduli", [14, 15])
def test_the_largest_sums_do_not_wrap_around(moduli):
    """Rows and columns that are alike, with a norm just below what is allowed: the sum is half the moduli's product."""
    k, most = 64, sqrt(prod(MODULI[:moduli]) / 2 * (1 - 2.0**-15.9))
    a = np.full((2, k), most / sqrt(k))
    a[1] *= -1
    b = a[:1].T.copy()
    c = multiplied(a, b, config={"moduli": moduli})
    assert np.array_equal(c, expected(a, b, moduli))
    assert units(c, a, b) <= norms(k, moduli)
    assert (np.abs(c) > 0.499 * prod(MODULI[:moduli])).all()


def test_sums_of_few_bits():
    """Of negative numbers too, where the low half of 64 bits decides."""
    a, b = np.zeros((5, 16)), np.zeros((16, 1))
    b[:, 0] = 2.0**-54  # 2^t makes integers of 2^54 of it
    a[:, 0], a[:, 1] = 1, -1 + np.array([0, 1, -2, 2, -4]) * U
    assert np.array_equal(multiplied(a, b), expected(a, b))
    assert (multiplied(a, b) != 0).sum() == 4


def test_the_moduli_are_coprime():
    assert all(gcd(x, y) == 1 for x in MODULI for y in MODULI if x != y)
    assert 128 * 128 * MOST <= 2**30


BYTES = """
#include "ozaki.cuh"
__global__ void bytes(const int* sums, unsigned* to, int index, int count) {
  const int p = modulus(index);
  for (int i = threadIdx.x; i < count; i += 256) to[i] = byte_of(sums[i], p, inverse_of(p));
}"""


@pytest.mark.parametrize("p", [256, 255, 233, 197])
def test_the_largest_sums_leave_a_byte(p):
    """Of 65536 products of residues; next to multiples of p, where a quotient could be wrong by one."""
    draw = np.random.default_rng(p)
    quotients = np.concatenate(
        [[2**30 // p, 1, 0, -1, -(2**30) // p + 1], draw.integers(-(2**30) // p, 2**30 // p, 99)]
    )
    sums = np.array([q * p + r for q in quotients for r in (-1, 0, 1, p // 2)]).clip(-(2**30), 2**30).astype(np.int32)
    to = np.zeros(sums.size, np.uint32)
    gm.emulate(BYTES, "bytes", 1, 256, [sums, to, MODULI.index(p), sums.size], options=(f"-I{KERNELS}",), arch="sm_90a")
    assert (to < 256).all()
    assert ((to.astype(np.int64) - sums) % p == 0).all()


# ---- the bound ----

KINDS = {
    "positive": lambda draw, shape, axis: draw.random(shape),
    "wide": lambda draw, shape, axis: draw.standard_normal(shape) * np.exp(4 * draw.standard_normal(shape)),
    "graded": lambda draw, shape, axis: draw.standard_normal(shape) * 2.0 ** (graded(shape, axis) * (1 - 2 * axis)),
}


def graded(shape, axis):
    """Exponents of k, from -20 to 20: of A they grow, of B they fall."""
    steps = np.linspace(-20, 20, shape[1 - axis])
    return steps[None, :] if axis == 0 else steps[:, None]


@pytest.mark.many
@pytest.mark.parametrize(("kind", "moduli"), [("positive", 14), ("wide", 15), ("graded", 15)])
def test_the_bound_holds(kind, moduli):
    draw = np.random.default_rng(5)
    a, b = KINDS[kind](draw, (40, 300), 0), KINDS[kind](draw, (300, 40), 1)
    c = multiplied(a, b, config={"moduli": moduli})
    assert units(c, a, b) <= norms(300, moduli)


def test_the_rung_states_a_bound_of_all_of_a_matrix():
    assert RUNG.normwise
    assert RUNG.bound(4096) == 4096 * norms(4096, 14)


# ---- special values ----


def test_extreme_norms_leave_it_to_cuda_cores():
    a, b = operands(9, 10, 40)
    for size in (1e300, 2.0**500):
        c = multiplied(a * size, b / size)
        assert (np.abs(c - a @ b) <= 80 * U * (np.abs(a) @ np.abs(b))).all()
    assert np.array_equal(multiplied(a * 2.0**440, b / 2.0**440), expected(a, b))  # these do not
    tiny = multiplied(a * 2.0**-1040, b * 2.0**40)
    exact = np.ldexp(np.rint(np.ldexp(a, 34)), -34) @ b  # a has 34 bits there
    assert (np.abs(np.ldexp(tiny, 1000) - exact) <= 2.0**-30).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite(value):
    a, b = operands(9, 10, 40)
    a[2, 7] = b[3, 4] = value
    wanted = a @ b
    c = multiplied(a, b)
    assert np.array_equal(np.isnan(c), np.isnan(wanted))
    assert np.array_equal(np.isposinf(c), np.isposinf(wanted))
    assert np.array_equal(np.isneginf(c), np.isneginf(wanted))
    whole = np.isfinite(wanted)
    assert (np.abs(c[whole] - wanted[whole]) <= 80 * U * 100).all()


def test_zeros():
    a, b = operands(9, 10, 40)
    a[3], b[:, 2], a[5, 1:] = 0, -0.0, 0
    c = multiplied(a, b)
    assert np.array_equal(c, expected(a, b))
    assert (c[3] == 0).all()
    assert (c[:, 2] == 0).all()


# ---- refusals ----


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"k": 65_537}, "65536 products"),
        ({"out": "f32"}, "writes f64"),
        ({"groups": 2}, "wgmma_grouped"),
    ],
)
def test_other_products_are_refused(fields, reason):
    assert reason in RUNG.refuses(Problem(64, 64, 64, "f64", "f64", device="h200")._replace(**fields))


def test_other_configs_are_refused():
    case = Problem(64, 64, 64, "f64", "f64", device="h200")
    for config, reason in (({"moduli": 16}, "14, or 15"), ({"bn": 64}, "128 or 256|256 or 128")):
        with pytest.raises(RefusedError, match=reason):
            RUNG.geometry(case, {**RUNG.default, **config})
