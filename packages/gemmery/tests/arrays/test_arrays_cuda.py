"""Views of arrays on CUDA devices, from objects that describe memory which does not exist."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from gemmery import arrays
from gemmery.arrays import View, dlpack, view
from gemmery.errors import DeviceError, DTypeError, LayoutError


class Interface:
    """`__cuda_array_interface__` and nothing else."""

    def __init__(self, shape=(3, 4), typestr="<f4", pointer=4096, **fields):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (pointer, False),
            "version": 3,
            **fields,
        }


class Capsule:
    """DLPack of an address, without strides."""

    def __init__(self, shape=(2, 3), device=(2, 1), pointer=4096, knows_versions=True, element=(2, 32)):
        self.device, self.knows_versions, self.options = device, knows_versions, []
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        tensor = dlpack.DLTensor(pointer, *device, len(shape), *element, 1, self.shape, None, 16)
        self.tensor = dlpack.ManagedTensor(tensor)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if "max_version" in options and not self.knows_versions:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.options.append(options)
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(self.tensor), b"dltensor", None)


def test_the_interface_is_read_in_place():
    given = Interface(strides=None)
    assert view(given) == View(4096, (3, 4), (16, 4), "f32", "cuda", 0, True, given)
    assert view(Interface())[2] == (16, 4)
    assert view(Interface(strides=(-4, 12)))[2] == (-4, 12)
    assert view(Interface((0, 4), pointer=None)).pointer == 0
    assert not view(Interface(data=(4096, True))).writable
    for typestr, name in (("<f8", "f64"), ("<f2", "f16"), ("|i1", "int8"), ("<c8", "complex64")):
        assert view(Interface(typestr=typestr)).dtype == name


@pytest.mark.parametrize(("stream", "handle"), [(None, 0), (1, 0), (2, 2), (0x7F00AA, 0x7F00AA)])
def test_the_stream_of_the_interface(stream, handle):
    assert view(Interface(stream=stream)).stream == handle


def test_an_interface_that_cannot_be_read_is_refused():
    with pytest.raises(DeviceError, match=r"stream 0.*1 for the legacy default stream"):
        view(Interface(stream=0))
    for pointer in (0, None):
        with pytest.raises(LayoutError, match="null pointer"):
            view(Interface(pointer=pointer))
    for shape, strides in (((3, -4), None), ((3, 4), (16,))):
        with pytest.raises(LayoutError, match="needs dimensions that are not negative"):
            view(Interface(shape, strides=strides))
    with pytest.raises(LayoutError, match="mask"):
        view(Interface(mask=Interface()))
    with pytest.raises(LayoutError, match="byte order"):
        view(Interface(typestr=">f4"))
    with pytest.raises(DTypeError, match=r"bfloat16 and 8-bit.*through __dlpack__"):
        view(Interface(typestr="|V2"))
    with pytest.raises(DTypeError, match="datetime64"):
        view(Interface(typestr="<M8[s]"))


@pytest.mark.parametrize("knows_versions", [True, False])
def test_dlpack_of_a_device(knows_versions):
    given = Capsule(knows_versions=knows_versions)
    found = view(given)
    assert found[:6] == (4096 + 16, (2, 3), (12, 4), "f32", "cuda:1", 0)
    assert not found.writable  # a capsule of before version 1 cannot say
    assert [options["stream"] for options in given.options] == [1]
    assert view(Capsule(device=(13, 0))).device == "cuda:0"


def test_types_of_eight_bits_are_read_on_a_device():
    for element, name in (((10, 8), "e4m3"), ((12, 8), "e5m2"), ((0, 8), "int8")):
        assert view(Capsule(element=element))[1:5] == ((2, 3), (3, 1), name, "cuda:1")


def test_operands_apart_are_named():
    here, there = view(np.zeros(2)), view(Capsule())
    arrays.together(a=here, b=here, out=None)
    with pytest.raises(DeviceError, match=r"a is on cpu and out on cuda:1.*x\.to\(device\).*cupy\.asarray"):
        arrays.together(a=here, b=None, out=there)


@pytest.mark.parametrize(
    ("pointer", "steps", "bytes_"),
    [
        (4096, (), 16),
        (0, (400, 1600), 16),
        (4096, (8,), 8),
        (4096, (-12, 64), 4),
        (4098, (64,), 2),
        (4097, (), 1),
        (4096, (0, 32), 16),
    ],
)
def test_alignment(pointer, steps, bytes_):
    assert arrays.alignment(pointer, steps) == bytes_
