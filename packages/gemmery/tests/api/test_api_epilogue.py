"""Products with an epilogue that is a Python function, against the graph in higher precision."""

import functools
import sys
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery import verify
from gemmery.api import finished
from gemmery.api.epilogue_terms import shapes_of, types_of
from gemmery.api.options import viewed
from gemmery.epilogues.random_epilogues import random_epilogue
from gemmery.epilogues.trace import Epilogue

pytestmark = pytest.mark.sampled(3)

TYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int16, np.int32]


def numbers(draw, shape, dtype):
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return draw.integers(0 if dtype.kind == "u" else -5, 6, shape).astype(dtype)
    return (draw.standard_normal(shape) / max(1, shape[-1]) ** 0.25).astype(dtype)


def checked(results, epilogue, a, weights, operands):
    """Assert that results are within the bound of the epilogue's graph."""
    results = results if isinstance(results, tuple) else (results,)
    x, ys = viewed("a", a), [viewed("b", weight) for weight in weights]
    shapes, types = shapes_of(x, ys), types_of(x, ys, None)
    call = finished._prepared(epilogue, len(weights), operands, shapes, *types)
    assert len(results) == len(call.graph.outputs)
    for result, output in zip(results, call.graph.outputs, strict=True):
        assert result.shape == shapes.of(output.kind)
    wide = {name: value.astype(np.float64) if hasattr(value, "astype") else value for name, value in operands.items()}
    for one in verify.check_outputs(results, call.graph, a, weights, wide):
        assert one.error_over_bound <= 1, one


@pytest.mark.many(3)
@pytest.mark.parametrize("seed", range(120))
def test_random_epilogues_of_random_products(seed):
    draw = np.random.default_rng(seed)
    dtype = TYPES[seed % len(TYPES)]
    m, n, k = (int(side) for side in draw.integers(1, 70, 3))
    batch = tuple(int(x) for x in draw.integers(1, 4, int(draw.choice([0, 0, 1, 2]))))
    names, sums = ["p", "q", "r"][: int(draw.integers(0, 4))], int(draw.choice([1, 1, 2]))
    _, epilogue = random_epilogue(draw, names, sums)
    a = numbers(draw, (*batch, m, k), dtype)
    weights = [numbers(draw, (*(batch if draw.random() < 0.5 else ()), k, n), dtype) for _ in range(sums)]
    weights = weights if sums == 1 or weights[0].ndim == weights[1].ndim else [weights[0]] * 2
    orders = [lambda x: x, np.asfortranarray, lambda x: x[..., ::-1, :], lambda x: np.repeat(x, 2, -1)[..., ::2]]
    a, weights = orders[draw.integers(4)](a), [orders[draw.integers(4)](w) for w in weights]
    operands = {}
    for name in names:
        shapes = [(), (n,), (1, n), (m, 1), (m, n), (*batch, m, n), (*batch, 1, 1), (1,) * len(batch) + (m, n)]
        shape = shapes[draw.integers(len(shapes))]
        kind = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.bool_][draw.integers(6)]
        value = (draw.standard_normal(shape) * 3).astype(kind)
        operands[name] = float(value) if shape == () and draw.random() < 0.5 else orders[draw.integers(2)](value)
    b = tuple(weights) if sums == 2 else weights[0]
    results = gm.matmul(a, b, epilogue=epilogue, operands=operands, threads=int(draw.integers(1, 4)))
    checked(results, epilogue, a, weights, operands)


FUNCTIONS = {
    "silu": gm.silu, "gelu": gm.gelu, "relu": gm.relu, "sigmoid": gm.sigmoid, "erf": gm.erf, "rsqrt": gm.rsqrt,
    "rint": gm.rint, "exp": np.exp, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt, "negative": np.negative,
    "absolute": np.absolute, "f16": lambda c: gm.cast(c, "float16") * 1, "bf16": lambda c: gm.cast(c, "bfloat16") * 1,
    "e4m3": lambda c: gm.cast(c, "float8_e4m3") * 1, "e5m2": lambda c: gm.cast(c, "float8_e5m2") * 1,
    "int8": lambda c: gm.cast(c, "int8") * 1, "f32": lambda c: gm.cast(c, "float32") * 1,
}  # fmt: skip


@pytest.mark.many(3)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_over_all_magnitudes(name, dtype):
    draw = np.random.default_rng(3)
    powers = draw.uniform(*((-46, 38) if dtype == np.float32 else (-320, 308)), 3000)
    x = np.concatenate([
        *(draw.standard_normal(3000) * spread for spread in (1e-3, 0.3, 1, 5, 30, 300)), draw.uniform(0.5, 2, 3000),
        10.0**powers * draw.choice([-1, 1], 3000), np.arange(-300, 300) / 8, np.arange(-800, 800) * 2.0**-11,
        [0.0, -0.0, np.inf, -np.inf, np.nan],
    ]).astype(dtype)  # fmt: skip
    x = x[-(len(x) // 61 * 61) :].reshape(-1, 61)
    function = FUNCTIONS[name]
    epilogue = Epilogue(lambda c, x: function(c * 0 + x))
    a, b = np.ones((len(x), 1), dtype), np.zeros((1, 61), dtype)
    checked(gm.matmul(a, b, epilogue=epilogue, operands={"x": x}), epilogue, a, [b], {"x": x})


def test_nan_and_infinity_go_where_numpy_puts_them():
    values = np.array([[1.0, np.nan, np.inf, -np.inf, 0.0, -2.0]], np.float32)
    one = np.ones((1, 1), np.float32)

    def outputs(c, p):
        zero = c * 0 + p
        return (
            gm.maximum(zero, 0), gm.maximum(0, zero), gm.minimum(zero, 0), gm.minimum(0, zero), gm.relu(zero),
            gm.where(zero < 0, 1, 2), gm.where(zero != zero, 1, 2), gm.where(~(zero >= 0), 1, 2),
        )  # fmt: skip

    results = gm.matmul(one, np.zeros((1, 6), np.float32), epilogue=outputs, operands={"p": values})
    with np.errstate(invalid="ignore"):
        expected = (
            np.maximum(values, 0), np.maximum(0, values), np.minimum(values, 0), np.minimum(0, values),
            np.where(values < 0, 0, values), np.where(values < 0, 1, 2), np.where(values != values, 1, 2),
            np.where(~(values >= 0), 1, 2),
        )  # fmt: skip
    for result, want in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, want)


def test_the_examples_of_the_guide():
    draw = np.random.default_rng(0)
    x, w, up, residual = (draw.standard_normal(s).astype(np.float32) for s in ((6, 8), (8, 5), (6, 5), (6, 5)))
    bias, second = draw.standard_normal(5).astype(np.float32), draw.standard_normal((8, 5)).astype(np.float32)

    @gm.epilogue
    def gated(c, up, residual, scale):
        return residual + scale * gm.silu(c) * up

    c = x @ w
    y = gm.matmul(x, w, epilogue=gated(up=up, residual=residual, scale=0.5))
    assert abs(y - (residual + 0.5 * c / (1 + np.exp(-c)) * up)).max() <= 1e-5
    y = gm.matmul(x, (w, second), epilogue=gm.swiglu)
    assert abs(y - c / (1 + np.exp(-c)) * (x @ second)).max() <= 1e-4
    y, pre = gm.matmul(x, w, epilogue=lambda c, b: (gm.gelu(c + b), c + b), operands={"b": bias})
    assert abs(pre - (c + bias)).max() <= 1e-5
    assert y.shape == pre.shape
    y, pre = gm.matmul(x, w, epilogue=lambda c, b=bias: (gm.gelu(c + b), c + b))
    assert abs(pre - (c + bias)).max() <= 1e-5


@pytest.mark.many(3)
@pytest.mark.parametrize("format_", ["int8", "float8_e4m3"])
@pytest.mark.parametrize("shape", [(5, 9, 33), (3, 4, 128), (1, 6, 1), (2, 1, 17)])
def test_rows_are_quantized_as_by_quantize_rows(format_, shape):
    m, k, n = shape
    draw = np.random.default_rng(4)
    a, b = draw.standard_normal((m, k)).astype(np.float32), draw.standard_normal((k, n)).astype(np.float32)
    a[0, 0] = np.nan if m > 4 else 0
    codes, factors = gm.matmul(a, b, epilogue=gm.quantize_rows(format_))
    want_codes, want_factors = gm.quantize_rows(gm.matmul(a, b), format_)
    assert codes.dtype == want_codes.dtype
    assert factors.dtype == np.float32
    np.testing.assert_array_equal(factors, want_factors)
    np.testing.assert_array_equal(codes.view(np.int8), want_codes.view(np.int8))


def test_statistics_of_rows():
    draw = np.random.default_rng(5)
    a, b = draw.standard_normal((2, 7, 9)), draw.standard_normal((9, 65))
    a[0, 3] = np.inf
    a[1, 2] = 1000
    with np.errstate(all="ignore"):
        c = a @ b
        largest = c.max(-1, keepdims=True)
        finite = np.where(np.isfinite(largest), largest, 0)
        expected = (
            c.sum(-1, keepdims=True), (c * c).sum(-1, keepdims=True), largest,
            np.log(np.exp(c - finite).sum(-1, keepdims=True)) + finite, np.exp(c - finite),
        )  # fmt: skip
    results = gm.matmul(
        a, b, epilogue=lambda c: (gm.row_sum(c), gm.row_sum_of_squares(c), gm.row_maximum(c), gm.row_log_sum_exp(c),
                                  np.exp(c - gm.where(abs(gm.row_maximum(c)) < np.inf, gm.row_maximum(c), 0))),
    )  # fmt: skip
    for result, want in zip(results, expected, strict=True):
        assert np.allclose(result, want, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert results[0].shape == (2, 7, 1)


def test_bits_do_not_depend_on_threads():
    draw = np.random.default_rng(6)
    a, b = draw.standard_normal((203, 50)).astype(np.float32), draw.standard_normal((50, 311)).astype(np.float32)
    once, *others = (
        gm.matmul(a, b, epilogue=lambda c: (gm.silu(c), gm.row_log_sum_exp(c)), threads=count) for count in (1, 2, 3)
    )
    for other in others:
        assert all(np.array_equal(x, y) for x, y in zip(once, other, strict=True))


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("batch", "m", "n", "k", "dtype"),
    [
        ((), 513, 1030, 90, np.float32),
        ((), 701, 700, 0, np.float32),
        ((), 600, 611, 50, np.float64),
        ((3,), 300, 500, 64, np.float16),
    ],
)
def test_large_products(batch, m, n, k, dtype):
    draw = np.random.default_rng(7)
    a, b = draw.standard_normal((*batch, m, k)).astype(dtype), draw.standard_normal((*batch, k, n)).astype(dtype)
    operands = {
        "p": draw.standard_normal(n).astype(dtype), "q": draw.standard_normal((m, 1)).astype(np.float32),
        "r": draw.standard_normal((*batch, m, n)).astype(dtype), "s": 0.5,
    }  # fmt: skip

    @gm.epilogue
    def function(c, p, q, r, s):
        return gm.silu(c * s + p) + q * r + 1e-3 * gm.row_index(c) - 1e-4 * gm.column_index(c), c

    first = gm.matmul(a, b, epilogue=function(**operands))
    checked(first, function, a, [b], operands)
    for x, y in zip(first, gm.matmul(a, b, epilogue=function(**operands)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_of_a_batch_that_is_one_product():
    draw = np.random.default_rng(8)
    a, b = draw.standard_normal((4, 200, 64)).astype(np.float32), draw.standard_normal((64, 900)).astype(np.float32)
    for shape in ((4, 200, 900), (200, 1), (4, 1, 1), (900,)):
        r = draw.standard_normal(shape).astype(np.float32)
        epilogue = Epilogue(lambda c, r: gm.silu(c) + r + gm.row_index(c))
        checked(gm.matmul(a, b, epilogue=epilogue, operands={"r": r}), epilogue, a, [b], {"r": r})
        epilogue = Epilogue(lambda c, r: gm.silu(c) + r)
        checked(gm.matmul(a, b, epilogue=epilogue, operands={"r": r}), epilogue, a, [b], {"r": r})


@pytest.mark.many(3)
@pytest.mark.parametrize("shapes", [((0, 3), (3, 4)), ((2, 3), (3, 0)), ((0, 2, 3), (3, 4)), ((2, 0), (0, 5))])
def test_empty_products(shapes):
    a, b = (np.ones(shape, np.float32) for shape in shapes)
    c, total, largest = gm.matmul(a, b, epilogue=lambda c: (c + 1, gm.row_sum(c), gm.row_maximum(c)))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(c, a @ b + 1)
    np.testing.assert_array_equal(total, (a @ b).sum(-1, keepdims=True))
    np.testing.assert_array_equal(largest, (a @ b).max(-1, keepdims=True, initial=0 if shapes[1][1] else -np.inf))


def test_vectors():
    draw = np.random.default_rng(9)
    a, b = draw.standard_normal((4, 5)), draw.standard_normal((5, 6))
    assert np.allclose(
        gm.matmul(a[0], b, epilogue=lambda c, r: c + r, operands={"r": np.arange(6.0)}), a[0] @ b + np.arange(6)
    )
    assert np.allclose(gm.matmul(a, b[:, 0], epilogue=lambda c: 2 * c), 2 * (a @ b[:, 0]))
    scalar, total = gm.matmul(a[0], b[:, 0], epilogue=lambda c: (2 * c, gm.row_sum(c)))
    assert np.allclose(scalar, 2 * (a[0] @ b[:, 0]))
    assert total.shape == (1,)


def test_out_receives_the_results():
    draw = np.random.default_rng(10)
    a, b = draw.standard_normal((7, 7)).astype(np.float32), draw.standard_normal((7, 7)).astype(np.float32)
    want, total = gm.matmul(a, b, epilogue=lambda c: (c * 2, gm.row_sum(c)))
    layouts = [np.empty((7, 7), np.float32), np.empty((7, 7), np.float32).T, np.empty((7, 14), np.float32)[:, ::2],
               np.empty((7, 9), np.float32)[:, 1:8], np.empty((7, 7), np.float64)]  # fmt: skip
    for first in layouts:
        second = np.empty((7, 1), np.float32)
        results = gm.matmul(a, b, epilogue=lambda c: (c * 2, gm.row_sum(c)), out=(first, second))
        assert results[0] is first
        assert results[1] is second
        np.testing.assert_array_equal(first, want)
        np.testing.assert_array_equal(second, total)
    own = a.copy()
    gm.matmul(own, b, epilogue=lambda c, r: c + r, operands={"r": a}, out=own)
    np.testing.assert_array_equal(own, gm.matmul(a, b, epilogue=lambda c, r: c + r, operands={"r": a}))
    residual = a.copy()
    gm.matmul(a, b, epilogue=lambda c, r: c + r, operands={"r": residual}, out=residual)
    np.testing.assert_array_equal(residual, own)


def test_results_that_share_memory_are_written_in_order():
    room = np.zeros(12, np.float32)
    outs = room[:8].reshape(2, 4), room[4:].reshape(2, 4)
    gm.matmul(np.eye(2, dtype=np.float32), np.ones((2, 4), np.float32), epilogue=lambda c: (c + 1, c * 7), out=outs)
    assert room.tolist() == [2] * 4 + [7] * 8


def test_parameters_that_are_passed_by_name():
    own = functools.partial(lambda c, scale, shift: c * scale + shift, scale=3.0)
    assert gm.matmul(np.eye(2), np.ones((2, 1)), epilogue=own, operands={"shift": 1.0}).tolist() == [[4.0], [4.0]]


def test_types_of_results():
    a = np.ones((2, 3), np.float16)
    assert gm.matmul(a, a.T, epilogue=lambda c: c).dtype == np.float16
    assert gm.matmul(a, a.T, epilogue=lambda c: c, dtype="float32").dtype == np.float32
    x, y = gm.matmul(a, a.T, epilogue=lambda c: (gm.cast(c, "float64"), gm.cast(c, "bfloat16")))
    assert (x.dtype, y.dtype) == (np.float64, ml_dtypes.bfloat16)
    i = np.full((2, 3), 100, np.int8)
    assert gm.matmul(i, i.T, epilogue=lambda c: c).tolist() == [[30000.0] * 2] * 2
    assert gm.matmul(i.astype(np.int64), i.T, epilogue=lambda c: c).dtype == np.float64


REFUSALS = [
    ({"epilogue": 3}, gm.ArgumentError, "must be a function"),
    ({"epilogue": gm.relu, "bias": 1.0}, gm.ArgumentError, "write the bias in"),
    ({"epilogue": gm.relu, "activation": "relu"}, gm.ArgumentError, "write the activation in"),
    ({"epilogue": lambda c, up: c * up}, gm.ArgumentError, "no value for its parameter 'up'"),
    ({"epilogue": lambda c, up: c * up, "operands": 3}, gm.ArgumentError, "must be a dict"),
    ({"epilogue": lambda c, up: c * up, "operands": {"dn": 3}}, gm.ArgumentError, "no operand 'dn'"),
    ({"epilogue": lambda c, up: c * up, "operands": {"up": np.ones(3)}}, gm.ShapeError, r"shape \(3,\).*\(2, 4\)"),
    ({"epilogue": lambda c, up: c * up, "operands": {"up": np.ones((4, 1))}}, gm.ShapeError, r"\(4,\).*\(2, 1\)"),
    ({"epilogue": lambda c, up: c * up, "operands": {"up": np.ones((5, 2, 4))}}, gm.ShapeError, "batch dimensions"),
    ({"epilogue": lambda c, up: c * up, "operands": {"up": np.ones(4, np.complex64)}}, gm.DTypeError, "real numbers"),
    ({"epilogue": lambda c: (c, c), "out": np.empty((2, 4))}, gm.ArgumentError, "out has 1 of the 2"),
    ({"epilogue": lambda c: c, "out": np.empty((3, 4))}, gm.ShapeError, "out has shape"),
    ({"epilogue": lambda c: c, "dtype": "int32"}, gm.DTypeError, "int32"),
    ({"epilogue": lambda c: c, "dtype": "complex128"}, gm.DTypeError, "real numbers"),
    ({"epilogue": lambda c, up: c, "operands": {"c": 3, "up": 1}}, gm.ArgumentError, "computes 'c' of a sum"),
    ({"epilogue": lambda c, up: c * up, "operands": {"up": 10**400}}, gm.ArgumentError, "beyond float64"),
    ({"epilogue": lambda c: c, "operands": {3: 1}}, gm.ArgumentError, "names of parameters"),
    ({"epilogue": lambda c: c, "scale_a": 2.0}, gm.ArgumentError, "CUDA device only"),
    ({"epilogue": lambda c: c, "precision": "tf32"}, gm.ArgumentError, "CUDA device only"),
    ({"epilogue": lambda c: c, "semiring": "min_plus"}, gm.ArgumentError, "semiring= and epilogue= exclude each other"),
    ({"operands": {"up": 1.0}}, gm.ArgumentError, "those of epilogue="),
    ({"operands": {}}, gm.ArgumentError, "those of epilogue="),
]


@pytest.mark.many(3)
@pytest.mark.parametrize(("options", "error", "words"), REFUSALS)
def test_wrong_arguments_are_refused(options, error, words):
    for call in (gm.matmul, gm.explain)[: 1 if "out" in options else 2]:
        with pytest.raises(error, match=words):
            call(np.ones((2, 3)), np.ones((3, 4)), **options)


@pytest.mark.many(3)
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_sums_of_integers_are_converted(dtype):
    low, top = max(np.iinfo(dtype).min, -(2**20)), min(np.iinfo(dtype).max, 2**20)
    a, b = np.random.default_rng(5).integers(low, top, (2, 7, 7), dtype)
    total = (a.astype(np.int64) @ b.astype(np.int64)).astype(f"{'u' * (low == 0)}int{64 if '64' in dtype else 32}")
    result = gm.matmul(a, b, epilogue=lambda c: c * 0.5)
    assert result.dtype == (np.float64 if a.itemsize > 2 else np.float32)
    np.testing.assert_array_equal(result, total.astype(result.dtype) / 2)


def test_wrong_weights_are_refused():
    a = np.ones((2, 3))
    with pytest.raises(gm.ShapeError, match="must have one shape"):
        gm.matmul(a, (np.ones((3, 4)), np.ones((3, 5))), epilogue=gm.swiglu)
    with pytest.raises(gm.ArgumentError, match="a tuple of 3"):
        gm.matmul(a, (a.T, a.T, a.T), epilogue=gm.swiglu)
    with pytest.raises(gm.DTypeError, match="real numbers"):
        gm.matmul(a.astype(np.complex64), a.T, epilogue=lambda c: c)
    for call in gm.matmul, gm.explain:
        with pytest.raises(gm.ArgumentError, match="takes plain matrices"):
            call(a, gm.pack(np.ones((3, 4))), epilogue=gm.relu)
    with pytest.raises(gm.ArgumentError, match="takes plain matrices"):
        gm.matmul(np.ones((2, 64)), gm.quantize(np.ones((64, 64), np.float32), "int8"), epilogue=gm.relu)
    with pytest.raises(gm.DTypeError, match="real numbers"):
        gm.matmul(a > 0, a.T > 0, epilogue=lambda c: c)


def test_rows_of_a_batch_are_written_to_an_out_with_gaps():
    draw = np.random.default_rng(11)
    a, b = draw.standard_normal((4, 200, 64)).astype(np.float32), draw.standard_normal((64, 900)).astype(np.float32)
    out = np.full((4, 201, 900), 7, np.float32)
    gm.matmul(a, b, epilogue=gm.relu, out=out[:, :200])
    np.testing.assert_array_equal(out[:, :200], np.maximum(gm.matmul(a, b), 0))
    assert (out[:, 200] == 7).all()


def test_an_epilogue_may_be_deeper_than_the_stack_of_python():
    def chained(c, self):
        total = c
        for _ in range(3 * sys.getrecursionlimit()):
            total = total + 0.5
        return total + self

    function = gm.epilogue(chained)
    a = np.array([[1.0, 2.0]])
    assert gm.matmul(a, a.T, epilogue=function(self=3)) == 8 + 1.5 * sys.getrecursionlimit()
    assert weakref.ref(function)() is function


def test_explain_says_what_is_fused():
    x = np.ones((64, 64), np.float32)
    text = gm.explain(x, x, epilogue=lambda c: gm.silu(c + 1)).fused
    assert "2 operations, by rows" in text
    assert "1 matrices of 64 x 64" in text
    assert f"{2 * x.nbytes:,} bytes" in text
    assert "fused" in str(gm.explain(x, (x, x), epilogue=gm.swiglu))


def test_a_product_that_comes_again_runs_by_its_recipe():
    draw = np.random.default_rng(12)
    a, b, r = (draw.standard_normal((9, 9)).astype(np.float32) for _ in range(3))
    epilogue = gm.epilogue(lambda c, r, s: (gm.silu(c * s) + r, gm.row_sum(c)))
    for scale in (0.5, 2, 1e300, np.float32(3), np.array(2.0), np.array([3.0]), np.array([3.0]), 0.5):
        for residual in (r, r + 1, r.T, r[0], r.astype(np.float64), r[:, :1].copy()):
            results = gm.matmul(a, b, epilogue=epilogue(r=residual, s=scale))
            with np.errstate(over="ignore"):
                checked(results, epilogue, a, [b], {"r": residual, "s": scale})
    first = gm.matmul(a, b, epilogue=epilogue(r=r, s=2.0))
    second = gm.matmul(a + 1, b, epilogue=epilogue(r=r, s=2.0))
    assert not np.shares_memory(first[0], second[0])
    np.testing.assert_array_equal(second[0], gm.matmul(a + 1, b, epilogue=lambda c: gm.silu(c * 2.0) + 0.0) + r)


def test_recipes_of_two_weights_and_of_many_threads():
    draw = np.random.default_rng(13)
    a, b, d = (draw.standard_normal((31, 31)).astype(np.float32) for _ in range(3))
    epilogue = gm.epilogue(lambda c, d, s: (gm.row_sum(c * d) * s, gm.silu(c) * d))
    expected = gm.matmul(a, (b, d), epilogue=epilogue, operands={"s": 2.0})
    wrong = []

    def work(scale):
        for _ in range(200):
            results = gm.matmul(a, (b, d), epilogue=epilogue(s=float(scale)))
            same = np.array_equal(results[0], expected[0] * (scale / 2)) and np.array_equal(results[1], expected[1])
            wrong.extend([] if same else [scale])

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (2, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(epilogue.recipes) == 1


def test_calls_that_a_recipe_must_not_take():
    draw = np.random.default_rng(14)
    a, b, r = (draw.standard_normal((9, 9)).astype(np.float32) for _ in range(3))
    epilogue = gm.epilogue(lambda c, r, s: c * s + r)
    first = gm.matmul(a, b, epilogue=epilogue, operands={"r": r, "s": 2.0})
    assert epilogue.recipes
    np.testing.assert_array_equal(gm.matmul(a, b, epilogue=epilogue(r=r, s=2)), first)
    for wrong in ({"r": r}, {"r": r, "s": 2.0, "t": 1}, {"r": r, "t": 1}):
        with pytest.raises(gm.ArgumentError, match=r"'[st]'"):
            gm.matmul(a, b, epilogue=epilogue, operands=wrong)
    with pytest.raises(gm.DTypeError, match="complex"):
        gm.matmul(a, b, epilogue=epilogue(r=r, s=2j))
    with pytest.raises(gm.ShapeError, match="'r'"):
        gm.matmul(a, b, epilogue=epilogue(r=r[:4], s=2.0))
    turned = r.copy()
    bound = epilogue(r=turned, s=2.0)
    assert gm.matmul(a, b, epilogue=bound).shape == (9, 9)
    turned.shape = (3, 27)  # the same memory in another shape
    with pytest.raises(gm.ShapeError, match="'r'"):
        gm.matmul(a, b, epilogue=bound)
    gm.set_num_threads(2)
    try:
        np.testing.assert_array_equal(gm.matmul(a, b, epilogue=epilogue(r=r, s=2.0)), first)
        assert len({recipe[:8] for recipe in epilogue.recipes}) == 2
    finally:
        gm.set_num_threads(None)


def test_arguments_that_are_resized_while_others_are_read():
    for m, name in ((40, "r"), (1500, "r"), (1500, "a"), (1500, "b")):
        arrays = {"a": np.ones((m, 800), "f4"), "b": np.ones((800, 900), "f4"), "r": np.ones((m, 900), "f4")}

        class Resizes:
            def __array__(self, *_, own=arrays[name], **__):
                own.resize((1, 1), refcheck=False)
                return np.ones(900, "f4")

        refused = f"{name}.* was resized|shapes .*\\(1, 1\\)"
        with pytest.raises((gm.LayoutError, gm.ShapeError), match=refused):
            gm.matmul(
                arrays["a"], arrays["b"], epilogue=lambda c, r, s: c + r + s,
                operands={"r": arrays["r"], "s": Resizes()},
            )  # fmt: skip
