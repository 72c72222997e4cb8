"""Arguments that matmul, gemm and gemv refuse: which error it is, and what it says."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from operands import random


@pytest.mark.parametrize(
    ("one", "two", "word"),
    [
        ((3,), (4,), "3.*4"),
        ((2, 3), (4,), "only"),
        ((2, 3), (2, 3), r"transpose the first or the second\?$"),
        ((2, 3), (2, 5), r"transpose the first\?$"),
        ((3,), (5, 3), r"transpose the second\?$"),
        ((4,), (3, 5), "must be equal$"),  # where no transposition helps
        ((), (3,), "scalar"),
        ((3,), (), "scalar"),
        ((2, 5, 3), (4, 3, 2), "broadcast"),
    ],
)
def test_shapes_that_do_not_fit_are_value_errors(one, two, word):
    out = np.full((5, 5), 7.0)
    with pytest.raises(gm.ShapeError, match=f"(?s){word}") as caught:
        gm.matmul(np.ones(one), np.ones(two), out=out)
    assert isinstance(caught.value, ValueError)
    assert np.all(out == 7)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("f64", "float32"), ("f32", "float16"), ("int32", "int8"), ("int8", "uint8"), ("f32", "int64"),
     ("complex64", "float32"), ("f16", ml_dtypes.bfloat16),
     ("bf16", "float16"), ("int64", ml_dtypes.bfloat16)],
)  # fmt: skip
def test_a_narrower_dtype_is_a_type_error(name, dtype):
    a = random((3, 3), name, 1)
    with pytest.raises(gm.DTypeError, match=r"cannot represent every.*wider"):
        gm.matmul(a, a, dtype=dtype)


def test_a_dtype_that_is_none_is_a_type_error():
    for wrong in ("floaty", "object", bool, "S3"):
        with pytest.raises(gm.DTypeError):
            gm.matmul(np.eye(2), np.eye(2), dtype=wrong)


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda i, x: gm.gemm(0.5, i, i), gm.ArgumentError, "alpha must be an integer|beta must be an integer"),
        (
            lambda i, x: gm.gemm(1, i, i, np.nan, i),
            gm.ArgumentError,
            "alpha must be an integer|beta must be an integer",
        ),
        (
            lambda i, x: gm.gemm(1, i, i, np.inf, i),
            gm.ArgumentError,
            "alpha must be an integer|beta must be an integer",
        ),
        (lambda i, x: gm.gemm("2", i, i), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(1j, i, i), gm.ArgumentError, "alpha must be an integer|beta must be an integer"),
        (lambda i, x: gm.gemm(1j, x, x), gm.ArgumentError, "complex"),
        (lambda i, x: gm.gemm("two", x, x), gm.ArgumentError, r"alpha must be a number \(got 'two'\)"),
        (lambda i, x: gm.gemm(1, x, x, 1), gm.ArgumentError, "needs c"),
        (lambda i, x: gm.gemv(x, x[0], beta=1), gm.ArgumentError, "needs y.*pass y"),
        (lambda i, x: gm.gemm(1, x, x, 1, x[:2]), gm.ShapeError, "must be equal"),
        (lambda i, x: gm.gemm(1, x, x[0]), gm.ShapeError, "gemv"),
        (lambda i, x: gm.gemv(x, x), gm.ShapeError, "matmul"),
        (lambda i, x: gm.gemv(x, x[0], x[0, :2], beta=1), gm.ShapeError, "must be equal"),
        (lambda i, x: gm.gemm(1, i, i, 1, x, out=i), gm.DTypeError, "Cannot cast"),
        (lambda i, x: gm.matmul(x, x, threads=0), gm.ArgumentError, "threads=0"),
        (lambda i, x: gm.matmul(x, x, threads=1.5), gm.ArgumentError, "threads=1.5"),
        (lambda i, x: gm.matmul(x, x, threads=True), gm.ArgumentError, "threads=True"),
        (lambda i, x: gm.gemm(1, x, x, threads=-1), gm.ArgumentError, "threads=-1"),
        (lambda i, x: gm.set_num_threads(0), gm.ArgumentError, "threads=0"),
        (lambda i, x: gm.matmul(x, x, activation="tanh"), gm.ArgumentError, "relu, gelu, silu"),
        (lambda i, x: gm.matmul(x, x, activation=np.array(["relu"])), gm.ArgumentError, "relu, gelu, silu"),
        (lambda i, x: gm.matmul(i, i, activation="relu"), gm.DTypeError, "floating"),
        (lambda i, x: gm.matmul(x, x, bias=np.zeros(2)), gm.ShapeError, r"shape \(3,\)"),
        (lambda i, x: gm.matmul(x, x, bias=np.zeros((3, 3))), gm.ShapeError, r"shape \(3,\)"),
        (lambda i, x: gm.matmul(i, i, bias=np.zeros(3)), gm.DTypeError, "bias is float64"),
        (lambda i, x: gm.matmul(x, x, bias="x"), gm.DTypeError, "bias is a str; pass an array"),
        (lambda i, x: gm.gemm("nan", x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm("1_0", x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(b"2", x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(np.array([2.0]), x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(None, x, x), gm.ArgumentError, "alpha must be a number"),
        (lambda i, x: gm.gemm(10**400, x, x), gm.ArgumentError, r"below 2\*\*1024.*got 1000"),
        (lambda i, x: gm.gemm(1, x, x, -(10**5000), x), gm.ArgumentError, r"beta must be.*below 2\*\*1024"),
        (lambda i, x: gm.gemm(1.5, i, i), gm.ArgumentError, r"integer for int64 operands \(got 1.5\)"),
        (lambda i, x: gm.matmul(x.astype(object), x), gm.DTypeError, "object"),
        (lambda i, x: gm.matmul(x, "ab"), gm.DTypeError, "str"),
        (lambda i, x: gm.explain(x[:0], x), gm.ShapeError, "nothing to multiply"),
        (lambda i, x: gm.explain(x, x, threads=0), gm.ArgumentError, "threads=0"),
        (lambda i, x: gm.explain(x, x, activation="tanh"), gm.ArgumentError, "relu, gelu, silu"),
    ],
)
def test_wrong_arguments_are_named(call, error, word):
    whole, x = np.ones((3, 3), int), np.ones((3, 3))
    with pytest.raises(error, match=word) as caught:
        call(whole, x)
    assert isinstance(caught.value, gm.GemmeryError)
    assert np.all(whole == 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a: gm.matmul(a, "b"), "^b is a str; pass an array"),
        (lambda a: gm.matmul(a, a, out="c"), "^out is a str; pass an array"),
        (lambda a: gm.gemm(1.0, "a", a), "^a is a str"),
        (lambda a: gm.matmul(a, a, out=np.zeros((4, 4))), r"out has shape \(4, 4\), and the product \(3, 3\)"),
        (lambda a: gm.matmul(a, a, out=(a, a)), "out is a tuple of 2: pass one array"),
        (lambda a: gm.matmul(a, a, order="F"), "matmul has no order='F': pass an out of that order"),
        (lambda a: gm.matmul(a, a, axes=[(0, 1)] * 3), "matmul has no axes=.*np.moveaxis"),
        (lambda a: gm.matmul(a, a, transposed=True), "unexpected keyword argument 'transposed'"),
        (lambda a: gm.gemm(a, a), r"takes alpha before a and b: call gm.gemm\(1.0, a, b\)"),
        (lambda a: gm.warm(["f32", None]), "a dtype is None: name a type"),
        (lambda a: gm.dot, "use gm.matmul"),
        (lambda a: gm.bmm, "use gm.matmul"),
        (lambda a: gm.multi_dot, "use gm.einsum"),
    ],
)
def test_a_mistake_of_a_newcomer_is_told_the_way_out(call, words):
    for _ in range(2):  # the second time from the compiled entry
        with pytest.raises((gm.GemmeryError, TypeError, AttributeError), match=words):
            call(np.ones((3, 3)))
        gm.matmul(np.ones((3, 3)), np.ones((3, 3)))


def test_jax_tracing_is_told_of_gemmery_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    jax.config.update("jax_cuda_visible_devices", "0")
    with pytest.raises(gm.LayoutError, match=r"^a is a DynamicJaxprTracer: JAX is tracing.*gemmery\.jax\.matmul"):
        jax.jit(gm.matmul)(np.ones((2, 2)), np.ones((2, 2)))
