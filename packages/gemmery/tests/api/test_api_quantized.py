"""gm.quantize, the matrix that it returns and products by it, against the formats' definitions in float64."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery.api import quantized
from gemmery.api.codes import from_e2m1, from_e4m3, to_e2m1, to_e4m3
from gemmery.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from test_arrays_cuda import Interface

RNG = np.random.default_rng(5)
# Format, group, zero points; and the largest error of an element, in factors of its group.
KINDS = [
    ("int8", None, False, 0.5), ("int8", 32, False, 0.5), ("int4", None, False, 0.5), ("int4", 128, False, 0.5),
    ("int4", 64, False, 0.5), ("int4", 32, False, 0.5), ("int4", 64, True, 1.0), ("int4", None, True, 1.0),
    ("float8_e4m3", None, False, 16.0), ("mxfp4", None, False, 2.0), ("nvfp4", None, False, 1.2),
]  # fmt: skip
FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code):
    """A number by the definition of OCP's e4m3, exactly."""
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    size = (
        Fraction(fraction, 8) * Fraction(1, 64)
        if exponent == 0
        else (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - 7)
    )
    return float(-size if sign else size)


def exact(matrix):
    """The weight (k, n) in float64, one element after the other, from the arrays as they are documented."""
    k, n = matrix.shape
    result = np.empty((k, n))
    for j in range(n):
        for p in range(k):
            place = p // matrix.group
            byte = int(matrix.packed[j, p] if matrix.format in ("int8", "float8_e4m3") else matrix.packed[j, p // 2])
            nibble = byte >> 4 if p % 2 else byte & 15
            factor = float(matrix.scales[j, place])
            if matrix.format == "int8":
                code = float(byte)
            elif matrix.format == "int4":
                code = nibble - (8.0 if matrix.zeros is None else float(matrix.zeros[j, place]))
            elif matrix.format == "float8_e4m3":
                code = e4m3(byte)
            else:
                code = (-1) ** (nibble >> 3) * FOUR_BITS[nibble & 7]
                factor = 2.0 ** (int(matrix.scales[j, place]) - 127)
                if matrix.format == "nvfp4":
                    factor = float(np.float32(e4m3(int(matrix.scales[j, place]))) * np.float32(matrix.scale))
            result[p, j] = code * factor
    return result


def weight(k, n, dtype=np.float32):
    return (RNG.standard_normal((k, n)) * np.exp2(RNG.integers(-3, 3, (1, n)))).astype(dtype)


@pytest.mark.parametrize(("format_", "group", "zero_points", "error"), KINDS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_element_is_near_that_of_the_weight(format_, group, zero_points, error, dtype):
    w = weight(128, 5, dtype)
    matrix = gm.quantize(w, format_, group, zero_points=zero_points)
    meant = exact(matrix)
    assert matrix.shape == w.shape
    factors = np.repeat(
        np.abs(meant).reshape(-1, matrix.group, 5).max(1) / {"int8": 127, "int4": 7}.get(format_, 6), matrix.group, 0
    )
    if format_ == "float8_e4m3":
        limit = np.maximum(2.0**-4 * np.abs(w.astype(float)), factors * 2.0**-10)
    elif format_ == "int4" and zero_points:
        limit = np.repeat(matrix.scales.astype(float).T, matrix.group, 0)
    else:
        limit = factors * error * 1.5
    assert np.all(np.abs(meant - w.astype(float)) <= limit * 1.01)
    for wanted in ("float64", "float32", "float16"):
        assert np.array_equal(
            matrix.dequantize(wanted),
            meant.astype(np.float32 if wanted != "float64" and dtype != np.float64 else np.float64).astype(wanted),
        )


@pytest.mark.parametrize(("format_", "group", "zero_points", "_"), KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_pickle_and_other_libraries_have_the_same_bits(format_, group, zero_points, _, dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    w = weight(128, 5).astype(dtype)
    matrix = gm.quantize(w, format_, group, zero_points=zero_points)
    again = pickle.loads(pickle.dumps(matrix))
    tensors = gm.quantize(torch.from_numpy(w), format_, group, zero_points=zero_points)
    assert repr(again) == repr(matrix) == repr(tensors)
    for z, one, other in zip(matrix.parts, again.parts, tensors.parts, strict=True):
        assert (z is None) == (one is None) == (other is None)
        assert z is None or z.tobytes() == one.tobytes() == other.numpy().tobytes()
    assert matrix.nbytes == sum(z.nbytes for z in matrix.parts if z is not None)


@pytest.mark.many(5)
@pytest.mark.parametrize(("format_", "group", "zero_points", "_"), KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("m", [1, 7, 65])
def test_products_are_within_the_bound(format_, group, zero_points, _, dtype, m):
    """The sums are float32 (float64): k u |A||B|, and a rounding of the weight where it is expanded, and of C."""
    matrix = gm.quantize(weight(128, 37), format_, group, zero_points=zero_points)
    w = matrix.dequantize("float64")
    x, bias = RNG.standard_normal((m, 128)).astype(dtype), RNG.standard_normal(37)
    result = gm.matmul(x, matrix, bias=bias.astype(dtype), activation="relu")
    assert result.dtype == dtype
    wide, bias = x.astype(float), bias.astype(dtype).astype(float)
    meant, size = wide @ w + bias, np.abs(wide) @ np.abs(w) + np.abs(bias)
    own = {np.float64: 2.0**-53, np.float32: 2.0**-24, np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}[dtype]
    sums = 2.0**-53 if dtype == np.float64 else 2.0**-24
    limit = ((128 + 6) * sums + own) * size + own * np.abs(meant) + 2.0**-24
    assert np.all(np.abs(result.astype(float) - np.maximum(meant, 0)) <= limit)


@pytest.mark.parametrize(
    ("k", "n", "group"), [(1, 1, None), (7, 3, None), (127, 8, None), (129, 9, None), (8191, 1, None), (62, 5, 2)]
)
def test_odd_sizes(k, n, group):
    for format_ in ("int8", "float8_e4m3") if group is None else ("int8", "int4"):
        matrix, x = gm.quantize(weight(k, n), format_, group), RNG.standard_normal((2, 3, k)).astype(np.float32)
        w = matrix.dequantize("float64")
        assert np.all(np.abs(gm.matmul(x, matrix) - x @ w) <= (k + 6) * 2.0**-24 * (np.abs(x) @ np.abs(w)))
        assert gm.matmul(x[0, 0], matrix).shape == (n,)
        out = np.full((2, 2 * n, 3), np.nan, np.float32).swapaxes(1, 2)[..., ::2]
        assert gm.matmul(x, matrix, out=out) is out
        assert np.array_equal(out, gm.matmul(x, matrix))
        assert gm.matmul(x[:0], matrix).shape == (0, 3, n)


def test_strides_of_operands_and_kinds_of_x():
    w = weight(64, 20)
    plain = gm.quantize(w.T.copy().T, "int4", 32)
    for other in (w, w[:, ::-1][:, ::-1], np.repeat(w, 2, 0)[::2]):
        assert np.array_equal(gm.quantize(other, "int4", 32).packed, plain.packed)
    x = RNG.standard_normal((4, 64)).astype(np.float32)
    expected = gm.matmul(x, plain)
    for same in (np.asfortranarray(x), np.repeat(x, 3, 1)[:, ::3], memoryview(x)):
        assert np.array_equal(np.asarray(gm.matmul(same, plain)), expected)
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    result = gm.matmul(torch.from_numpy(x), plain)
    assert np.array_equal(result.numpy(), expected)
    with pytest.raises(LayoutError, match=r"gemmery\.torch"):
        gm.matmul(torch.from_numpy(x).requires_grad_(), plain)


def test_a_row_has_the_same_bits_whatever_m_is():
    x = RNG.standard_normal((70, 96)).astype(np.float32)
    for format_ in ("int8", "int4", "mxfp4", "float8_e4m3"):
        matrix = gm.quantize(weight(96, 33), format_)
        whole = gm.matmul(x, matrix, batch_invariant=True)
        assert np.array_equal(whole[65:66], gm.matmul(x[65:66], matrix, batch_invariant=True))


def test_groups_with_an_infinity_or_a_nan_spoil_themselves_alone():
    formats = (("int8", 32), ("int4", 32), ("mxfp4", None), ("nvfp4", None), ("float8_e4m3", 32))
    for (format_, group), points in (*((row, False) for row in formats), (("int4", 32), True)):
        w = np.ones((64, 3), np.float32)
        w[3, 0], w[40, 1] = np.inf, np.nan
        weight = gm.quantize(w, format_, group, zero_points=points)
        back = weight.dequantize()
        each = 16 if format_ == "nvfp4" else 32
        assert np.isnan(back[:each, 0]).all()
        assert np.isnan(back[40 // each * each :, 1][:each]).all()
        assert np.isnan(gm.matmul(np.ones((1, 64), np.float32), weight)[0, :2]).all()
        assert np.all(back[:, 2] == back[63, 0])
        assert abs(back[0, 2] - 1) <= 2.0**-3


def test_every_code_of_e4m3_and_e2m1_and_every_tie():
    codes = np.arange(256, dtype=np.uint8)
    values = np.array([e4m3(code) for code in range(256)])
    assert np.array_equal(from_e4m3(codes), values, equal_nan=True)
    finite = codes[(codes & 127) < 127]
    assert np.array_equal(to_e4m3(from_e4m3(finite)), finite)
    above, below = values[:126], values[1:127]
    ties = ((above + below) / 2).astype(np.float32)
    expected = np.where(np.arange(126) % 2, np.arange(1, 127), np.arange(126))
    assert np.array_equal(to_e4m3(ties), expected)
    assert np.array_equal(to_e4m3(np.nextafter(ties, np.float32(0))), np.arange(126))
    assert np.array_equal(to_e4m3(np.nextafter(ties, np.float32(999))), np.arange(1, 127))
    assert np.array_equal(to_e4m3(np.array([1e9, -np.inf, np.nan, -0.0], np.float32)), [126, 254, 127, 128])
    assert np.array_equal(from_e2m1(codes[:16]), FOUR_BITS + [-value for value in FOUR_BITS])
    ties = (np.array(FOUR_BITS[:-1]) + FOUR_BITS[1:]) / 2
    assert np.array_equal(to_e2m1(ties.astype(np.float32)), [0, 2, 2, 4, 4, 6, 6])
    assert np.array_equal(to_e2m1(np.array([-7.0, 0.26, 5.01], np.float32)), [15, 1, 7])


def test_empty_weights_and_whole_numbers_of_numpy():
    assert gm.quantize(np.ones((0, 3)), "int4", zero_points=True).shape == (0, 3)
    assert gm.quantize(np.ones((8, 3)), "int8", np.int64(4)).group == 4
    with pytest.raises(ShapeError, match="one float32 for each matrix"):
        gm.QuantizedMatrix(
            "nvfp4", np.zeros((4, 8), np.uint8), np.zeros((4, 1), np.uint8), scale=np.ones(3, np.float32)
        )


def test_a_large_weight_is_quantized_in_parts(monkeypatch):
    w = weight(64, 50)
    whole = [gm.quantize(w, format_, group, zero_points=z) for format_, group, z, _ in KINDS if not group or group < 65]
    monkeypatch.setattr("gemmery.api.codes._MOST_AT_ONCE", 64 * 7)
    parts = [gm.quantize(w, format_, group, zero_points=z) for format_, group, z, _ in KINDS if not group or group < 65]
    for one, other in zip(whole, parts, strict=True):
        assert all(a is b is None or np.array_equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))


@pytest.mark.parametrize(
    ("w", "terms", "error", "words"),
    [
        (np.ones((4, 4)), {"format": "int3"}, ArgumentError, "known: int8, int4"),
        (np.ones(4), {"format": "int8"}, ShapeError, r"shape \(4,\)"),
        (np.ones((4, 4), int), {"format": "int8"}, DTypeError, "int64"),
        (np.ones((7, 4)), {"format": "int4"}, ShapeError, "share a byte.* pad w"),
        (np.ones((48, 4)), {"format": "mxfp4"}, ShapeError, "k=48 is no multiple of 32.* pad w"),
        (np.ones((40, 4)), {"format": "nvfp4"}, ShapeError, "k=40 is no multiple of 16"),
        (np.ones((96, 4)), {"format": "int4", "group": 128}, ShapeError, "k=96 is no multiple of 128"),
        (np.ones((6, 4)), {"format": "int4", "group": 3}, ShapeError, "share a byte"),
        (np.ones((64, 4)), {"format": "mxfp4", "group": 16}, ArgumentError, "groups of 32"),
        (np.ones((64, 4)), {"format": "int8", "group": 0}, ArgumentError, "128 is usual"),
        (np.ones((64, 4)), {"format": "int8", "group": True}, ArgumentError, "128 is usual"),
        (np.ones((64, 4)), {"format": "int8", "zero_points": True}, ArgumentError, "int4 has them"),
        (np.ones((64, 4)), {"format": "mxfp4", "dtype": "float16"}, ArgumentError, "type of their own"),
        (np.ones((64, 4)), {"format": "int4", "dtype": "int8"}, DTypeError, "float64, float32"),
        (np.ones((4, 4)), {"format": ["int8"]}, ArgumentError, "known: int8, int4"),
        (np.ones((4, 4)), {"format": "int8", "group": np.ones(2)}, ArgumentError, "128 is usual"),
        (np.ones((4, 4)), {"format": "int8", "group": 10**5000}, ShapeError, "too large to print"),
        (np.ones((4, 4)), {"format": "int4", "zero_points": np.ones(2)}, ArgumentError, "True or False"),
        (Interface(), {"format": "int8"}, LayoutError, "Interface on a device"),
    ],
)
def test_what_is_not_quantized_is_refused_in_words(w, terms, error, words):
    with pytest.raises(error, match=words):
        gm.quantize(w, **terms)


def test_products_that_are_refused_in_words():
    matrix, x = gm.quantize(weight(64, 4), "int4", 32), np.ones((2, 64), np.float32)
    stack = gm.QuantizedMatrix.stack([matrix, matrix])
    for call, error, words in [
        (lambda: gm.matmul(x[:, 1:], matrix), ShapeError, "63"),
        (lambda: gm.matmul(x, stack), ShapeError, "grouped_matmul"),
        (lambda: gm.matmul(x, matrix, scale_b=2.0), ArgumentError, "factors"),
        (lambda: gm.matmul(x, matrix, scale_a=2.0), DTypeError, "codes"),
        (lambda: gm.matmul(x, matrix, precision="tf32"), ArgumentError, "CUDA"),
        (lambda: gm.matmul(x.astype(int), matrix), DTypeError, "int64"),
        (lambda: gm.matmul(x, matrix, bias=np.ones(3, np.float32)), ShapeError, "bias"),
        (lambda: gm.matmul(x, matrix, activation="tanh"), ArgumentError, "relu"),
        (lambda: gm.matmul(x, matrix, out=np.ones((2, 5), np.float32)), ShapeError, "out"),
        (lambda: np.asarray(matrix), LayoutError, "dequantize"),
        (lambda: gm.matmul(x, matrix, semiring="min_plus"), ArgumentError, "takes plain matrices: pass b.dequantize"),
        (lambda: gm.QuantizedMatrix.stack([]), ArgumentError, "there are no matrices"),
        (lambda: gm.QuantizedMatrix.stack([matrix, x]), ArgumentError, "is no quantized matrix"),
        (lambda: gm.QuantizedMatrix.stack(None), ArgumentError, "None is no quantized matrix"),
        (lambda: matrix[0], ShapeError, "no groups"),
        (lambda: matrix.to("cpu"), ArgumentError, "PyTorch"),
        (lambda: gm.QuantizedMatrix("int4", matrix.packed, matrix.scales[:, :0]), ShapeError, "rows of factors"),
        (lambda: gm.QuantizedMatrix("int8", matrix.packed, matrix.scales), DTypeError, "int8"),
        (lambda: gm.QuantizedMatrix("nvfp4", matrix.packed, matrix.packed[:, :4]), ArgumentError, "nvfp4 has a scale"),
        (lambda: gm.QuantizedMatrix("int4", matrix.packed, matrix.scales, matrix.scales[:1]), ShapeError, "zeros"),
        (lambda: quantized._restored(2, "int4", *matrix.parts), LayoutError, "version 2.* reads version 1"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("name", ["a", "bias", "out"])
def test_an_array_that_is_resized_while_an_option_is_read(name):
    w = gm.quantize(np.ones((64, 64), np.float32), "int8")
    arrays = {"a": np.ones((2, 64), np.float32), "bias": np.ones(64, np.float32), "out": np.ones((2, 64), np.float32)}

    class Resizes:
        def __index__(self):
            arrays[name].resize((3,) * arrays[name].ndim, refcheck=False)
            return 1

    with pytest.raises((LayoutError, ShapeError), match=rf"{name} was resized|{name} has shape"):
        gm.matmul(arrays["a"], w, arrays["out"], bias=arrays["bias"], threads=Resizes())


def test_experts_are_groups_of_rows():
    w = np.stack([weight(64, 12) for _ in range(4)])
    x, ends = RNG.standard_normal((9, 64)).astype(np.float32), [2, 2, 8, 9]
    for format_, group in (("int4", 32), ("mxfp4", None), ("nvfp4", None), ("int8", None)):
        experts = gm.quantize(w, format_, group)
        assert experts.shape == w.shape
        assert len(experts) == 4
        alone = gm.QuantizedMatrix.stack([gm.quantize(each, format_, group) for each in w])
        assert all(a is b is None or np.array_equal(a, b) for a, b in zip(experts.parts, alone.parts, strict=True))
        result = gm.grouped_matmul(x, experts, offsets=ends, bias=np.ones((4, 12), np.float32))
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            assert np.array_equal(result[start:end], gm.matmul(x[start:end], experts[i], bias=np.ones(12, np.float32)))
        listed = gm.grouped_matmul([x[:2], x[2:]], [experts[0], experts[2]])
        assert np.array_equal(listed[1], gm.matmul(x[2:], experts[2]))
    with pytest.raises(ShapeError):
        gm.grouped_matmul(x, experts, offsets=[1, 9])
    with pytest.raises(ShapeError, match="one shape"):
        gm.QuantizedMatrix.stack([experts[0], gm.quantize(w[0, :, :5], "int8")])


# ---- rows ----


@pytest.mark.parametrize("format_", ["float8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_rows_become_codes_and_factors(format_, dtype, monkeypatch):
    x = (RNG.standard_normal((3, 5, 70)) * np.exp2(RNG.integers(-9, 9, (3, 5, 1)))).astype(dtype)
    x[1, 2] = 0
    codes, factors = gm.quantize_rows(x, format_)
    top = 448 if format_ == "float8_e4m3" else 127
    assert codes.shape == x.shape
    assert codes.dtype == (ml_dtypes.float8_e4m3fn if format_ == "float8_e4m3" else np.int8)
    single = x.astype(np.float32)
    assert np.array_equal(
        factors, np.maximum(np.abs(single).max(-1, keepdims=True) / np.float32(top), np.float32(2.0**-126))
    )
    scaled = single * (np.float32(1) / factors)
    wanted = scaled.astype(ml_dtypes.float8_e4m3fn) if top == 448 else np.rint(scaled).astype(np.int8)
    assert np.array_equal(codes.view(np.uint8), wanted.view(np.uint8))
    monkeypatch.setattr("gemmery.api.quantized._AT_ONCE", 100)
    assert np.array_equal(gm.quantize_rows(x, format_)[0].view(np.uint8), codes.view(np.uint8))
    assert gm.quantize_rows(x[:, :, :0], format_)[0].shape == (3, 5, 0)
    x[0, 0, 3], x[0, 1, 4] = np.nan, np.inf
    codes, factors = gm.quantize_rows(x, format_)
    with np.errstate(all="ignore"):
        back = codes.astype(np.float32) * factors
    assert not np.isfinite(back[0, :2]).any()
    assert np.isfinite(back[0, 2:]).all()


@pytest.mark.parametrize("format_", ["float8_e4m3", "int8"])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3", "int4", "mxfp4"])
def test_codes_are_multiplied_by_a_quantized_matrix(format_, kind):
    matrix = gm.quantize(weight(64, 20), kind)
    codes, factors = gm.quantize_rows(RNG.standard_normal((6, 64)).astype(np.float32), format_)
    result = gm.matmul(codes, matrix, scale_a=factors)
    x, w = codes.astype(float) * factors.astype(float), matrix.dequantize("float64")
    assert result.dtype == np.float32
    assert np.all(np.abs(result - x @ w) <= (64 + 8) * 2.0**-24 * (np.abs(x) @ np.abs(w)))
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensors = gm.quantize_rows(torch.ones(2, 64), format_)
    assert gm.matmul(tensors[0], matrix, scale_a=tensors[1]).shape == (2, 20)


def test_rows_beyond_float32_give_no_warning():
    codes, factors = gm.quantize_rows(np.array([[1e300, 1.0]]), "int8")
    assert factors.tolist() == [[np.inf]]
    assert codes.tolist() == [[0, 0]]


def test_rows_that_are_refused_in_words():
    for x, format_, error, words in [
        (np.ones((2, 4)), "int4", ArgumentError, "float8_e4m3, int8"),
        (np.ones((2, 4), int), "int8", DTypeError, "int64"),
        (np.float32(3), "int8", ShapeError, "dimensions"),
        (np.ones((2, 4)), np.ones(3), ArgumentError, "float8_e4m3, int8"),
        (Interface(), "int8", LayoutError, "Interface on a device"),
    ]:
        with pytest.raises(error, match=words):
            gm.quantize_rows(x, format_)


def test_what_explain_says():
    matrix, x = gm.quantize(weight(64, 32), "int4", 32), np.ones((2, 64), np.float32)
    assert "int4 in groups of 32" in str(gm.explain(x, matrix))
    assert "widens its levels" in str(gm.explain(x, matrix))
    assert "expanded to float32" in str(gm.explain(np.ones((80, 64), np.float32), matrix))
