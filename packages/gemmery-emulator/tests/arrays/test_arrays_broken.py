"""Objects that break the protocols of arrays, and results too large for an array: errors that name them."""

from __future__ import annotations

import numpy as np
import pytest

import gemmery as gm
from gemmery.errors import ArgumentError, DTypeError, GemmeryError, LayoutError, ShapeError, brief

X = np.ones((3, 3))


class Converted:
    def __array__(self, *args, **options):
        raise KeyError("numbers")


class Nowhere:
    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        if isinstance(self.device, Exception):
            raise self.device
        return self.device

    def __dlpack__(self, **options):
        raise NotImplementedError("no capsule")


class Failing(Nowhere):
    def __dlpack__(self, **options):
        raise KeyError("capsule")


class Described:
    def __init__(self, **fields):
        self.__cuda_array_interface__ = {"shape": (3, 3), "typestr": "<f4", "data": (4096, False), **fields}


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")

    def __index__(self):
        raise RuntimeError("no integer")

    __complex__ = __int__ = __index__


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (Converted(), r"Converted does not export its memory correctly \(KeyError: 'numbers'\): pass a NumPy array"),
        (Nowhere(None), "__dlpack_device__ of Nowhere returned None: it must return two integers"),
        (Nowhere("ab"), "returned 'ab'"),
        (Nowhere((1, 0, 0)), r"returned \(1, 0, 0\)"),
        (Nowhere(KeyError("device")), "KeyError: 'device'"),
        (Nowhere((1, 0)), "Nowhere does not export its memory by DLPack: no capsule"),
        (Failing((1, 0)), "KeyError: 'capsule'"),
        (Described(typestr="zz"), "Described does not export its memory correctly"),
        (Described(data=5), "Described does not export"),
        (Described(data=("x", False)), "Described does not export"),
        (Described(stream="x"), "Described does not export"),
        (Described(shape=3), "Described does not export"),
        (Described(shape=("a", 3)), "Described does not export"),
        (Described(shape=(-3, 3)), "dimensions that are not negative"),
        (Described(shape=(2**70, 3)), "dimensions"),
        (Described(strides=(2**63, 4)), r"less than 2\*\*63 bytes"),
        (Described(strides=(4,)), "a stride"),
        (Described(shape=(1,) * 65), "65 dimensions: at most 64"),
    ],
)
def test_an_object_that_breaks_a_protocol_is_refused_by_name(obj, words):
    calls = [
        lambda: gm.matmul(obj, X),
        lambda: gm.matmul(X, X, out=obj),
        lambda: gm.matmul(X, X, bias=obj),
        lambda: gm.gemm(1, X, X, 1, obj),
        lambda: gm.explain(X, obj),
    ]
    for call in calls:
        with pytest.raises(LayoutError, match=words):
            call()


def test_a_class_is_not_an_array():
    with pytest.raises(DTypeError, match="the class ndarray, not an array: pass an instance"):
        gm.matmul(np.ndarray, X)


def test_a_scalar_of_numpy_cannot_be_written():
    with pytest.raises(LayoutError, match="out cannot be written in place"):
        gm.matmul(np.ones(3), np.ones(3), out=np.float64(7))


@pytest.mark.parametrize("obj", [Unprintable(), np], ids=["unprintable", "module"])
def test_options_of_any_kind_are_refused(obj):
    calls = [
        lambda: gm.matmul(X, X, dtype=obj),
        lambda: gm.matmul(X, X, activation=obj),
        lambda: gm.matmul(X, X, threads=obj),
        lambda: gm.matmul(X, X, precision=obj),
        lambda: gm.gemm(obj, X, X),
        lambda: gm.gemm(obj, X.astype(int), X.astype(int)),
        lambda: gm.gemm(1, X, X, obj, X),
        lambda: gm.set_num_threads(obj),
        lambda: gm.tensor_map(np.ones((64, 64), "f4"), obj),
    ]
    for call in calls:
        with pytest.raises(GemmeryError):
            call()


def test_a_value_is_shown_on_one_line():
    assert brief(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])"
    assert brief(Unprintable()) == "<Unprintable>"
    assert brief(10**5000) == "an int too large to print"
    with pytest.raises(ArgumentError, match=r"activation=array\(\[\[0., 0.\], \[0., 0.\]\]\) must be"):
        gm.matmul(X, X, activation=np.zeros((2, 2)))


def wide(rows, columns, element="f4"):
    """A matrix of one number, as large as this."""
    return np.broadcast_to(np.ones((1, 1), element), (rows, columns))


def test_a_result_that_no_array_can_hold_is_refused():
    with pytest.raises(ShapeError, match=r"a result of shape \(1099511627776, 1099511627776\) is too large"):
        gm.matmul(wide(2**40, 1), wide(1, 2**40))
    with pytest.raises(ShapeError, match="too large"):
        gm.gemm(2, wide(2**40, 1), wide(1, 2**40))
    one, two = wide(2**40, 1, "i4"), wide(1, 2**40, "f8")
    with pytest.raises((ShapeError, MemoryError)):  # compiled code converts an operand before Python sees the shapes
        gm.matmul(one, two)
    with pytest.raises((ShapeError, MemoryError)):
        gm.gemm(2, one, two)
    with pytest.raises(MemoryError):
        gm.matmul(wide(2**24, 1), wide(1, 2**24))


def test_an_operand_too_large_to_be_converted_is_refused():
    with pytest.raises((ShapeError, MemoryError)):
        gm.matmul(wide(1, 2**61, "i1"), wide(2**61, 1, "f2"))


def test_a_subclass_wraps_results_as_numpy_2_does():
    class Kept(np.ndarray):
        def __array_wrap__(self, array, context, return_scalar):
            self.seen = context, return_scalar
            return array.view(Kept)

    class Old(np.ndarray):
        def __array_wrap__(self, array):
            return array.view(Old)

    for cls in (Kept, Old):
        x = X.view(cls)
        assert type(gm.matmul(x, X)) is cls
        assert type(gm.matmul(x[0], X[0])) is cls
    x = X.view(Kept)
    gm.matmul(x, X)
    assert x.seen == (None, False)
