"""Arrays made for callers without a library: what they export, and when their memory goes; the driver is a stand-in."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from gemmery.arrays import dlpack, view
from gemmery.cuda import driver
from gemmery.cuda.ordered import DeviceArray, Mark
from gemmery.errors import DTypeError


@pytest.fixture
def calls(monkeypatch):
    """What the driver is asked for, in order."""
    asked = []

    def call(name, result=None):
        return lambda *given: (asked.append((name, *given)), (0, result))[1]

    @contextmanager
    def on(ordinal):
        yield

    fake = SimpleNamespace(
        cuMemAllocAsync=call("allocate", 4096),
        cuCtxSynchronize=call("synchronize"),
        cuMemFree=call("free"),
        cuEventCreate=call("create", "event"),
        cuEventRecord=call("record"),
        cuStreamWaitEvent=call("wait"),
        cuEventDestroy=call("destroy"),
        CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2)),
    )
    monkeypatch.setattr(driver, "api", lambda: fake)
    monkeypatch.setattr(driver, "check", lambda result: result[1])
    monkeypatch.setattr(driver, "on", on)
    return asked


def names(calls):
    return [name for name, *_ in calls]


def test_it_says_where_it_is(calls):
    made = DeviceArray((2, 3), "f32", 1, 77)
    assert calls == [("allocate", 24, 77)]
    assert (made.shape, made.dtype, made.device) == ((2, 3), "float32", "cuda:1")
    assert made.__dlpack_device__() == (2, 1)
    fields = made.__cuda_array_interface__
    assert (fields["shape"], fields["typestr"], fields["data"], fields["stream"]) == ((2, 3), "<f4", (4096, False), 1)
    assert made.view[:6] == (4096, (2, 3), (12, 4), "f32", "cuda:1", 77)
    assert DeviceArray((4,), "bf16", 0, 0).dtype == "bfloat16"
    with pytest.raises(DTypeError, match="from_dlpack"):
        DeviceArray((4,), "bf16", 0, 0).__cuda_array_interface__  # noqa: B018


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
def test_its_capsule_is_read_as_it_is(calls, name):
    made = DeviceArray((2, 3), name, 1, 77)
    found = view(made)
    assert found[:6] == (*made.view[:5], 0)
    assert found.writable


def test_readers_wait_for_the_product_and_never_ask_its_stream_again(calls, collect):
    made = DeviceArray((2, 3), "f32", 0, 77)
    made.finished()
    assert calls[-1] == ("record", "event", 77)
    del calls[:]
    made.__dlpack__(stream=5)
    made.__dlpack__(stream=1)
    made.__dlpack__(stream=-1)
    made.__cuda_array_interface__  # noqa: B018
    assert calls == [("wait", 5, "event", 0), ("wait", 0, "event", 0), ("wait", 0, "event", 0)]
    del made
    collect()
    assert all(77 not in call for call in calls)


def test_memory_is_given_back_when_nobody_reads_it(calls, collect):
    before = len(dlpack._exports)
    made = DeviceArray((2, 3), "f32", 0, 77)
    capsules = [made.__dlpack__(), made.__dlpack__(max_version=(1, 0))]
    assert len(dlpack._exports) == before + 2
    del made
    collect()
    assert "free" not in names(calls)
    del capsules
    collect()
    assert len(dlpack._exports) == before
    assert names(calls)[-2:] == ["synchronize", "free"]
    assert calls[-1] == ("free", 4096)


def test_nothing_is_freed_while_the_interpreter_ends(calls):
    array = DeviceArray((2, 2), "f32", 0, 7)
    calls.clear()
    array.__del__(lambda: True)
    assert calls == []
    array.__del__()
    assert ("free", 4096) in calls
    array._pointer = 0


def test_no_event_is_destroyed_while_the_interpreter_ends(calls):
    mark = Mark(7, 0)
    calls.clear()
    mark.__del__(lambda: True)
    assert calls == []
