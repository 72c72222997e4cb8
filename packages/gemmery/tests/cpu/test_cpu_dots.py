"""Few columns or rows of C: dot products within the bound, the same bits for any rows, threads and layout of B."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery import verify
from gemmery.cpu import build
from gemmery.cpu.build import SMALL_C
from gemmery.cpu.target import DOTS_K, dots_columns, host
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from operands import LAYOUTS, numpy_dtype, place, problem, random

ROWS = ("C", "padded", "misaligned", "rows reversed")  # layouts with adjacent elements in rows
TYPES = [name for name in ("f32", "f64") if dots_columns(host(), numpy_dtype(name).itemsize) > 1]
pytestmark = [
    pytest.mark.skipif(not TYPES, reason="vectors of this CPU are too short for two columns"),
    pytest.mark.sampled(3),
]


def multiply(shape, name, layouts, alpha=1, beta=0, threads=1):
    """C, checked against higher precision; what is around it and the operands stays as it was."""
    m, n, k = shape
    a, b = place(random((2, m, k), name, 1), name, layouts[0]), place(random((2, k, n), name, 2), name, layouts[1])
    old = random((2, m, n), name, 3) if beta else np.full((2, m, n), np.nan, numpy_dtype(name))
    c = place(old, name, layouts[2])
    asked = problem(a, b, c, scaled=(alpha, beta) != (1, 0))
    assert build.dots_refuses(asked) == ""
    build.dots(asked, {})(a.view, b.view, c.view, alpha=alpha, beta=beta, threads=threads)
    assert a.untouched()
    assert b.untouched()
    assert c.untouched_around()
    checked = verify.check(c.array, a.array, b.array, verify.blocked, alpha=alpha, beta=beta, c=old if beta else None)
    assert checked.ok, (shape, layouts, alpha, beta, checked)
    return c.array


@pytest.mark.many
@pytest.mark.parametrize("name", TYPES)
def test_every_shape_layout_and_scalar(name):
    draw = np.random.default_rng(0)
    most = dots_columns(host(), numpy_dtype(name).itemsize)
    for m in (1, 2, 3, 7, 8, 9, 15, 17, 100, 1023, 1025):
        for n in range(2, most + 1):
            k = int(draw.choice([0, 1, 7, 15, 16, 17, 31, 48, 100, 1023, 1024, 1025, 2500]))
            layouts = [str(draw.choice(kinds)) for kinds in (ROWS, LAYOUTS, ROWS)]
            alpha, beta = [(1, 0), (1, 1), (2.5, 0), (-0.5, 3), (0, 1)][draw.integers(5)]
            multiply((m, n, k), name, layouts, alpha, beta)


@pytest.mark.parametrize("name", TYPES)
def test_few_rows_of_every_layout_and_scalar(name):
    draw, most = np.random.default_rng(1), dots_columns(host(), numpy_dtype(name).itemsize)
    for n in (most + 1, 17, 64, 129, 1025):
        for m in range(2, most + 1):
            k = int(draw.choice([2, 15, 17, 48, 1023, 1025, 2500]))
            layouts = str(draw.choice(LAYOUTS)), "F", str(draw.choice(ROWS))
            alpha, beta = [(1, 0), (2.5, 0), (-0.5, 3)][draw.integers(3)]
            multiply((m, n, k), name, layouts, alpha, beta, threads=int(draw.integers(1, 4)))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("k", [50, 1025])
def test_few_rows_are_the_transposed_product(name, k):
    x, w = random((2, k), name, 7), random((480, k), name, 8)
    product = gm.matmul(x, w.T)
    assert gm.explain(x, w.T).rung == "dots"
    assert product.tobytes() == np.ascontiguousarray(gm.matmul(w, x.T).T).tobytes()
    for _ in range(100):  # by the kernel for every shape, then by a plan
        assert gm.matmul(x, w.T).tobytes() == product.tobytes()
    for threads in (1, 2, 5):
        assert gm.matmul(x, w.T, threads=threads).tobytes() == product.tobytes()
    assert gm.matmul(x, w[::2].T).tobytes() == np.ascontiguousarray(product[:, ::2]).tobytes()
    kept = gm.matmul(np.concatenate([x, x, x, x]), w.T, batch_invariant=True)[:2]
    assert gm.matmul(x, w.T, batch_invariant=True).tobytes() == kept.tobytes()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("k", [50, 1024, 3000])
def test_bits_depend_on_no_layout_of_b_and_no_number_of_rows_or_threads(name, k):
    whole = multiply((300, 2, k), name, ("C", "C", "C"))
    for layout in sorted({*LAYOUTS} - {"one row"}):  # whose values are others
        assert multiply((300, 2, k), name, ("C", layout, "C")).tobytes() == whole.tobytes()
    for threads in (2, 5):
        assert multiply((300, 2, k), name, ("C", "C", "C"), threads=threads).tobytes() == whole.tobytes()
    if dots_columns(host(), numpy_dtype(name).itemsize, "row") < 2:
        return  # it is chosen for a column-major B alone, of which one row is for gemv
    x, y = random((300, k), name, 5), random((k, 2), name, 6)
    product = gm.matmul(x, y)
    assert gm.explain(x, y).rung == "dots"
    for rows in (1, 2, 8, 77):
        assert gm.matmul(x[:rows], y).tobytes() == product[:rows].tobytes(), rows
    assert gm.matmul(x[3], y).tobytes() == product[3].tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_a_symmetric_product_is_symmetric(name):
    x = random((2, 5000), name, 0)
    product = gm.matmul(x, x.T)
    assert gm.explain(x, x.T).rung == "dots"
    assert (product == product.T).all()


def test_infinity_and_nan_stay_in_their_elements():
    x, y = (np.ones(shape, numpy_dtype(TYPES[0])) for shape in ((20, 100), (100, 2)))
    x[3, 99], x[5, 0] = np.inf, np.nan
    product = gm.matmul(x, y)
    assert np.isinf(product[3]).all()
    assert np.isnan(product[5]).all()
    assert (np.delete(product, [3, 5], 0) == 100).all()


def test_where_it_is_chosen():
    name = TYPES[0]
    few, most = (dots_columns(host(), numpy_dtype(name).itemsize, layout) for layout in ("row", "col"))

    def rung(m, n, k, by_columns=False, **options):
        y = random((n, k), name, 1).T if by_columns else random((k, n), name, 1)
        return gm.explain(random((m, k), name, 0), y, **options).rung

    assert rung(100, most, 100, by_columns=True) == "dots"
    assert rung(100, most + 1, 100, by_columns=True) != "dots"
    assert rung(100, 2, DOTS_K, by_columns=True) == "dots"
    assert rung(100, 2, DOTS_K - 1, by_columns=True) != "dots"
    assert rung(100, 2, 100, by_columns=True, batch_invariant=True) != "dots"
    assert rung(100, 2, 100, by_columns=True, activation="relu") != "dots"
    assert rung(1, 2, 100, by_columns=True) == "gemv"
    assert rung(2, SMALL_C // 2, DOTS_K, by_columns=True) == rung(most, most + 1, 100, by_columns=True) == "dots"
    assert rung(2, SMALL_C // 2 + 1, 100, by_columns=True) != "dots"  # whose rows must not depend on m
    assert rung(most + 1, most + 1, 100, by_columns=True) != "dots"
    assert rung(2, 100, DOTS_K - 1, by_columns=True) != "dots"
    assert rung(2, 100, 100, by_columns=True, batch_invariant=True) != "dots"
    if few > 1:
        assert rung(100, few, 100) == rung(1, few, 100) == "dots"
        assert rung(100, few + 1, 100) != "dots"


def test_it_says_what_it_refuses():
    rung, most = find(CPU, "dots"), dots_columns(host(), 4)
    a, b, c = (place(np.ones(shape, "f4"), "f32", "C") for shape in ((1, 5, 60), (1, 60, most + 1), (1, 5, most + 1)))
    assert f"half of a vector, here {most}, not" in rung.refusal(problem(a, b, c))
    assert rung.refusal(problem(a, b, c)._replace(dtype="f16")) == "it is written for f32, f64, not f16"
    by_columns = problem(a, b, c)._replace(m=2, b_layout="col")
    assert rung.refusal(by_columns) == ""
    two = problem(a, b, c)._replace(n=2)
    assert "along the rows of A" in rung.refusal(two._replace(a_layout="col"))
    assert "C must be f32, not f64" in rung.refusal(two._replace(out="f64"))
    assert "no epilogue" in rung.refusal(two._replace(epilogue="relu"))
