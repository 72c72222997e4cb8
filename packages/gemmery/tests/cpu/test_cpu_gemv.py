"""GEMV on the CPU: every element type and layout, against the reference, between guard zones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fences import at_page_end, survives
from gemmery import verify
from gemmery.arrays import view
from gemmery.cpu.ukernel import SHORT
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from operands import LAYOUTS, place, random

RUNG = find(CPU, "gemv")
SMALL = {"mc": 24, "kc": 40}  # several blocks in small products
SHAPES = [(0, 5), (5, 0), (1, 1), (1, 131), (7, 3), (8, 16), (31, 65), (67, 33), (129, 97)]
EVERY = (*LAYOUTS, "strided F", "thirds")


def multiply(a, b, c, config=RUNG.default, epilogue="", **options):
    """Run the rung on what `place` gives, and see that nothing else changed."""
    (_, m, k), n = a.array.shape, b.array.shape[2]
    RUNG.build(Problem(m, n, k, a.name, c.name, epilogue=epilogue), config)(a.view, b.view, c.view, **options)
    assert a.untouched()
    assert b.untouched()
    assert c.untouched_around()
    return c.array[0]


def vector(k, dtype, layout="C", seed=1):
    return place(random((1, k, 1), dtype, seed), dtype, layout)


@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize("dtype", RUNG.dtypes)
def test_a_column_and_a_row_in_every_layout(dtype, layout):
    for (m, k), config in itertools.product(SHAPES, (RUNG.default, SMALL)):
        a, x = place(random((1, m, k), dtype, 0), dtype, layout), vector(k, dtype)
        y = vector(m, dtype, seed=2)
        verify.require(multiply(a, x, y, config), a.array[0], x.array[0])
        x, b = place(random((1, 1, m), dtype, 1), dtype), place(random((1, m, k), dtype, 0), dtype, layout)
        y = place(random((1, 1, k), dtype, 2), dtype)
        verify.require(multiply(x, b, y, config), x.array[0], b.array[0])


@pytest.mark.parametrize("x_layout", ["C", "strided", "thirds", "reversed", "padded", "misaligned"])
@pytest.mark.parametrize("y_layout", ["C", "strided", "thirds", "reversed", "padded", "misaligned"])
def test_vectors_of_any_stride(x_layout, y_layout):
    a, x, y = place(random((1, 37, 53), "f32", 0), "f32"), vector(53, "f32", x_layout), vector(37, "f32", y_layout, 2)
    old = y.array[0].copy()
    result = multiply(a, x, y, alpha=-0.5, beta=2.0)
    verify.require(result, a.array[0], x.array[0], alpha=-0.5, beta=2.0, c=old)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        ("f16", "f32"),
        ("bf16", "f32"),
        ("f32", "f64"),
        ("int8", "int32"),
        ("uint16", "uint64"),
        ("complex64", "complex128"),
    ],
)
def test_a_wider_result(dtype, out):
    a, x, y = place(random((1, 33, 45), dtype, 0), dtype), vector(45, dtype), vector(33, out, seed=2)
    verify.require(multiply(a, x, y), a.array[0], x.array[0])


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "complex64"])
@pytest.mark.parametrize("layout", ["C", "F", "thirds"])
def test_beta_zero_does_not_read_y(dtype, layout):
    a, x, y = place(random((1, 21, 19), dtype, 0), dtype, layout), vector(19, dtype), vector(21, dtype)
    y.array[...] = np.nan
    verify.require(multiply(a, x, y, alpha=2.0), a.array[0], x.array[0], alpha=2.0)


@pytest.mark.parametrize(("alpha", "beta"), [(3, -2), (1, 1), (2 - 1j, -0.5j)])
@pytest.mark.parametrize("dtype", ["f32", "f16", "int32", "int8", "complex64", "complex128"])
@pytest.mark.parametrize("layout", ["C", "thirds"])
def test_alpha_and_beta(dtype, layout, alpha, beta):
    if isinstance(alpha, complex) and dtype[0] != "c":
        pytest.skip("a real product has real scalars")
    a, x, y = place(random((1, 70, 19), dtype, 0), dtype), vector(19, dtype), vector(70, dtype, layout, 2)
    old = y.array[0].copy()
    result = multiply(a, x, y, alpha=alpha, beta=beta)
    verify.require(result, a.array[0], x.array[0], alpha=alpha, beta=beta, c=old)


def test_complex_infinities_stay_where_they_are():
    a, x, y = place(random((1, 9, 5), "complex64", 0), "complex64"), vector(5, "complex64"), vector(9, "complex64")
    a.array[0, 4, 2] = np.inf
    a.before = a.memory.copy()
    result = multiply(a, x, y, alpha=2)
    assert np.all(np.isfinite(np.delete(result, 4)))
    assert np.isinf(result[4]).all()


@pytest.mark.parametrize("layout", ["C", "reversed"])
def test_bias_and_activation(layout):
    x, b = place(random((1, 1, 5), "f32", 1), "f32"), place(random((1, 5, 70), "f32", 0), "f32", layout)
    y = place(random((1, 1, 70), "f32", 2), "f32")
    bias = random((70,), "f32", 3)
    result = multiply(x, b, y, epilogue="bias+relu", bias=view(bias))
    verify.require(result, x.array[0], b.array[0], bias=bias, activation="relu")
    assert np.any(result == 0)
    result = multiply(x, b, y, epilogue="bias", bias=view(np.broadcast_to(bias[:1], 70)))
    verify.require(result, x.array[0], b.array[0], bias=bias[:1])


def test_a_complex_bias():
    x, b = place(random((1, 1, 5), "complex64", 1), "complex64"), place(random((1, 5, 70), "complex64", 0), "complex64")
    y = place(random((1, 1, 70), "complex64", 2), "complex64")
    bias = random((70,), "complex64", 3)
    verify.require(multiply(x, b, y, epilogue="bias", bias=view(bias)), x.array[0], b.array[0], bias=bias)


def test_the_bias_of_bytes_has_four():
    x, b = place(random((1, 1, 5), "int8", 1), "int8"), place(random((1, 5, 70), "int8", 0), "int8")
    y = place(random((1, 1, 70), "int8", 2), "int8")
    bias = random((70,), "int32", 3)
    verify.require(multiply(x, b, y, epilogue="bias", bias=view(bias)), x.array[0], b.array[0], bias=bias)


@pytest.mark.parametrize("layout", ["C", "padded F", "thirds"])
def test_the_bias_of_a_column_is_one_number(layout):
    a, x, y = place(random((1, 40, 5), "f32", 0), "f32"), vector(5, "f32"), vector(40, "f32", layout)
    bias = np.array([3.0, np.nan], "f4")
    result = multiply(a, x, y, epilogue="bias", bias=view(bias[:1]))
    verify.require(result, a.array[0], x.array[0], bias=bias[:1])


@pytest.mark.process
@pytest.mark.many
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 33, 63])
@pytest.mark.parametrize("dtype", ["f32", "complex64"])
def test_nothing_past_the_last_element_is_read(dtype, step, columns):
    stored = at_page_end(random((9, step * (columns - 1) + 1), dtype, 0))
    a, x = stored[None, :, ::step], at_page_end(random((1, columns, 1), dtype, 1))
    y = at_page_end(np.zeros((1, 9, 1), a.dtype))
    kernel = RUNG.build(Problem(9, 1, columns, dtype, dtype), RUNG.default)
    assert survives(lambda: kernel(view(a), view(x), view(y)))
    x, y = at_page_end(random((1, 1, 9), dtype, 1)), at_page_end(np.zeros((1, 1, columns), a.dtype))
    kernel = RUNG.build(Problem(1, columns, 9, dtype, dtype), RUNG.default)
    assert survives(lambda: kernel(view(x), view(a), view(y)))


def test_an_element_is_summed_in_one_order_wherever_it_lies():
    values, x = random((1, 23, 301), "f32", 0), vector(301, "f32")
    whole = multiply(place(values, "f32"), x, vector(23, "f32"))
    for i in range(23):
        assert multiply(place(values[:, i : i + 1], "f32"), x, vector(1, "f32"))[0] == whole[i]


@pytest.mark.parametrize("dtype", ["f32", "f16", "complex128"])
@pytest.mark.parametrize("layout", ["C", "F"])
def test_short_vectors_are_summed_as_long_ones(dtype, layout):
    """Up to SHORT numbers the kernel uses its stack and not a workspace."""
    for k in (SHORT - 1, SHORT):
        values, x = random((1, SHORT + 1, k), dtype, 0), vector(k, dtype, "strided")
        whole = multiply(place(values, dtype, layout), x, vector(SHORT + 1, dtype))
        verify.require(whole, values[0], x.array[0])
        short = multiply(place(values[:, :SHORT], dtype, layout), x, vector(SHORT, dtype))
        assert short.tobytes() == whole[:SHORT].tobytes()
    problems = [Problem(SHORT, 1, SHORT, dtype, dtype), Problem(1, SHORT + 1, SHORT, dtype, dtype)]
    rooms = [RUNG.build(p, RUNG.default).blocks(p.m, p.n, p.k).workspace for p in problems]
    assert rooms[0] == 0 < rooms[1]


def test_rows_and_columns_with_and_without_bias_share_one_image():
    shapes = [(70, 1, 5), (1, 70, 5), (1, 1, 9), (5000, 1, 5000), (1, 5000, 5000)]
    problems = [Problem(*shape, "f32", "f32", epilogue=epilogue) for shape in shapes for epilogue in ("", "bias")]
    assert len({RUNG.build(problem, RUNG.default).address for problem in problems}) == 1


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "int8", "complex64", "complex128"])
@pytest.mark.parametrize("layout", ["C", "strided"])
def test_rows_are_summed_alike_alone_and_with_others(dtype, layout):
    """The sums of several rows share additions."""
    values, x = random((1, 23, 71), dtype, 0), vector(71, dtype)
    whole = multiply(place(values, dtype, layout), x, vector(23, dtype))
    for i in range(23):
        alone = multiply(place(values[:, i : i + 1], dtype, layout), x, vector(1, dtype))
        assert alone[0].tobytes() == whole[i].tobytes()


def test_what_it_refuses():
    assert "m or n must be 1" in RUNG.refuses(Problem(2, 2, 2, "f32", "f32"))
    assert "row-major" in RUNG.refuses(Problem(1, 5, 2, "f32", "f32", c_layout="col", epilogue="bias"))
    assert "wider type of the same kind" in RUNG.refuses(Problem(2, 1, 2, "f32", "f16"))
    assert RUNG.refuses(Problem(2, 1, 2, "f32", "f32")) == ""
