"""Random sequences of products of small whole numbers: every pair of element types, dtype=, out= and layout."""

from __future__ import annotations

import pickle
import re

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm

pytestmark = pytest.mark.sampled(3)

TYPES = ("?", *"bhilqBHILQefdFD", ml_dtypes.bfloat16)
REFUSALS = r"Cannot cast|cannot represent every|no common element type"


def numbers(draw, shape, dtype):
    """Numbers below 4, of which no type rounds a product; in any layout, some with a dtype object of their own."""
    x = draw.integers(0, 2 if dtype == "?" else 4, shape).astype(dtype)
    last = np.ascontiguousarray(x.swapaxes(-1, 0)).swapaxes(-1, 0)
    layouts = (x, pickle.loads(pickle.dumps(x)), last, np.repeat(x, 2, axis=-1)[..., ::2], x[::-1])
    x = layouts[draw.integers(len(layouts))]
    if dtype != ml_dtypes.bfloat16 and draw.integers(8) == 0:
        return x.astype(x.dtype.newbyteorder())
    return np.broadcast_to(x[:1], x.shape) if draw.integers(8) == 0 else x


def operands(draw):
    """A and B of some types, with some of the dimensions 0, 1 or missing."""
    one, two = (TYPES[i] for i in draw.integers(len(TYPES), size=2))
    m, n, k = draw.choice([0, 1, 1, 2, 3, 5, 8], 3)
    batch = draw.integers(1, 4, draw.integers(3))
    shapes = ((m, k), (k, n))
    shapes = [(*np.where(draw.random(len(batch)) < 0.6, batch, 1), *shape) for shape in shapes]
    shapes = [(k,) if draw.integers(6) == 0 else shape for shape in shapes]
    return numbers(draw, shapes[0], one), numbers(draw, shapes[1], one if draw.integers(2) else two)


def options(draw, a, b, shape):
    """Sometimes dtype=, sometimes out= of the operands' type or another."""
    if draw.integers(3) == 0:
        yield "dtype", TYPES[draw.integers(len(TYPES))]
    if draw.integers(3) == 0:
        dtype = a.dtype.newbyteorder("=") if draw.integers(2) else TYPES[draw.integers(len(TYPES))]
        out = np.ones(shape[::-1], dtype).T if draw.integers(2) else np.ones(shape, dtype)
        yield "out", out


@pytest.mark.parametrize("seed", range(4))
def test_random_products_of_small_numbers(seed):
    draw = np.random.default_rng(seed)
    done, refusals = 0, []
    for _ in range(600):
        a, b = operands(draw)
        before = a.copy(), b.copy()
        expected = np.matmul(a.astype(complex), b.astype(complex)).real
        asked = dict(options(draw, a, b, expected.shape))
        try:
            result = gm.matmul(a, b, **asked)
        except gm.DTypeError as error:
            refusals.append(str(error))
            continue
        if a.dtype == b.dtype == bool and asked.get("dtype", "?") == "?":
            expected = expected != 0
        assert result is asked.get("out", result)
        assert np.array_equal(np.asarray(result).astype(complex), expected), (a, b, asked)
        assert all(np.array_equal(x, y) for x, y in zip((a, b), before, strict=True))
        if not asked and ml_dtypes.bfloat16 not in (a.dtype, b.dtype):
            assert result.dtype == np.result_type(a, b).newbyteorder("=")
        done += 1
    assert done > 300
    assert [text for text in refusals if not re.search(REFUSALS, text)] == []


def eight_bits(draw, shape, dtype):
    """Any numbers of 8 bits, in one of three layouts."""
    x = draw.integers(*((-128, 128) if dtype == "int8" else (0, 256)), shape).astype(dtype)
    layouts = x, np.ascontiguousarray(x.T).T, np.repeat(x, 2, axis=-1)[..., ::2]
    return layouts[draw.integers(len(layouts))]


@pytest.mark.parametrize("out", [None, "int16", "int32", "int64"])
@pytest.mark.parametrize(("first", "second"), [("int8", "uint8"), ("uint8", "int8")])
def test_one_operand_with_signs_and_one_without(first, second, out):
    """The kernels take both as they are; the entry repeats such products, whose operands have two types."""
    draw = np.random.default_rng(0)
    asked, result = ({}, "int16") if out is None else ({"dtype": out}, out)
    for m, n, k in ((1, 1, 1), (1, 70, 33), (70, 1, 33), (3, 5, 7), (17, 65, 130), (130, 200, 900), (5, 6, 0)):
        a, b = eight_bits(draw, (m, k), first), eight_bits(draw, (k, n), second)
        expected = a.astype(np.int64) @ b.astype(np.int64)
        for _ in range(3):
            product = gm.matmul(a, b, **asked)
            assert product.dtype == result
            assert np.array_equal(product, expected.astype(result))
        into = np.full((n, m), 7, result).T
        assert np.array_equal(gm.matmul(a, b, out=into, **asked), expected.astype(result))
        packed = gm.pack(b, dtype=out if out in ("int32", "int64") else None)
        if packed.result in (second, result):
            assert np.array_equal(gm.matmul(a, packed, **asked), expected.astype(result))
        c = draw.integers(-99, 99, (m, n)).astype("int16")
        assert np.array_equal(gm.gemm(3, a, b, 2, c), (3 * expected + 2 * c).astype("int16"))
    for batch, shape in ((30, (4, 7, 9)), (3, (70, 66, 65))):
        m, n, k = shape
        a, b = (
            draw.integers(0, 100, (batch, *sides)).astype(name) for sides, name in (((m, k), first), ((k, n), second))
        )
        assert np.array_equal(gm.matmul(a, b, **asked), (a.astype(np.int64) @ b.astype(np.int64)).astype(result))


def test_how_int8_by_uint8_is_explained():
    text = str(gm.explain(np.ones((64, 64), "int8"), np.ones((64, 64), "uint8"), dtype="int32"))
    assert "int8 by uint8 -> int32" in text
    assert "converted" not in text
