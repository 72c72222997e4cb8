"""Rivals in their own processes: they compute the product, in a clean environment, and end with their owner."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest

from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery_lab.measure import libraries, timing
from gemmery_lab.measure.libraries import RivalProcess
from gemmery_lab.measure.work import Work, operands

WORKS = [
    Work(5, 6, 7, "f32", "f32"),
    Work(5, 6, 7, "f64", "f64", call="new"),
    Work(5, 6, 7, "f16", "f32"),
    Work(5, 6, 7, "bf16", "bf16"),
    Work(5, 6, 7, "bf16", "f32"),
    Work(16, 16, 16, "int8", "int32"),
    Work(5, 6, 7, "int64", "int64"),
    Work(5, 6, 7, "f32", "f32", batch=3),
    Work(5, 1, 7, "f32", "f32", vector=True, a_layout="strided"),
    Work(5, 6, 7, "f64", "f64", a_layout="col"),
]


@pytest.fixture(scope="module")
def numpy_process():
    with contextlib.closing(RivalProcess(libraries.find("numpy"), threads=1)) as process:
        yield process


def caught(monkeypatch):
    """What `libraries` would time, instead of a sampler: (function, a, b, c)."""
    seen = []
    monkeypatch.setattr(libraries, "products", lambda *call: seen.append(call))
    return seen


def as_numpy(x):
    return np.asarray(x.double() if type(x).__module__ == "torch" else x, np.float64)


@pytest.mark.parametrize("work", WORKS, ids=str)
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_rival_computes_the_product(monkeypatch, name, work):
    rival = libraries.find(name)
    if rival.missing():
        pytest.skip(rival.missing())
    calls = caught(monkeypatch)
    note = rival.prepare(work).note
    [(function, a, b, c)] = calls
    got = function(a, b) if c is None else function(a, b, out=c)
    x, y, _ = operands(work)
    expected = np.matmul(x.astype(np.float64), y.astype(np.float64))
    if work.out == "int64":
        expected = np.matmul(x, y).astype(np.float64)
    tolerance = 0.1 if "returns" in note else {"f32": 1e-3, "bf16": 0.1}.get(work.out, 1e-10)
    assert np.max(np.abs(as_numpy(got) - expected)) <= tolerance
    assert as_numpy(got).shape == expected.shape


def test_a_rival_that_lacks_a_type_refuses_it_in_words():
    if libraries.find("torch").missing():
        pytest.skip("torch is not installed")
    for work in (Work(8, 8, 8, "uint16", "uint16"), Work(8, 8, 8, "int8", "int64")):
        with pytest.raises(RefusedError, match="PyTorch"):
            libraries.find("torch").prepare(work)


def test_a_round_trip_times_a_product(numpy_process):
    assert numpy_process.prepare(Work(64, 64, 64, "f32", "f32")) == ""
    assert numpy_process.sample(1, 1) > 0
    found = timing.compare([timing.Contestant("numpy", numpy_process.sample)], seconds=0.05)
    assert found.timings["numpy"].seconds > 0


def test_operands_are_made_once_for_the_same_product(numpy_process, monkeypatch):
    asked = []
    real = numpy_process._ask
    monkeypatch.setattr(numpy_process, "_ask", lambda message: (asked.append(message), real(message))[1])
    for work in (Work(3, 3, 3, "f64", "f64"), Work(3, 3, 3, "f64", "f64"), Work(4, 4, 4, "f64", "f64")):
        numpy_process.prepare(work)
    assert [message["prepare"]["m"] for message in asked] == [3, 4]


def test_it_says_which_kernels_it_runs(numpy_process):
    assert "NumPy" in numpy_process.runs
    assert np.__version__ in numpy_process.runs


def test_an_error_there_is_an_error_here_and_the_process_lives_on(numpy_process):
    with pytest.raises(GemmeryError, match="'f8' is not supported"):
        numpy_process.prepare(Work(4, 4, 4, "f8", "f8"))
    with pytest.raises(GemmeryError, match="before prepare"):
        numpy_process.sample(1, 0)
    numpy_process.prepare(Work(4, 4, 4, "f32", "f32"))
    assert numpy_process.sample(1, 0) > 0


def test_variables_that_steer_a_blas_do_not_reach_it(monkeypatch):
    for name in ("OPENBLAS_CORETYPE", "OMP_NUM_THREADS", "MKL_CBWR", "BLIS_ARCH_TYPE", "GOTO_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("HARMLESS", "kept")
    plain = libraries.environment(libraries.find("numpy"), threads=3)
    assert not {"OPENBLAS_CORETYPE", "MKL_CBWR", "BLIS_ARCH_TYPE", "GOTO_NUM_THREADS"} & set(plain)
    assert plain["OMP_NUM_THREADS"] == plain["OPENBLAS_NUM_THREADS"] == "3"
    assert plain["HARMLESS"] == "kept"
    assert libraries.environment(libraries.find("numpy_avx512"), threads=1)["OPENBLAS_CORETYPE"] == "SKYLAKEX"


def test_the_default_kernels_are_chosen_whatever_the_shell_exports(monkeypatch, numpy_process):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    with contextlib.closing(RivalProcess(libraries.find("numpy"), threads=1)) as process:
        assert process.runs == numpy_process.runs


def test_a_process_that_dies_is_reported_with_its_last_words():
    with contextlib.closing(RivalProcess(libraries.find("numpy"), threads=1)) as process:
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(GemmeryError, match="its process ended"):
            process.prepare(Work(4, 4, 4, "f32", "f32"))


def test_closing_ends_the_process_even_in_the_middle_of_a_product():
    process = RivalProcess(libraries.find("numpy"), threads=1)
    process.prepare(Work(700, 700, 700, "f16", "f16"))
    process._process.stdin.write(b'{"sample": [50, 0]}\n')
    process._process.stdin.flush()
    time.sleep(0.05)
    process.close()
    assert process._process.returncode == -signal.SIGKILL


def test_a_library_that_is_not_there_is_refused():
    absent = libraries.Library("absent", lambda: "absent is not installed", str, libraries._prepare_numpy)
    with pytest.raises(RefusedError, match="absent is not installed"):
        RivalProcess(absent, threads=1)


def test_an_unknown_rival_lists_the_known():
    with pytest.raises(ArgumentError, match="numpy, numpy_installed, numpy_avx512, torch, mkl"):
        libraries.find("goto")
