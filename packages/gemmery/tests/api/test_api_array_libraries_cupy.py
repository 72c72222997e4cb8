"""The fast path for arrays of CuPy, with a stand-in for it and for the launches."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from gemmery.api import array_libraries, prepared
from gemmery.api.device_call import table


class OnDevice:
    """A stand-in for an array of CuPy, with what the path reads; new ones lie at 1 << 20."""

    def __init__(self, shape=(3, 3), dtype="f4", pointer=1 << 20, number=0):
        self.shape, self.dtype, self.device = shape, np.dtype(dtype), Device(number)
        self.strides = (12, 4)[-len(shape) :]
        self.data = SimpleNamespace(ptr=pointer)


class Device(nullcontext):
    def __init__(self, number):
        super().__init__()
        self.id = number


@pytest.fixture
def library():
    table.forget()
    cuda = SimpleNamespace(
        get_current_stream=lambda number: SimpleNamespace(ptr=70 + number),
        device=SimpleNamespace(get_device_id=lambda: 0),
    )
    yield array_libraries.CuPy(SimpleNamespace(ndarray=OnDevice, cuda=cuda))
    table.forget()


def known(library, out=None, number=0, workspace=0):
    """Let the path know a call with arrays at 1024 and 2048; return the arguments of its launches."""
    calls = []

    def run(*arguments):
        calls.append(arguments)

    run.workspace = workspace
    a, b = (OnDevice(pointer=at, number=number) for at in (1024, 2048))
    served = SimpleNamespace(countdown=0, run=run)
    call = array_libraries.KnownCall(served, (3, 3), (3, 1), np.dtype("f4"), -36, 36, -36, 36)
    table.calls[array_libraries.key_of(library, a, b, out, "matmul", None)] = call
    return calls


def test_addresses_reach_the_launch(library):
    calls = known(library, workspace=64)
    a, b = OnDevice(pointer=4096), OnDevice(pointer=8192)
    result = library.multiply(a, b, None, "matmul", None)
    assert (result.shape, result.dtype) == ((3, 3), np.dtype("f4"))
    assert calls == [(4096, 8192, 1 << 20, 70, 0, 1 << 20, None)]
    assert library.multiply(a, b, OnDevice(pointer=512), "matmul", None) is None  # another call


def test_an_out_is_written_unless_it_overlaps(library):
    calls = known(library, OnDevice(pointer=512))
    a, b, out = OnDevice(pointer=4096), OnDevice(pointer=8192), OnDevice(pointer=512)
    assert library.multiply(a, b, out, "matmul", None) is out
    assert library.multiply(a, b, OnDevice(pointer=4096 + 32), "matmul", None) is None
    assert [call[2] for call in calls] == [512]


def test_the_device_and_its_stream_are_those_of_the_arrays(library):
    calls = known(library, number=1)
    a, b = OnDevice(pointer=4096, number=1), OnDevice(pointer=8192, number=1)
    assert library.multiply(a, b, None, "matmul", None) is not None
    assert [call[3] for call in calls] == [71]
    assert library.multiply(a, OnDevice(pointer=8192), None, "matmul", None) is None


@pytest.mark.parametrize(
    "call",
    [
        (OnDevice(pointer=4096), OnDevice(pointer=8196), None),  # other low bits
        (OnDevice(pointer=4096), OnDevice(dtype="f8", pointer=8192), None),
        (OnDevice(pointer=4096), OnDevice((3,), pointer=8192), None),
        (OnDevice(pointer=0), OnDevice(pointer=8192), None),
        (OnDevice(pointer=4096), np.zeros((3, 3), "f4"), None),
    ],
)
def test_other_arrays_are_left_to_the_slow_path(library, call):
    calls = known(library)
    assert library.multiply(*call, "matmul", None) is None
    assert library.multiply(*call[:2], None, "matmul", None, {"bias": 1.0}) is None
    assert not calls


def test_a_product_that_was_not_seen_is_prepared_by_strides_in_elements(library, monkeypatch):
    asked = []
    monkeypatch.setattr(prepared, "present", lambda dtype, number: SimpleNamespace(dtype=dtype, number=number))
    monkeypatch.setattr(prepared, "prepare_new", lambda *terms: asked.append(terms))
    a, b = OnDevice(pointer=4096), OnDevice((3,), pointer=8192)
    assert library.multiply(a, b, None, "matmul", None) is None
    ((images, *terms),) = asked
    assert (images.dtype, images.number) == ("f32", 0)
    assert terms == ["matmul", (3, 3), (3, 1), (3,), (1,), 4096, 8192, False]
    b.strides = (6,)
    assert library.multiply(a, b, None, "matmul", None) is None
    assert len(asked) == 1
