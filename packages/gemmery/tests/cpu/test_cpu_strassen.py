"""Strassen's scheme on the CPU: its coefficients, every size and layout, and what its bound does not promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fences import at_page_end, survives
from gemmery import verify
from gemmery.arrays import view
from gemmery.cpu.strassen import FORMS, bound, scheme
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from operands import LAYOUTS, STORED, place, problem, random

RUNG = find(CPU, "strassen")
CONFIGS = [{"levels": levels, "winograd": winograd} for levels in (1, 2) for winograd in (0, 1)]
SMALL_BLOCKS = {"kc": 24, "nc": 64}
SHAPES = [
    (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4), (5, 7, 9), (2, 64, 3), (64, 2, 33), (1, 130, 131), (13, 1, 4),
    (48, 128, 64), (97, 131, 127), (26, 259, 70), (8, 8, 0),
]  # fmt: skip


def multiply(a, b, c, config=RUNG.default, **options):
    """Run the rung on what `place` gives, and see that nothing else changed."""
    asked = problem(a, b, c)
    assert RUNG.refuses(asked) == ""
    RUNG.build(asked, config)(a.view, b.view, c.view, **options)
    assert a.untouched()
    assert b.untouched()
    assert c.untouched_around()
    return c.array


def operands(m, n, k, dtype, layout="C", stored="C", batch=1):
    return (
        place(random((batch, m, k), dtype, 0), dtype, layout),
        place(random((batch, k, n), dtype, 1), dtype, layout),
        place(random((batch, m, n), dtype, 2), dtype, stored),
    )


def require(result, a, b, config, **options):
    """Within the bound of these levels and this form, which is tighter than the rung's."""
    levels, winograd = config["levels"], bool(config["winograd"])
    verify.require(result, a.array, b.array, lambda k: bound(k, levels, winograd), normwise=True, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_the_scheme_is_the_product_of_block_matrices(form, levels):
    """Every product of a block of A and one of B reaches C as often as the definition says: once or not at all."""
    side = 2**levels
    terms = scheme(form, levels)
    assert len(terms) == 7**levels
    reached = sum(np.einsum("i,j,k->ijk", term.a, term.b, term.c) for term in terms).reshape(*[side] * 6)
    one = np.eye(side, dtype=int)
    # A[i, p] B[q, j] belongs to C[r, s] when p == q, i == r and j == s.
    assert np.array_equal(reached, np.einsum("pq,ir,js->ipqjrs", one, one, one))


@pytest.mark.many
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", RUNG.dtypes)
def test_every_size(dtype, config):
    for (m, n, k), blocks in itertools.product(SHAPES, ({}, SMALL_BLOCKS)):
        a, b, c = operands(m, n, k, dtype)
        require(multiply(a, b, c, {**config, **blocks}), a, b, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, config):
    for (m, n, k), stored in itertools.product([(13, 70, 35), (48, 128, 64)], STORED):
        a, b, c = operands(m, n, k, "f32", layout, stored)
        old = c.array.copy()
        require(multiply(a, b, c, config, alpha=0.5, beta=-3), a, b, config, alpha=0.5, beta=-3, c=old)


@pytest.mark.parametrize("dtype", RUNG.dtypes)
def test_beta_zero_does_not_read_c(dtype):
    for config, (m, n, k) in itertools.product(CONFIGS, SHAPES):
        a, b, c = operands(m, n, k, dtype)
        c.array[...] = np.nan
        require(multiply(a, b, c, config, alpha=2), a, b, config, alpha=2)


def test_a_batch():
    a, b, c = operands(33, 35, 37, "f64", batch=3)
    require(multiply(a, b, c, CONFIGS[0]), a, b, CONFIGS[0])


def test_the_bound_is_not_held_by_every_element():
    """Rows and columns of very different size: their small elements drown in the sums."""
    a, b, c = operands(64, 64, 64, "f32")
    scale = np.where(np.arange(64) < 32, 1.0, 1e-6).astype("f4")
    a.array[...] *= scale[:, None]
    b.array[...] *= scale
    a.before, b.before = a.memory.copy(), b.memory.copy()
    result = multiply(a, b, c, CONFIGS[0])
    require(result, a, b, CONFIGS[0])
    assert not verify.check(result, a.array, b.array, RUNG.bound).ok


def test_the_bound_grows_with_levels_and_with_winograds_form():
    assert bound(64, 1, False) == 12 * (32**2 + 5 * 32) - 5 * 64
    assert bound(64, 2, True) == 18**2 * (16**2 + 6 * 16) - 6 * 64
    assert RUNG.bound(1000) >= bound(1000, 2, False) > bound(1000, 1, False) > 1000**2


def test_what_is_not_finite_is_not_lost():
    for config, planted in itertools.product(CONFIGS, (np.nan, np.inf)):
        a, b, c = operands(13, 14, 15, "f64")
        a.array[0, 5, 7] = planted
        a.before = a.memory.copy()
        assert not np.any(np.isfinite(multiply(a, b, c, config)[0, 5]))


@pytest.mark.process
@pytest.mark.parametrize(("m", "n", "k"), [(4, 4, 4), (26, 70, 33), (48, 128, 64)])
def test_nothing_past_the_last_element_is_read(m, n, k):
    a, b, c = (at_page_end(random(shape, "f32", 0)) for shape in ((1, m, k), (1, k, n), (1, m, n)))
    for config in CONFIGS:
        kernel = RUNG.build(Problem(m, n, k, "f32", "f32"), config)
        assert survives(lambda kernel=kernel: kernel(view(a), view(b), view(c)))


def test_what_it_refuses():
    assert "epilogue" in RUNG.refuses(Problem(4, 4, 4, "f32", "f32", epilogue="relu"))
    assert "accumulates in C" in RUNG.refuses(Problem(4, 4, 4, "f32", "f64"))
    assert "adjacent" in RUNG.refuses(Problem(4, 4, 4, "f32", "f32", c_layout="any"))
    assert RUNG.refuses(Problem(4, 4, 4, "f32", "f32", c_layout="col")) == ""
