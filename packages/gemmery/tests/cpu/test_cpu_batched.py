"""Batched small products on the CPU: exact shapes, every layout, the same bits as a product alone."""

from __future__ import annotations

import numpy as np
import pytest

from fences import at_page_end, survives
from gemmery import dtypes, verify
from gemmery.arrays import view
from gemmery.cpu.batched import LARGEST
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from operands import LAYOUTS, STORED, adds_bf16_in_pairs, place, problem, random

pytestmark = pytest.mark.sampled(3)

RUNG = find(CPU, "batched")
SHAPES = [
    (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4), (8, 8, 8), (16, 16, 16), (32, 32, 32), (31, 29, 32),
    (1, 5, 3), (5, 1, 3), (3, 5, 1), (2, 3, 0), (7, 17, 5), (25, 9, 13), (3, 4, 6), (5, 3, 3),
]  # fmt: skip
FEW = [(3, 3, 3), (4, 4, 4), (5, 15, 7), (1, 6, 4), (16, 3, 9)]


def multiply(a, b, c, epilogue="", **options):
    """Run the rung on what `place` gives, and see that nothing else changed."""
    asked = problem(a, b, c, epilogue)
    assert RUNG.refuses(asked) == ""
    RUNG.build(asked, RUNG.default)(a.view, b.view, c.view, **options)
    assert a.untouched()
    assert b.untouched()
    assert c.untouched_around()
    return c.array


def operands(m, n, k, dtype, layout="C", stored="C", batch=3, out=None):
    return (
        place(random((batch, m, k), dtype, 0), dtype, layout),
        place(random((batch, k, n), dtype, 1), dtype, layout),
        place(random((batch, m, n), out or dtype, 2), out or dtype, stored),
    )


@pytest.mark.many
@pytest.mark.parametrize("dtype", RUNG.dtypes)
def test_every_shape(dtype):
    largest = LARGEST // 2 if dtype[0] == "c" else LARGEST
    for m, n, k in (shape for shape in SHAPES if max(shape) <= largest):
        a, b, c = operands(m, n, k, dtype)
        verify.require(multiply(a, b, c), a.array, b.array)


@pytest.mark.many
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", RUNG.dtypes)
def test_every_layout_of_a_and_b(dtype, layout):
    for m, n, k in FEW:
        a, b, c = operands(m, n, k, dtype, layout)
        verify.require(multiply(a, b, c), a.array, b.array)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "int8"])
def test_every_layout_of_c_scaled(dtype, stored):
    for m, n, k in FEW:
        a, b, c = operands(m, n, k, dtype, "C", stored)
        old = c.array.copy()
        verify.require(multiply(a, b, c, alpha=-2, beta=3), a.array, b.array, alpha=-2, beta=3, c=old)


def test_one_row_whose_elements_are_apart():
    a, b, _ = operands(1, 6, 4, "f32")
    c = place(random((3, 1, 6), "f32", 2), "f32", "strided")
    verify.require(multiply(a, b, c), a.array, b.array)


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
    a, b, c = operands(5, 7, 9, dtype, out=out)
    verify.require(multiply(a, b, c), a.array, b.array)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "complex64"])
@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize("one", ["a", "b", "neither"])
def test_one_matrix_for_the_whole_batch(dtype, layout, one):
    a = place(random((4, 4, 4), dtype, 0), dtype, layout, one_for_all=one == "a")
    b = place(random((4, 4, 4), dtype, 1), dtype, layout, one_for_all=one == "b")
    c = place(random((4, 4, 4), dtype, 2), dtype)
    verify.require(multiply(a, b, c), a.array, b.array)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_beta_zero_does_not_read_c(dtype, alpha):
    for m, n, k in FEW:
        a, b, c = operands(m, n, k, dtype)
        c.array[...] = np.nan
        verify.require(multiply(a, b, c, alpha=alpha), a.array, b.array, alpha=alpha)


def test_bias_and_activation():
    a, b, c = operands(5, 19, 7, "f32")
    bias = random((19,), "f32", 3)
    result = multiply(a, b, c, "bias+relu", bias=view(bias))
    verify.require(result, a.array, b.array, bias=bias, activation="relu")
    assert np.any(result == 0)
    result = multiply(a, b, c, "bias", bias=view(np.broadcast_to(bias[:1], 19)))
    verify.require(result, a.array, b.array, bias=bias[:1])


def test_the_bias_of_bytes_has_four():
    a, b, c = operands(5, 19, 7, "int8")
    bias = random((19,), "int32", 3)
    verify.require(multiply(a, b, c, "bias", bias=view(bias)), a.array, b.array, bias=bias)


@pytest.mark.many
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "complex64"])
def test_a_product_has_the_same_bits_alone_and_in_a_batch(dtype):
    packed = find(CPU, "packed")
    for m, n, k in (shape for shape in SHAPES if max(shape) <= 16):
        a, b, c = operands(m, n, k, dtype)
        together = multiply(a, b, c).copy()
        packed.build(problem(a, b, c), packed.default)(a.view, b.view, c.view)
        assert np.array_equal(together, c.array)


def bits(rung, a, b, c, epilogue, **options):
    asked = problem(a, b, c, epilogue, "alpha" in options)
    rung.build(asked, rung.default)(a.view, b.view, c.view, **options)
    return c.array.tobytes()


@pytest.mark.many
@pytest.mark.parametrize("epilogue", ["", "bias+relu"])
@pytest.mark.parametrize("layout", ["C", "F"])
@pytest.mark.parametrize("dtype", RUNG.dtypes)
def test_it_has_the_bits_of_the_kernels_for_every_shape(dtype, layout, epilogue):
    """So a product keeps its bits when this kernel replaces one of those. Dot products of bfloat16 sum in pairs."""
    if (dtype == "bf16" and adds_bf16_in_pairs()) or (epilogue and dtype[0] != "f"):
        pytest.skip("sums in pairs, or no epilogue")
    rungs = [find(CPU, name) for name in ("packed", "direct")]
    for shape in [(3, 3, 3), (5, 9, 7), (13, 11, 16)]:
        bias = {"bias": view(random((shape[1],), dtypes.get(dtype).accumulator, 4))} if epilogue else {}
        for options in ({}, {"alpha": 0.7, "beta": 0.3}) if dtype[0] == "f" else ({},):
            wanted = bits(RUNG, *operands(*shape, dtype, layout), epilogue, **bias, **options)
            for rung in rungs:
                a, b, c = operands(*shape, dtype, layout)
                if dtype in rung.dtypes and not rung.refuses(problem(a, b, c, epilogue, bool(options))):
                    assert bits(rung, a, b, c, epilogue, **bias, **options) == wanted, (rung.name, shape, options)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_batch(threads):
    a, b, c = operands(4, 4, 4, "f32", batch=20000)
    multiply(a, b, c, threads=threads)
    expected = np.matmul(a.array.astype("f8"), b.array.astype("f8"))
    assert np.all(np.abs(c.array - expected) <= 4 * 2.0**-24 * 4 * np.abs(a.array).max() * np.abs(b.array).max())


@pytest.mark.process
@pytest.mark.parametrize("dtype", ["f32", "complex64"])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 3, 3), (4, 4, 4), (5, 7, 9), (13, 15, 14)])
def test_nothing_past_the_last_element_is_read(m, n, k, dtype):
    shapes = ((2, m, k), (2, k, n), (2, m, n))
    a, b, c = (at_page_end(random(shape, dtype, seed)) for seed, shape in enumerate(shapes))
    kernel = RUNG.build(Problem(m, n, k, dtype, dtype, 2), RUNG.default)
    assert survives(lambda: kernel(view(a), view(b), view(c)))
    assert survives(lambda: kernel(view(a), view(b), view(c), alpha=2.0, beta=1.0))
    a, b = (at_page_end(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2) for x in (a, b))
    turned = RUNG.build(Problem(m, n, k, dtype, dtype, 2, "col", "col"), RUNG.default)
    assert survives(lambda: kernel(view(a), view(b), view(c)))
    assert survives(lambda: turned(view(a), view(b), view(c)))


def test_what_it_refuses():
    assert f"at most {LARGEST}" in RUNG.refuses(Problem(LARGEST + 1, 2, 2, "f32", "f32", 5))
    assert f"{LARGEST // 2} if complex" in RUNG.refuses(Problem(4, LARGEST // 2 + 1, 4, "complex64", "complex64", 5))
    assert "gemv" in RUNG.refuses(Problem(32, 1, 9, "f32", "f32", 5))
    assert "use packed" in RUNG.refuses(Problem(4, 4, 4, "complex64", "complex64", 5, scaled=True))
    assert "adjacent" in RUNG.refuses(Problem(4, 4, 4, "f32", "f32", 5, c_layout="any"))
    assert RUNG.refuses(Problem(4, 4, 4, "f32", "f32", 5)) == ""
