"""The array that a product is written to: of which types, shapes and strides, in whose memory, and what is refused."""

from __future__ import annotations

import itertools
import weakref

import ml_dtypes
import numpy as np
import pytest

import gemmery as gm
from gemmery.api.options import filling
from gemmery.arrays import view
from operands import agrees, random


def test_out_of_another_type_takes_the_rounded_result():
    a, b = random((4, 3), "f64", 1), random((3, 5), "f64", 2)
    for dtype in ("float32", "float16", "complex64", ml_dtypes.bfloat16, ">f8", ">f4"):
        out = np.zeros((4, 5), dtype)
        if np.dtype(dtype).isnative:
            gm.matmul(a, b, out=out)
            assert np.array_equal(out, gm.matmul(a, b).astype(dtype))
        else:
            with pytest.raises(gm.LayoutError, match="foreign byte order"):
                gm.matmul(a, b, out=out)
    small = random((4, 3), "int8", 1)
    wide = gm.matmul(small, small.T, out=np.zeros((4, 4), "i4"))
    with np.errstate(over="ignore"):
        assert np.array_equal(wide, small @ small.T)  # wrapped in int8 first, as NumPy does


def bad_outs():
    read_only = np.zeros((3, 3))
    read_only.flags.writeable = False
    yield read_only, gm.LayoutError, "read-only"
    yield np.broadcast_to(np.zeros(3), (3, 3)), gm.LayoutError, "read-only"
    yield np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (0, 8)), gm.LayoutError, "share memory"
    yield np.lib.stride_tricks.as_strided(np.zeros(9), (3, 3), (8, 8)), gm.LayoutError, "share memory"
    yield np.zeros((3, 4)), gm.ShapeError, "out has shape"
    yield np.zeros((3, 1, 3)), gm.ShapeError, "out has shape"
    yield np.zeros((3, 3), int), gm.DTypeError, "Cannot cast ufunc 'matmul' output from float64 to int64"
    yield np.zeros((3, 3), bool), gm.DTypeError, "bool"
    yield [[0.0] * 3] * 3, gm.LayoutError, "not an array"
    yield b"x" * 9, gm.ShapeError, "out has shape"


@pytest.mark.parametrize(("out", "error", "word"), list(bad_outs()), ids=lambda x: x if isinstance(x, str) else None)
def test_an_out_that_will_not_do_is_refused_and_not_written(out, error, word):
    before = np.array(out, copy=True) if isinstance(out, np.ndarray) else out
    with pytest.raises(error, match=word):
        gm.matmul(np.ones((3, 3)), np.ones((3, 3)), out=out)
    assert np.array_equal(out, before) if isinstance(out, np.ndarray) else out == before


def test_out_may_overlap_an_operand():
    for name, n in itertools.product(("f32", "int16", "bf16"), (6, 200)):
        base = random((n, n), name, 1)
        square = random((n, n), name, 2)
        x = base.copy()
        assert gm.matmul(x, square, out=x) is x
        assert agrees(x, base, square)
        x = base.copy()
        gm.matmul(square, x, out=x)
        assert agrees(x, square, base)
        x = base.copy()
        gm.matmul(x, x, out=x)
        assert agrees(x, base, base)
        x = base.copy()
        gm.matmul(x, square, out=x.T)
        assert agrees(x.T, base, square)
        x = random((n + 1, n), name, 3)
        first = x[:n].copy()
        gm.matmul(x[:n], square, out=x[1:])
        assert agrees(x[1:], first, square)
        x = base.copy()
        gm.gemm(2, x, square, 3, x, out=x)
        assert agrees(x, base, square, alpha=2, beta=3, c=base)
        x = random((n + 1, n), name, 3)
        old = x[1:].copy()
        gm.gemm(1, base, square, 1, x[1:], out=x[:n])
        assert agrees(x[:n], base, square, beta=1, c=old)


def test_out_in_a_tuple_and_options_with_their_defaults():
    a = np.arange(9.0).reshape(3, 3)
    out = np.zeros((3, 3))
    for _ in range(2):
        assert gm.matmul(a, a, out=(out,), order="K", casting="same_kind") is out
        assert np.array_equal(out, a @ a)
        assert gm.gemm(2.0, a, a, out=(out,)) is out


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((3, 4), (4, 5), (2, 3, 5)),
        ((4,), (4, 5), (2, 5)),
        ((3, 4), (4,), (2, 3)),
        ((4,), (4,), (2, 3)),
        ((1, 3, 4), (1, 4, 5), (6, 3, 5)),
        ((2, 1, 3, 4), (1, 6, 4, 5), (7, 2, 6, 3, 5)),
    ],
)
def test_an_out_with_more_batches_is_filled(a, b, out):
    x, y, target, expected = random(a, "f64", 1), random(b, "f64", 2), np.zeros(out), np.zeros(out)
    np.matmul(x, y, out=expected)
    for _ in range(3):
        target[...] = 0
        assert gm.matmul(x, y, out=target) is target
        assert np.allclose(target, expected, rtol=1e-13)


def test_an_operand_that_is_copied_lives_while_it_fills_an_out_with_more_batches():
    a, b = np.ones((16, 62), np.float16), np.ones((62, 55)).tolist()
    np.testing.assert_array_equal(gm.matmul(a, b, np.zeros((2, 16, 55))), np.full((2, 16, 55), 62.0))
    copied = view(b)
    memory = weakref.ref(copied.owner)
    _, wide = filling(view(a), copied, (2, 16, 55))
    del copied
    assert memory() is not None
    assert wide.shape == (2, 62, 55)


def test_an_operand_that_is_resized_before_it_fills_an_out():
    b = np.ones((62, 55))

    class Resizes:
        def __index__(self):
            b.resize((1, 1), refcheck=False)
            return 1

    with pytest.raises(gm.LayoutError, match="b was resized"):
        gm.matmul(np.ones((16, 62)), b, np.zeros((2, 16, 55)), threads=Resizes())
