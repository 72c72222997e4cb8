"""Products in semirings on the CPU: values next to the reference, no steps, NaN, kinds of results, refusals."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery import dispatch, verify
from gemmery.keywords import SEMIRINGS
from gemmery.ladder.cpu import CPU
from gemmery.problem import Problem
from operands import numpy_dtype

FLOATS = tuple(name for name in SEMIRINGS if name != "or_and")


def operands(m, n, k, name, seed=0, batch=(), infinite=False):
    draw = np.random.default_rng([seed, m, n, k])
    a, b = (10 * draw.standard_normal(shape) for shape in ((*batch, m, k), (k, n)))
    for x, share in ((a, 0.05), (b, 0.02)) if infinite else ():
        x[draw.random(x.shape) < share] = np.inf
        x[draw.random(x.shape) < share] = -np.inf
        x[draw.random(x.shape) < share / 10] = np.nan
    return a.astype(numpy_dtype(name)), b.astype(numpy_dtype(name))


@pytest.mark.many
@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 3), (1, 90, 40), (90, 1, 40), (70, 65, 129), (33, 20, 1500)])
@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("semiring", FLOATS)
def test_values(semiring, name, shape, infinite, sample):
    a, b = operands(*shape, name, infinite=infinite)
    for x, y in sample(((a, b), (np.asfortranarray(a), b[:, ::-1]), (a[::-1], np.asfortranarray(b))), 3):
        checked = verify.check_semiring(gm.matmul(x, y, semiring=semiring), x, y, semiring)
        assert checked.error_over_bound <= 1, checked


@pytest.mark.parametrize("semiring", FLOATS)
def test_batches_vectors_and_out(semiring):
    a, b = operands(20, 30, 40, "f32", batch=(3, 2))
    c = gm.matmul(a, b, semiring=semiring)
    assert verify.check_semiring(c, a, b, semiring).error_over_bound <= 1
    single = gm.matmul(a[1, 1], b, semiring=semiring)
    assert np.array_equal(c[1, 1], single)
    assert np.allclose(gm.matmul(a[1, 1, 4], b, semiring=semiring), single[4], rtol=1e-5)
    assert np.allclose(gm.matmul(a[1, 1], b[:, 4], semiring=semiring), single[:, 4], rtol=1e-5)
    assert np.allclose(gm.matmul(a[1, 1, 4], b[:, 5], semiring=semiring), single[4, 5], rtol=1e-5)
    for out in (
        np.empty((20, 30), np.float32, order="F"),
        np.empty((40, 60), np.float32)[::2, ::2],
        np.empty((20, 30)),
    ):
        assert gm.matmul(a[1, 1], b, semiring=semiring, out=out) is out
        assert np.array_equal(out, single)
    wide = gm.matmul(a, b, semiring=semiring, dtype="float64")
    assert wide.dtype == np.float64


@pytest.mark.parametrize(("semiring", "least"), [(name, -np.inf) for name in FLOATS[1:]] + [("min_plus", np.inf)])
def test_without_steps_of_k_there_is_the_identity(semiring, least):
    c = gm.matmul(np.ones((3, 0)), np.ones((0, 4)), semiring=semiring)
    assert c.shape == (3, 4)
    assert (c == least).all()
    assert gm.matmul(np.ones((0, 3)), np.ones((3, 4)), semiring=semiring).shape == (0, 4)


def test_nan_is_left_out_but_by_log_sum_exp():
    a, b = np.array([[np.nan, 1.0], [np.nan, np.nan]]), np.array([[1.0], [2.0]])
    assert gm.matmul(a, b, semiring="min_plus").ravel().tolist() == [3.0, np.inf]
    assert gm.matmul(a, b, semiring="max_times").ravel().tolist() == [2.0, -np.inf]
    assert np.isnan(gm.matmul(a, b, semiring="log_sum_exp")).all()


def test_sums_of_exponentials_neither_overflow_nor_vanish():
    """Rows whose largest element meets the smallest of a column: exponentials of both have no common scale."""
    a, b = np.array([[0.0, -2000.0], [1e300, 0.0]]), np.array([[-3000.0, 1.0], [0.0, 5.0]])
    expected = [[-2000.0, 1.0], [1e300, 1e300]]
    assert np.allclose(gm.matmul(a, b, semiring="log_sum_exp"), expected, rtol=1e-15, atol=0)


def test_or_and_is_the_product_of_bools():
    draw = np.random.default_rng(0)
    a, b = draw.random((40, 50)) < 0.1, draw.random((50, 60)) < 0.1
    assert np.array_equal(gm.matmul(a, b, semiring="or_and"), a @ b)


def test_paths_of_a_graph():
    """Shortest paths of at most 2^7 steps, by squaring, next to Floyd and Warshall's."""
    draw = np.random.default_rng(2)
    length = np.where(draw.random((70, 70)) < 0.1, draw.random((70, 70)), np.inf)
    np.fill_diagonal(length, 0)
    expected, paths = length.copy(), length
    for i in range(70):
        expected = np.minimum(expected, expected[:, i, None] + expected[None, i])
    for _ in range(7):
        paths = gm.matmul(paths, paths, semiring="min_plus")
    assert np.allclose(paths, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("options", "dtype", "error", "words"),
    [
        ({"semiring": "plus_min"}, "float64", gm.ArgumentError, "'plus_min' must be one of min_plus, max_plus"),
        ({"semiring": 1}, "float64", gm.ArgumentError, "semiring=1 must be one of"),
        ({"semiring": "min_plus", "bias": 1.0}, "float64", gm.ArgumentError, "'min_plus' has no bias: add it"),
        ({"semiring": "max_plus", "activation": "relu"}, "float32", gm.ArgumentError, "no activation: apply it"),
        (
            {"semiring": "min_plus", "epilogue": gm.relu},
            "float32",
            gm.ArgumentError,
            "apply the function to the result",
        ),
        ({"operands": {"b": 1.0}}, "float32", gm.ArgumentError, "those of epilogue="),
        ({"semiring": "or_and"}, "float32", gm.DTypeError, "takes bools, not float32: pass a != 0"),
        ({"semiring": "or_and", "dtype": "int32"}, "bool", gm.DTypeError, "takes bools, not int32"),
        ({"semiring": "or_and", "bias": 1}, "bool", gm.DTypeError, "bias cannot be added to a bool"),
        ({"semiring": "min_plus"}, "int64", gm.DTypeError, "takes float64, float32.*not int64: convert first"),
        ({"semiring": "log_sum_exp"}, "complex64", gm.DTypeError, "not complex64"),
    ],
)
def test_refusals(options, dtype, error, words):
    x = np.ones((4, 4), dtype)
    with pytest.raises(error, match=words):
        gm.matmul(x, x, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'semiring'"):
        gm.gemm(1.0, x, x, semiring="min_plus")


def test_explain_names_the_semiring():
    a = np.ones((64, 64), np.float32)
    text = str(gm.explain(a, a, semiring="min_plus"))
    assert "min_plus takes the place" in text
    assert "two instructions" in text
    assert "exponentials of a and b" in str(gm.explain(a, a, semiring="log_sum_exp"))


@pytest.mark.parametrize("device", ["cpu", "a100", "h200"])
def test_rungs_without_a_semiring_are_not_chosen(device):
    p = Problem(512, 512, 512, "f32", "f32", device=device, semiring="max_plus")
    assert dispatch.choice(p).rung.name == ("packed" if device == "cpu" else "simt_pipelined")
    for rung in CPU if device == "cpu" else ():
        assert rung.semirings or "f32" not in rung.dtypes or "has no max_plus" in rung.refusal(p)


def test_a_wrong_element_is_seen():
    a, b = operands(20, 30, 40, "f64")
    for semiring in FLOATS:
        c = gm.matmul(a, b, semiring=semiring)
        c[3, 4] *= 1 + 1e-9
        assert verify.check_semiring(c, a, b, semiring).worst == (3, 4)
        assert not verify.check_semiring(c, a, b, semiring).ok


def test_an_operand_that_is_resized_while_the_other_is_read():
    a = np.ones((2000, 800), np.float32)

    class Resizes:
        def __array__(self, *_, **__):
            a.resize((1, 1), refcheck=False)
            return np.ones((800, 10), np.float32)

    with pytest.raises(gm.LayoutError, match="a was resized"):
        gm.matmul(a, Resizes(), semiring="log_sum_exp")


def test_an_out_that_is_resized_while_an_option_is_read():
    a, out = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32)

    class Resizes:
        def __index__(self):
            out.resize((1, 1), refcheck=False)
            return 1

    with pytest.raises(gm.LayoutError, match="out was resized"):
        gm.matmul(a, a, out, semiring="log_sum_exp", threads=Resizes())
