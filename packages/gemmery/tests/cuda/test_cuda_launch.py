"""Launches prepared once: what each call packs, whose context it uses, what is missing; the driver is a stand-in."""

from __future__ import annotations

import struct
import sys
import threading
from contextlib import contextmanager
from ctypes import c_char, c_void_p
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from cuda.bindings import driver as nvidia

from gemmery.arrays import View, contiguous
from gemmery.cuda import driver, launch, ordered, tensormaps
from gemmery.cuda.device import KNOWN
from gemmery.cuda.geometry import BAND, Geometry, MapBox
from gemmery.errors import DeviceError, missing
from gemmery.problem import Problem

CONTEXT = 77
FIELDS = "=5Q11q4i2f"


class Driver:
    """Remembers what was launched, with the argument as it was then."""

    def __init__(self):
        self.launches, self.context, self.status, self.pushed = [], CONTEXT, 0, 0
        self.bytes = struct.calcsize(FIELDS)  # of an argument
        self.early = []  # functions that were launched before the stream's last launch had to end
        for name in ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID"):
            setattr(self, name, getattr(nvidia, name))

    def cuCtxGetCurrent(self):
        return 0, self.context

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        grid, block = (tuple(getattr(config, f"{what}Dim{axis}") for axis in "XYZ") for what in ("grid", "block"))
        assert config.numAttrs == len(config.attrs) <= 1
        for overlap in config.attrs:
            assert overlap.value.programmaticStreamSerializationAllowed == 1
            self.early.append(function)
        at = c_void_p.from_address(parameters).value
        argument = bytes((c_char * self.bytes).from_address(at))
        shared, stream = config.sharedMemBytes, int(config.hStream)
        self.launches.append((function, grid, block, shared, stream, argument, threading.get_ident()))
        return (self.status,)


@pytest.fixture
def fake(monkeypatch):
    made = Driver()

    @contextmanager
    def on(ordinal):
        made.pushed += 1
        made.context = CONTEXT
        yield

    def check(result):
        if result[0]:
            raise DeviceError("the driver said no")

    monkeypatch.setattr(driver, "api", lambda: made)
    monkeypatch.setattr(driver, "context", lambda ordinal: CONTEXT)
    monkeypatch.setattr(driver, "on", on)
    monkeypatch.setattr(driver, "check", check)
    return made


def prepared(c_layout="row", steps=1, bias=None, overlaps=()):
    problem = Problem(5, 7, 3, "f32", "f32", c_layout=c_layout)
    views = [View(0, shape, contiguous(shape, 4), "f32") for shape in ((1, 5, 3), (1, 3, 7), (1, 5, 7))]
    argument = launch.product_argument(problem, *views, bias)
    every = [(100 + i, 2, 3, 4, 32, 1, 1, 512 * i) for i in range(steps)]
    return launch.Ready(every, argument, 0, 0, c_layout == "col", overlaps)


def test_a_call_packs_pointers_and_scalars_and_leaves_the_rest(fake):
    run = prepared()
    run(1000, 2000, 3000, 9)
    run(1001, 2001, 3001, 10, bias=4000, workspace=5000, scalars=(2.0, -0.5))
    (function, grid, block, shared, stream, first, _), second = fake.launches
    assert (function, grid, block, shared, stream) == (100, (2, 3, 4), (32, 1, 1), 0, 9)
    assert second[4] == 10
    one, two = struct.unpack(FIELDS, first), struct.unpack(FIELDS, second[5])
    assert one[:5] == (1000, 2000, 3000, 0, 0)
    assert two[:5] == (1001, 2001, 3001, 4000, 5000)
    assert one[5:20] == two[5:20]
    assert one[16:20] == (5, 7, 3, 1)
    assert (one[-2:], two[-2:]) == ((1.0, 0.0), (2.0, -0.5))


def test_scalars_of_one_call_do_not_reach_the_next(fake):
    run = prepared()
    run(1, 2, 3, 4, scalars=(2.0, 0.5))
    run(1, 2, 3, 4)
    run(1, 2, 3, 4, scalars=(1.0, 0.0))
    assert [struct.unpack(FIELDS, each[5])[-2:] for each in fake.launches] == [(2.0, 0.5), (1.0, 0.0), (1.0, 0.0)]


def test_columns_in_c_swap_the_operands(fake):
    prepared("col")(1000, 2000, 3000, 0)
    fields = struct.unpack(FIELDS, fake.launches[0][5])
    assert fields[:3] == (2000, 1000, 3000)
    assert fields[16:20] == (7, 5, 3, 1)


def test_every_step_gets_the_same_argument(fake):
    prepared(steps=3)(1, 2, 3, 4)
    assert [one[0] for one in fake.launches] == [100, 101, 102]
    assert [one[3] for one in fake.launches] == [0, 512, 1024]
    assert len({one[5] for one in fake.launches}) == 1


def test_a_launch_that_overlaps_is_the_same_but_for_its_beginning(fake):
    plain, run = prepared(steps=2), prepared(steps=2, overlaps=(True, False))
    plain(1, 2, 3, 4)
    run(1, 2, 3, 4)
    run(1, 2, 3, 5)
    assert fake.early == [100, 100]
    assert fake.launches[2:4] == fake.launches[:2]
    assert [one[4] for one in fake.launches[4:]] == [5, 5]


OPERANDS = (
    View(0, (2, 64, 32), (8192, 128, 4), "f32"),
    View(0, (2, 32, 48), (6144, 192, 4), "f32"),
    View(0, (2, 64, 48), (12288, 192, 4), "f32"),
)


@pytest.fixture
def first_bytes(monkeypatch):
    """Maps that hold the address first, as bytes of the operand's inner side; each encoding is remembered."""
    encodings = []

    def encoded(described, address):
        encodings.append(address)
        return address.to_bytes(8, "little") + bytes([described.extents[0]]) * 120

    monkeypatch.setattr(tensormaps, "encoded", encoded)
    monkeypatch.setattr(tensormaps, "begins_with_address", lambda: True)
    return encodings


def mapped(fake, c_layout="row", packed=-1, **options):
    """The launch of a kernel with three maps, without a device."""
    boxes = [MapBox("a", (32, 64), packed=packed, pitch=128), MapBox("b", (32, 32)), MapBox("c", (32, 32))]
    made = object.__new__(launch.CudaLaunch)
    made.problem = Problem(64, 48, 32, "f32", "f32", 2, c_layout=c_layout, **options)
    made.geometry = Geometry("", "", (1, 1, 1), (1, 1, 1), workspace=9 * (packed >= 0), maps=tuple(boxes))
    made._ordinal, made._launches = 0, [(100, 2, 3, 4, 32, 1, 1, 512)]
    return made


def address_of(argument, operand):
    return int.from_bytes(argument[{"a": 256, "b": 384, "c": 512}[operand] :][:8], "little")


def sides(argument):
    return tuple(argument[at + 8] for at in (256, 384, 512))


def test_a_call_changes_the_addresses_of_maps_without_making_them_again(fake, first_bytes):
    fake.bytes = launch.MAPPED_BYTES
    run = mapped(fake).ready(*OPERANDS)
    made = len(first_bytes)
    for a, b, c in ((1000, 2000, 3000), (16, 32, 48)):
        run(a, b, c, 5, scalars=(2.0, 0.5), extra=(7, 8, 9))
        argument = fake.launches[-1][5]
        assert [address_of(argument, letter) for letter in "abc"] == [a, b, c]
        assert sides(argument) == (32, 48, 48)
        assert struct.unpack_from("=5Q", argument) == (a, b, c, 0, 0)
        assert struct.unpack_from("=2f3Q", argument, 144) == (2.0, 0.5, 7, 8, 9)
    assert (made, len(first_bytes)) == (3, 3)


def test_maps_that_hide_their_address_are_made_at_each_call(fake, first_bytes, monkeypatch):
    monkeypatch.setattr(tensormaps, "begins_with_address", lambda: False)
    fake.bytes = launch.MAPPED_BYTES
    mapped(fake).ready(*OPERANDS)(1000, 2000, 3000, 5)
    assert first_bytes[3:] == [1000, 2000, 3000]
    assert [address_of(fake.launches[-1][5], letter) for letter in "abc"] == [1000, 2000, 3000]


def test_a_packed_operand_is_in_the_workspace(fake, first_bytes):
    fake.bytes = launch.MAPPED_BYTES
    run = mapped(fake, packed=512).ready(*OPERANDS)
    assert run.workspace == 9
    run(1000, 2000, 3000, 5, workspace=65536)
    assert [address_of(fake.launches[-1][5], letter) for letter in "abc"] == [65536 + 512, 2000, 3000]
    assert struct.unpack_from("=5Q", fake.launches[-1][5]) == (1000, 2000, 3000, 0, 65536)


def test_columns_in_c_swap_maps_and_factors(fake, first_bytes):
    fake.bytes = launch.MAPPED_BYTES
    a, b, c = OPERANDS
    c = View(0, (2, 64, 48), (12288, 4, 256), "f32")
    run = mapped(fake, "col", epilogue="bias+gelu").ready(a, b, c, scaling=("outer", 1, 0, 0, 2))
    run(1000, 2000, 3000, 5, extra=(40, 80))
    argument = fake.launches[-1][5]
    assert [address_of(argument, letter) for letter in "abc"] == [2000, 1000, 3000]
    assert sides(argument) == (48, 32, 64)
    assert struct.unpack_from("=3Q4q4i", argument, 152) == (80, 40, 0, 2, 0, 0, 1, 8, 1, 0, BAND)


def test_maps_do_not_leak_from_one_call_to_the_next(fake, first_bytes):
    """Arguments of finished calls are used again, by other products too."""
    fake.bytes = launch.MAPPED_BYTES
    one, two = (
        mapped(fake).ready(*OPERANDS),
        mapped(fake, "col").ready(*OPERANDS[:2], OPERANDS[2]._replace(strides=(12288, 4, 256))),
    )
    one(1000, 2000, 3000, 5, extra=(7, 8, 9))
    two(1000, 2000, 3000, 5)
    assert struct.unpack_from("=3Q", fake.launches[-1][5], 152) == (0, 0, 0)
    assert sides(fake.launches[-1][5]) == (48, 32, 64)


def test_the_devices_context_is_put_in_force_only_where_it_is_not(fake):
    run = prepared()
    run(1, 2, 3, 4)
    assert fake.pushed == 0
    fake.context = 0
    run(1, 2, 3, 4)
    assert fake.pushed == 1
    assert len(fake.launches) == 2


def test_an_error_of_the_driver_is_raised_and_the_launch_can_be_used_again(fake):
    run = prepared()
    fake.status = 1
    with pytest.raises(DeviceError, match="said no"):
        run(1, 2, 3, 4)
    fake.status = 0
    run(5, 6, 7, 8)
    assert struct.unpack(FIELDS, fake.launches[-1][5])[:3] == (5, 6, 7)


def test_threads_do_not_share_an_argument(fake):
    run, inside, go_on = prepared(), threading.Barrier(2), threading.Event()
    launched = fake.cuLaunchKernelEx

    def slowly(*given):
        if int(given[0].hStream) == 1:  # the first thread waits within its launch while the second makes a whole one
            inside.wait(5)
            assert go_on.wait(5)
        return launched(*given)

    run(1, 2, 3, 0)
    run._launch = slowly
    thread = threading.Thread(target=run, args=(10, 11, 12, 1))
    thread.start()
    inside.wait(5)
    run(20, 21, 22, 2)
    go_on.set()
    thread.join()
    found = {one[4]: struct.unpack(FIELDS, one[5])[:3] for one in fake.launches}
    assert found == {0: (1, 2, 3), 1: (10, 11, 12), 2: (20, 21, 22)}
    assert len(run._free) == 2


def test_a_number_is_written_by_its_bits(monkeypatch):
    words = []

    @contextmanager
    def on(ordinal):
        yield

    fill = SimpleNamespace(cuMemsetD32Async=lambda *given: (words.append(given), (0,))[1])
    monkeypatch.setattr(driver, "api", lambda: fill)
    monkeypatch.setattr(driver, "check", lambda result: None)
    monkeypatch.setattr(driver, "on", on)
    ordered.put(1.5, "f32", 4096, 3, 0)
    ordered.put(-0.1, "f64", 8192, 3, 0)
    ordered.put(1e300, "f32", 4096, 3, 0)
    assert words[0] == (4096, 0x3FC00000, 1, 3)
    assert [where for where, *_ in words[1:3]] == [8192, 8196]
    assert struct.unpack("<d", struct.pack("<2I", words[1][1], words[2][1])) == (-0.1,)
    assert words[3][1] == 0x7F800000


def bindings(monkeypatch, **changes):
    """cuda.bindings.driver as a stand-in; api() and missing() ask it afresh."""
    status = SimpleNamespace(CUDA_ERROR_NO_DEVICE=100)
    fake = ModuleType("cuda.bindings.driver")
    fake.CUresult = status
    fake.CUDA_VERSION = 13000
    fake.cuInit = lambda flags: (Status(0),)
    fake.cuDriverGetVersion = lambda: (Status(0), 13000)
    fake.cuDeviceGetCount = lambda: (Status(0), 1)
    fake.cuGetErrorString = lambda status: (0, b"words of the driver")
    for name, value in changes.items():
        setattr(fake, name, value)
    package, parent = ModuleType("cuda.bindings"), ModuleType("cuda")
    package.driver, parent.bindings = fake, package
    for name, module in (("cuda", parent), ("cuda.bindings", package), ("cuda.bindings.driver", fake)):
        monkeypatch.setitem(sys.modules, name, module)
    driver.api.cache_clear()
    try:
        return driver.missing()
    finally:
        driver.api.cache_clear()


class Status(int):
    """What the bindings return as a status."""

    @property
    def value(self):
        return int(self)


def no_library(*_):
    raise RuntimeError("Failed to dlopen libcuda.so.1")


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    assert bindings(monkeypatch) == ""
    no_device = "a CUDA driver is installed, but it finds no device: check CUDA_VISIBLE_DEVICES"
    assert bindings(monkeypatch, cuInit=lambda flags: (Status(100),)) == no_device
    assert bindings(monkeypatch, cuDeviceGetCount=lambda: (Status(0), 0)) == no_device
    assert bindings(monkeypatch, cuInit=no_library) == "no CUDA driver is installed on this machine"
    assert bindings(monkeypatch, cuDriverGetVersion=lambda: (Status(0), 12040)) == (
        "the driver supports CUDA 12.4, the Python bindings 13.0: update the driver, or pip install "
        "'cuda-bindings==12.*' 'nvidia-cuda-nvrtc==12.*'"
    )
    assert "words of the driver" in bindings(monkeypatch, cuInit=lambda flags: (Status(803),))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert driver.missing() == missing("cuda", "CUDA needs its Python bindings")


def test_a_kernel_is_loaded_once_and_opts_into_more_shared_memory_only(monkeypatch):
    """Launches of one instance may differ in their shared memory: the largest is what it keeps."""
    calls = []
    loading = SimpleNamespace(
        cuModuleLoadData=lambda code: (0, calls.append("load") or 5),
        cuModuleGetFunction=lambda module, entry: (0, 7),
        cuFuncSetAttribute=lambda function, attribute, size: (0, calls.append(size)),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
    )

    @contextmanager
    def nothing(*_):
        yield

    monkeypatch.setattr(driver, "api", lambda: loading)
    monkeypatch.setattr(driver, "device", lambda ordinal: replace(KNOWN["h200"], ordinal=ordinal))
    monkeypatch.setattr(driver, "find", lambda name: driver.device(int(name[-1])))
    monkeypatch.setattr(driver, "on", nothing)
    monkeypatch.setattr(driver, "relaxed", nothing)
    monkeypatch.setattr(driver, "check", lambda result: result[1])
    monkeypatch.setattr(driver.nvrtc, "code", lambda *names: SimpleNamespace(cubin=b"", entry="k"))
    monkeypatch.setattr(driver, "_functions", {})
    monkeypatch.setattr(driver, "_opted", {})
    assert not driver.is_loaded("a.cu", "k<1>", "cuda:0")
    assert [driver.function("a.cu", "k<1>", 0, size) for size in (0, 100_000, 60_000, 200_000, 100_000)] == [7] * 5
    assert calls == ["load", 100_000, 200_000]
    assert driver.is_loaded("a.cu", "k<1>", "cuda:0")
    assert not driver.is_loaded("a.cu", "k<1>", "cuda:1")
    assert not driver.is_loaded("a.cu", "k<2>", "cuda:0")
