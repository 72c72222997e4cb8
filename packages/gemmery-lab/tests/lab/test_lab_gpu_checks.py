"""What a GPU gives against the reference, its limits, and what is refused without one."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import gemmery
import gemmery_lab as lab
import records
from gemmery.cuda import driver
from gemmery.cuda.device import KNOWN
from gemmery.errors import ArgumentError, DeviceError
from gemmery.ladder.cuda import CUDA
from gemmery.limits import Bandwidth
from gemmery_lab import on_cuda
from gemmery_lab import session as contest
from gemmery_lab.asked import ordinal
from gemmery_lab.measure.work import Work, factors, offsets
from gemmery_lab.measurements import WRONG
from gemmery_lab.on_cuda import Cuda
from made_up_device import WORK, Monitor, Resident, numpy_for_a_device

__all__ = ["numpy_for_a_device"]  # a fixture


@pytest.mark.parametrize("shape", [(1, 700, 900), (1, 1, 5000), (1, 5000, 1), (300, 64, 64), (1, 3, 2)])
def test_a_sample_holds_the_first_and_the_last_and_no_more_than_asked_for(shape):
    found = on_cuda.sample(shape, 1000, 1e6)
    for some, count in zip(found, shape, strict=True):
        assert len(set(some)) == len(some)
        assert some[-1] < count
        if len(some) > 1:
            assert (some[0], some[-1]) == (0, count - 1)
    assert 2 * 1000 * np.prod([len(some) for some in found]) <= 1.1e6 or min(map(len, found[1:])) <= 2


def test_factors_of_blocks_are_part_of_the_reference():
    work = Work(40, 130, 300, "e4m3", "f32", scales="blocks")
    resident = Resident(work)
    a, b, c = resident.host
    row, column = factors(work)
    x = a[0].astype(np.float32) * np.repeat(row, 128, axis=1)[:, :300]
    y = b[0].astype(np.float32) * np.repeat(np.repeat(column, 128, axis=0)[:300], 128, axis=1)[:, :130]

    def run(scale):
        c[0] = scale * (x @ y)

    assert on_cuda.error(resident, lambda: run(1), float) <= 1
    assert on_cuda.error(resident, lambda: run(1.01), float) > 1
    assert on_cuda.error(resident, lambda: None, float) == WRONG


def test_each_group_is_compared_with_its_own_matrix():
    work = Work(50, 16, 24, "f32", "f32", groups=5)
    resident = Resident(work)
    a, b, c = resident.host
    ends = offsets(work).tolist()

    def run(wrong):
        for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            c[0, start:end] = a[0, start:end] @ b[0 if wrong else group]

    assert on_cuda.error(resident, lambda: run(False), float) <= 1
    assert on_cuda.error(resident, lambda: run(True), float) > 1


def test_integers_are_compared_though_minus_one_has_all_bits_set():
    resident = Resident(Work(32, 32, 32, "int8", "int32"))
    a, b, c = resident.host
    a[:], b[:] = 0, 0
    a[0, 0, 0], b[0, 0, 0] = 1, -1

    def run():
        c[0] = a[0].astype(np.int32) @ b[0].astype(np.int32)

    assert on_cuda.error(resident, run, float) == 0
    assert on_cuda.error(resident, lambda: None, float) == WRONG


def test_options_of_the_product_become_its_arguments():
    call = on_cuda.product(WORK, {"batch_invariant": 1, "bias": 1, "gelu": 1}, bias="a vector")
    assert call.keywords == {"bias": "a vector", "activation": "gelu", "batch_invariant": True}
    assert on_cuda.product(WORK) is gemmery.matmul
    assert on_cuda.product(replace(WORK, precision="tf32")).keywords == {"precision": "tf32"}
    grouped = on_cuda.product(replace(WORK, groups=2), offsets=[1, 2])
    assert grouped.func.__name__ == "grouped_matmul"
    assert grouped.keywords == {"offsets": [1, 2]}
    assert contest.entrant("gm.matmul bias=1 gelu=1", CUDA).config == {"bias": 1, "gelu": 1}


def test_a_small_product_is_compared_whole():
    assert [len(some) for some in on_cuda.sample((3, 20, 30), 40, 1e9)] == [3, 20, 30]


@pytest.mark.parametrize(("device", "expected"), [("cpu", None), ("cuda", 0), ("cuda:0", 0), ("cuda:3", 3)])
def test_a_device_is_named_as_in_a_view(device, expected):
    assert ordinal(device) == expected


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cudas", "cpu:0", ""])
def test_another_name_is_an_error_that_says_which_there_are(device):
    with pytest.raises(ArgumentError, match="it is cpu, cuda, or cuda:N"):
        ordinal(device)


PEAKS = {("f32", "CUDA cores"): 60.0, ("f16", "mma.sync"): 600.0, ("f16", "wgmma"): 900.0}


def test_a_backend_measures_each_limit_of_its_device_once(monkeypatch):
    monkeypatch.setattr(driver, "missing", lambda: "")
    monkeypatch.setattr(driver, "device", lambda ordinal: KNOWN["h200"])
    monkeypatch.setattr(on_cuda.record, "gpu_machine", lambda ordinal: records.MACHINE)
    monkeypatch.setattr(on_cuda, "Stream", lambda ordinal: SimpleNamespace(ordinal=ordinal))
    monkeypatch.setattr(on_cuda, "Monitor", lambda ordinal: Monitor())
    monkeypatch.setattr(on_cuda.device_limits, "peak", lambda dtype, unit, stream: PEAKS[dtype, unit])
    monkeypatch.setattr(on_cuda.device_limits, "bandwidth", lambda stream: Bandwidth(4.0, 3.0))
    cuda, halves, begun = Cuda(1), replace(WORK, dtype="f16", out="f16"), []
    rows = [cuda.blank("mine", kernel, halves) for kernel in ("simt_a", "mma_b", "cublas", "gemv_c")]
    assert [m.unit for m in rows] == ["CUDA cores", "mma.sync", "wgmma", "CUDA cores"]
    limits = [cuda.limits(m, begun.append) for m in rows]
    assert limits == [(60.0, 4.0, 3.0), (600.0, 4.0, 3.0), (900.0, 4.0, 3.0), (60.0, 4.0, 3.0)]
    peaks = [f"peak of f16 on {unit}" for unit in ("mma.sync", "wgmma")]
    assert begun == ["peak of f32 on CUDA cores", "bandwidth of the device's memory", *peaks]
    assert (cuda.device, cuda.machine, cuda.ladder, cuda.clock()) == ("cuda:1", records.MACHINE, CUDA, 1755)


without_a_gpu = pytest.mark.skipif(not driver.missing(), reason="there is a GPU")


@without_a_gpu
@pytest.mark.parametrize(
    "ask",
    [
        lambda: lab.ladder(device="cuda"),
        lab.chain,
        lambda: lab.bench(["gpu_square"]),
        lambda: lab.bench(device="cuda:1"),
    ],
)
def test_without_a_device_one_line_says_what_is_missing(ask):
    with pytest.raises(DeviceError) as error:
        ask()
    assert driver.missing() in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda: lab.ladder(["packed"], device="cuda"),
            "rung 'packed' runs on the CPU: name a rung of the GPU's ladder",
        ),
        (lambda: lab.ladder(["simt_naive"]), "rung 'simt_naive' runs on a GPU: the device must be cuda, or emulator"),
        (lambda: lab.ladder(device="cuda", dtype="f12"), "dtype 'f12'"),
        (lambda: lab.ladder(device="cuda", sizes=[0]), "size 0"),
        (lambda: lab.ladder(dtype="tf32"), "dtype 'tf32'"),
        (lambda: lab.bench(["gpu_square", "square_f32"]), "suite 'square_f32' is for cpu, not cuda"),
        (lambda: lab.bench(["gpu_square"], ["numpy"]), "rival 'numpy' is not known on a GPU; known: cublas"),
        (lambda: lab.bench(["square_f32"], device="cuda"), "suite 'square_f32' is for cpu, not cuda"),
        (lambda: lab.chain(device="cpu"), "the device must be cuda"),
        (lambda: lab.chain([0]), "size 0"),
        (lambda: lab.chain(repeats=0), "repeats 0"),
        (lambda: lab.chain(dtype="int8"), "dtype 'int8'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_device_is_asked_for(ask, words):
    with pytest.raises(ArgumentError) as error:
        ask()
    assert words in str(error.value)
