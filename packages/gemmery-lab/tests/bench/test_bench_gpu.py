"""Timing on a GPU without one: how calls are captured and repeated, what bounds a kernel, how operands lie."""

import itertools
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from gemmery.arrays import View
from gemmery.cuda import nvrtc
from gemmery.cuda.device import ARCHS
from gemmery.errors import ArgumentError, RefusedError
from gemmery.limits import device_limits
from gemmery_lab import on_cuda
from gemmery_lab.measure import cublas, processes, timing, torch_operands
from gemmery_lab.measure.timing import Contestant, compare
from gemmery_lab.measure.torch_operands import poison
from gemmery_lab.measure.work import Work, factors, offsets, operands


class Device:
    """A stream on which a product takes `seconds`, and a launch from the host at least `host` seconds."""

    def __init__(self, monkeypatch, seconds, host=1e-5):
        self.seconds, self.host = seconds, host
        self.now = 0.0
        self.captured = None  # the products of the graph that is being made
        self.put_calls, self.graphs = [], []
        self.ordinal, self.handle = 0, 7
        monkeypatch.setattr(device_limits, "Event", lambda ordinal: Event(self))
        monkeypatch.setattr(device_limits, "Graph", lambda stream: Graph(self))
        monkeypatch.setattr(device_limits.driver, "on", lambda ordinal: nullcontext())

    def put(self, index):
        if self.captured is not None:
            self.captured.append(index)
            return
        self.put_calls.append(index)
        self.now += max(self.seconds, self.host)


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self, stream):
        assert stream == self.device.handle
        self.at = self.device.now

    def since(self, earlier):
        return self.at - earlier.at


class Graph:
    def __init__(self, device):
        self.device, self.calls, self.launches = device, [], 0
        device.graphs.append(self)

    def __enter__(self):
        self.device.captured = self.calls

    def __exit__(self, *_):
        self.device.captured = None

    def launch(self):
        self.launches += 1
        self.device.now += self.device.seconds * len(self.calls)


def test_a_short_call_is_timed_by_its_graph_and_not_by_its_launch(monkeypatch):
    device = Device(monkeypatch, seconds=2e-6, host=1e-5)
    sample = device_limits.replays(device.put, device, sets=3)
    assert sample(1000, 1) == pytest.approx(2e6, rel=1e-6)
    assert device.graphs[-1].launches >= 1


@pytest.mark.parametrize("seconds", [2e-6, 1e-3])
def test_a_sampler_keeps_the_operands_that_its_calls_read(monkeypatch, collect, seconds):
    device = Device(monkeypatch, seconds)

    class Operands:
        pass

    operands = Operands()
    alive = weakref.ref(operands)
    sample = device_limits.replays(lambda index, _=operands: device.put(index), device, sets=1)
    del operands
    collect()
    assert alive() is not None
    assert bool(device.graphs) == (seconds < 1e-4)
    del sample
    collect()
    assert alive() is None


@pytest.mark.parametrize("sets", [1, 3, 64, 700, 1024])
def test_a_graph_takes_every_set_in_turn_and_begins_again_with_the_first(monkeypatch, sets):
    device = Device(monkeypatch, seconds=2e-6)
    device_limits.replays(device.put, device, sets)
    calls = device.graphs[-1].calls
    assert calls == list(itertools.islice(itertools.cycle(range(sets)), len(calls)))
    assert len(calls) % sets == 0
    assert sets <= len(calls) <= device_limits.MOST_CALLS


def test_a_short_call_whose_first_launch_is_slow_for_each_set_is_timed_by_its_graph(monkeypatch):
    device, met = Device(monkeypatch, seconds=3e-5, host=1e-5), set()

    def put(index):
        device.host = 1e-5 if index in met else 3e-4
        met.add(index)
        device.put(index)

    assert device_limits.replays(put, device, sets=15)(1000, 1) == pytest.approx(3e7, rel=1e-6)


@pytest.mark.parametrize("host", [2.2e-4, 4e-4])
def test_a_short_call_whose_launches_keep_the_host_busy_is_timed_by_its_graph(monkeypatch, host):
    device = Device(monkeypatch, seconds=3e-5, host=host)
    assert device_limits.replays(device.put, device, sets=15)(1000, 1) == pytest.approx(3e7, rel=1e-6)


def test_a_graph_lasts_long_enough_to_hide_its_launch(monkeypatch):
    device = Device(monkeypatch, seconds=2e-6, host=1e-5)
    device_limits.replays(device.put, device, sets=1)
    assert 2e-6 * len(device.graphs[-1].calls) >= 0.9e-3


def test_a_long_call_is_put_on_the_stream_without_a_graph_its_sets_in_turn(monkeypatch):
    device = Device(monkeypatch, seconds=1e-3)
    sample = device_limits.replays(device.put, device, sets=4)
    assert device.graphs == []
    assert sample(10, 2) == pytest.approx(10e6)
    assert device.put_calls == [index % 4 for index in range(len(device.put_calls))]


def test_what_no_graph_can_hold_is_put_on_the_stream_call_by_call(monkeypatch):
    device = Device(monkeypatch, seconds=2e-6, host=1e-5)
    sample = device_limits.replays(device.put, device, 1, captured=False)
    assert device.graphs == []
    assert sample(100, 0) == pytest.approx(100 * 10_000)


def test_a_call_of_seconds_is_not_warmed_up_again_and_again(monkeypatch):
    device = Device(monkeypatch, seconds=0.5)
    device_limits.replays(device.put, device, sets=4)
    assert len(device.put_calls) == 2


def test_the_clock_is_looked_at_once_a_sample(monkeypatch):
    device, looks = Device(monkeypatch, seconds=2e-6), []
    sample = device_limits.replays(device.put, device, 1, lambda: looks.append(device.now))
    before = len(looks)
    sample(5000, 1)
    assert len(looks) == before + 1


def test_contestants_on_a_device_are_compared_by_the_one_protocol(monkeypatch):
    quick, slow = Device(monkeypatch, 2e-6), Device(monkeypatch, 6e-6)
    entered = []
    for name, device in (("a", quick), ("b", slow)):
        monkeypatch.setattr(device_limits, "Event", lambda _, device=device: Event(device))
        monkeypatch.setattr(device_limits, "Graph", lambda _, device=device: Graph(device))
        entered.append(Contestant(name, device_limits.replays(device.put, device, 1)))
    assert compare(entered, seconds=0.5).versus["b"].median == pytest.approx(3.0)


def view(pointer, shape, strides, dtype="f32"):
    return View(pointer, shape, strides, dtype)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (view(4096, (1, 8, 8), (256, 32, 4)), 16),
        (view(4100, (1, 8, 8), (256, 32, 4)), 4),
        (view(4096, (1, 8, 7), (196, 28, 4)), 4),
        (view(4096, (1, 8, 6), (192, 24, 4)), 8),
        (view(4096, (2, 1, 5), (20, 20, 4)), 4),
        (view(4096, (1, 1, 5), (20, 20, 4)), 16),  # strides of one row and one matrix are never taken
        (view(4096, (1, 8, 8), (128, 2, 16), "f16"), 16),  # by columns
        (view(4096, (3, 8, 8), (0, 32, 4)), 16),
    ],
)
def test_alignment_is_that_of_the_pointer_and_of_every_stride_that_is_taken(one, expected):
    assert torch_operands.alignment(one) == expected


def test_what_is_shared_says_its_stream_and_its_bytes():
    described = torch_operands.Shared(View(4096, (2, 3), (12, 4), "f32", "cuda:0", 77)).__cuda_array_interface__
    assert described["stream"] == 77
    assert (described["data"], described["typestr"], described["strides"]) == ((4096, False), "<f4", (12, 4))
    assert torch_operands.Shared(View(4096, (2,), (2,), "bf16")).__cuda_array_interface__["typestr"] == "<i2"


@pytest.mark.parametrize(
    ("dtype", "tensor", "capability", "expected"),
    [
        ("f32", False, 90, ("f32", "CUDA cores")),
        ("f32", True, 90, ("f32", "CUDA cores")),  # float32 that stays float32 has no tensor cores
        ("tf32", True, 90, ("tf32", "mma.sync")),
        ("tf32", False, 90, ("f32", "CUDA cores")),
        ("bf16", True, 80, ("bf16", "mma.sync")),
        ("f16", True, 75, ("f32", "CUDA cores")),
        ("f16", False, 90, ("f32", "CUDA cores")),
        ("f64", True, 90, ("f64", "mma.sync")),
        ("f64", False, 90, ("f64", "CUDA cores")),
        ("e4m3", True, 90, ("f32", "CUDA cores")),
    ],
)
def test_the_unit_that_bounds_a_product(dtype, tensor, capability, expected):
    assert device_limits.unit(dtype, tensor, capability) == expected


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [("e4m3", 90, "wgmma"), ("int8", 90, "wgmma"), ("bf16", 100, "mma.sync"), ("bf16", 80, "mma.sync")],
)
def test_kernels_of_warpgroups_are_bounded_by_wgmma_on_hopper(dtype, capability, expected):
    assert device_limits.unit(dtype, True, capability, warpgroups=True) == (dtype, expected)


@pytest.mark.many(3)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_loops_behind_the_peaks_compile_without_spills(arch):
    for row in device_limits.UNITS.values():
        if row.runs(int(arch[3:].rstrip("a"))):
            assert nvrtc.code(row.source, row.kernel, arch).report.spill_stores == 0
    for copy in ("true", "false"):
        assert nvrtc.code("bandwidth.cu", f"bandwidth<{copy}, {device_limits.DEPTH}>", arch).report.spill_stores == 0


def test_a_step_of_a_peak_does_as_many_operations_as_its_instructions():
    ptx = {key: nvrtc.ptx(row.source, row.kernel, "sm_90a").text for key, row in device_limits.UNITS.items()}
    for (dtype, unit), row in device_limits.UNITS.items():
        text = ptx[dtype, unit]
        if unit == device_limits.CUDA_CORES:
            each, of = 2, text.count(f"fma.rn.{dtype}")
        elif unit == device_limits.WARPGROUPS:
            k = {"tf32": 8, "f16": 16, "bf16": 16}.get(dtype, 32)
            each, of = 2 * 64 * 256 * k // 128, text.count(f"wgmma.mma_async.sync.aligned.m64n256k{k}")
        else:
            each = {"f16": 4096, "bf16": 4096, "tf32": 2048, "f64": 1024}[dtype] // 32
            of = text.count("mma.sync.aligned")
        # The loop is unrolled, and what is left over has a copy of its own.
        assert of % (row.operations // each) == 0
        assert of


def test_a_peak_of_no_unit_is_an_error_that_lists_them():
    with pytest.raises(ArgumentError, match=r"f64 on mma\.sync"):
        device_limits.peak("int8", "CUDA cores", None)


def test_rivals_are_found_by_name():
    assert [rival.name for rival in cublas.RIVALS] == ["cublas", "cublas_full", "cublas_cupy"]
    with pytest.raises(ArgumentError, match="known: cublas, cublas_full, cublas_cupy"):
        cublas.find("cublasss")


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(timing.importlib.util, "find_spec", lambda name: None)
    assert cublas.find("cublas").missing() == "torch is not installed"
    assert cublas.find("cublas_cupy").missing() == "cupy is not installed"


def test_a_pytorch_without_cuda_is_no_rival():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this one has CUDA")
    assert "without CUDA" in cublas.find("cublas").missing()


def test_numpy_integer_views_see_what_was_never_written():
    """The poison is what all-ones bits are in every floating type: NaN."""
    for name in ("float16", "float32", "float64"):
        assert np.isnan(np.full(4, 0xFF, np.uint8).repeat(2).view(name)).all()


def test_without_pytorch_a_callers_arrays_are_what_has_the_interface(monkeypatch):
    monkeypatch.setattr(torch_operands, "without_torch", lambda: "torch is not installed")
    one = torch_operands.DeviceOperands(*(View(4096, (1, 2, 2), (16, 8, 4), "f32", "cuda:0", 77) for _ in range(3)))

    class Resident:
        work, stream, sets = Work(2, 2, 2, "f32", "f32"), None, (one,)

    seen = []
    put = torch_operands.own(Resident, lambda a, b, out: seen.append((a, b, out)))
    put(0)
    assert [x.__cuda_array_interface__["shape"] for x in seen[0]] == [(2, 2)] * 3
    Resident.work = Work(2, 2, 2, "bf16", "bf16")
    with pytest.raises(RefusedError, match="only through PyTorch"):
        torch_operands.own(Resident, lambda a, b, out: None)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_operands_of_new_shapes_are_pytorchs(dtype):
    torch = pytest.importorskip("torch")
    work = Work(8, 8, 8, dtype, dtype, batch=3, seed=5)
    convert, product, wait = torch_operands.new_shapes("cpu")
    assert (product, wait) == (torch.matmul, torch.cuda.synchronize)
    for (a, b), (x, y) in zip(processes.pairs(work, convert), processes.pairs(work), strict=True):
        assert a.dtype == b.dtype == {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
        assert a.float().numpy().tolist() == x.astype(np.float32).tolist()
        assert b.float().numpy().tolist() == y.astype(np.float32).tolist()


def on_the_cpu(x):
    torch = pytest.importorskip("torch")
    name = x.dtype.name
    if name not in cublas_names:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(f"int{8 * x.itemsize}")).view(getattr(torch, name))


cublas_names = ("bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("work", "names"),
    [
        (Work(64, 32, 48, "int8", "int32", b_layout="col"), ["torch._int_mm"]),
        (Work(64, 32, 64, "e4m3", "bf16", b_layout="col", scales="one"), ["torch._scaled_mm, use_fast_accum=True"]),
        (Work(100, 32, 64, "bf16", "bf16", b_layout="col", groups=4), ["torch._grouped_mm", "a loop of torch.mm"]),
    ],
    ids=str,
)
def test_pytorch_multiplies_factors_and_groups(monkeypatch, work, names):
    host = operands(work)
    matrices = tuple(map(on_the_cpu, host))
    monkeypatch.setattr(torch_operands, "on_torch", lambda resident: nullcontext())
    monkeypatch.setattr(cublas, "tensors", lambda resident: resident.tensors)
    monkeypatch.setattr(cublas, "tensor", on_the_cpu)
    scales = factors(work) if work.scales else ()
    ends = offsets(work) if work.groups else None
    resident = SimpleNamespace(work=work, tensors=[matrices], scales=scales, offsets=ends)
    ways = cublas.grouped_ways(resident) if work.groups else cublas._eight_bit_ways(resident, fast=True)
    assert list(ways) == names
    bound = (lambda k: 2.0**8 * k) if work.dtype == "e4m3" else float
    three = [x if x.ndim == 3 else x[None] for x in host]
    for name, put in ways.items():
        host[2].view(np.uint8).fill(poison(host[2].dtype))
        put(0)
        if name != "torch._grouped_mm":  # it allocates its result
            made = SimpleNamespace(work=work, host=three, poison=int, stream=SimpleNamespace(synchronize=int))
            made.result = lambda: three[2]
            assert on_cuda.error(made, lambda: None, bound) <= 1


def test_what_pytorch_refuses_is_a_reason():
    def put(index):
        raise ValueError("Invalid scaling configuration.\nMore of it")

    with pytest.raises(RefusedError, match=r"way: Invalid scaling configuration\.$"):
        cublas._tried({"a way": put}, None)
