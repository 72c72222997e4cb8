"""What doctor says of the tile unit and of CUDA: with nothing installed, without a device, and on made-up ones."""

import io
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

import gemmery_lab as lab
from gemmery import cache, config, load, tiers
from gemmery.cpu import jit, target
from gemmery.cuda import driver, nvrtc, sass
from gemmery.cuda.driver import find
from gemmery.errors import DeviceError
from gemmery_lab import cli, health
from gemmery_lab.measure import libraries
from gemmery_lab.report import terminal

MISSING = "no CUDA driver is installed on this machine"


@pytest.fixture
def looked(monkeypatch):
    """The findings by name; what has nothing to do with CUDA is left out."""
    monkeypatch.setattr(health, "_EXAMINED", {name: health._EXAMINED[name] for name in ("cuda", "nvdisasm")})

    def look():
        return {finding.name: finding for finding in lab.doctor()}

    return look


@pytest.fixture
def devices(monkeypatch):
    """Two devices, of which nothing can be run."""
    monkeypatch.setattr(driver, "missing", lambda: "")
    monkeypatch.setattr(driver, "count", lambda: 2)
    monkeypatch.setattr(driver, "version", lambda: "13.0")
    monkeypatch.setattr(driver, "device", lambda ordinal: find("h200" if ordinal == 0 else "a100"))
    monkeypatch.setattr(driver, "room", lambda ordinal: 139 << 30)
    monkeypatch.setattr(health.nvml, "driver_version", lambda: "580.95.05")
    monkeypatch.setattr(
        health.nvml, "Monitor", lambda ordinal: SimpleNamespace(most_clock=1980, power_limit=700.0, missing="")
    )


def test_without_a_device_nothing_is_wrong_and_one_line_says_what_is_missing(looked, monkeypatch):
    monkeypatch.setattr(driver, "missing", lambda: MISSING)
    found = looked()
    assert [one for one in found.values() if not one.ok] == []
    assert (found["gpu"].value, found["gpu"].advice) == ("none", MISSING)
    assert set(found) == {"cuda", "nvdisasm", "gpu"}


def test_the_compiler_is_named_with_its_version(looked):
    assert looked()["cuda"].value.startswith(f"NVRTC {nvrtc.version()}, cuda-bindings ")


def test_without_the_compiler_nothing_is_wrong_either(looked, monkeypatch):
    def fail():
        raise DeviceError("CUDA kernels need NVRTC: pip install '.[cuda]'")

    monkeypatch.setattr(nvrtc, "version", fail)
    monkeypatch.setattr(sass, "nvdisasm", lambda: "")
    found = looked()
    assert found["cuda"].ok
    assert "pip install '.[cuda]'" in found["cuda"].advice
    assert "pip install nvidia-cuda-nvdisasm" in found["nvdisasm"].advice


@pytest.mark.parametrize(
    ("flags", "granted", "limit", "value", "advice"),
    [
        ("amx_tile amx_bf16 amx_int8", True, "", "Intel AMX, granted by the system", ""),
        ("amx_tile amx_bf16 amx_int8", False, "", "not used", "Linux does from version 5.16 on"),
        (
            "amx_tile amx_bf16 amx_int8",
            True,
            "avx512",
            "not used",
            "GEMMERY_ISA switches the tile unit (Intel AMX) off",
        ),
        ("amx_tile amx_bf16", True, "", "not used", "lacks bfloat16 or 8-bit integers"),
        ("", True, "", "none", ""),
    ],
)
def test_the_tile_unit_is_granted_or_it_is_said_what_to_do(monkeypatch, flags, granted, limit, value, advice):
    told = {"model name": "a Xeon", "flags": f"{flags} avx512f avx512bw avx512vl avx512dq avx2 fma f16c"}
    monkeypatch.setattr(target, "_cpuinfo", lambda: told)
    monkeypatch.setattr(target, "_grants_tiles", lambda: granted)
    monkeypatch.setattr(target, "host", target.host.__wrapped__)
    monkeypatch.setenv("GEMMERY_ISA", limit)
    monkeypatch.setattr(health, "_EXAMINED", {"tile unit": health._tile_unit})
    monkeypatch.setattr(health, "_gpus", dict)
    (diagnosis,) = lab.doctor()
    assert diagnosis.value.startswith(value)
    assert diagnosis.ok == (not advice)
    assert advice in diagnosis.advice


def test_each_device_is_described(looked, devices):
    found = looked()
    assert found["cuda driver"].value == "580.95.05, supports CUDA 13.0"
    assert found["cuda:0"].value == (
        "h200: sm_90a, 132 multiprocessors up to 1.98 GHz, limited to 700 W, 139 GiB of memory free, L2 60 MiB"
    )
    assert found["cuda:1"].value.startswith("a100: sm_80, 108 multiprocessors")


def test_a_product_that_fails_or_is_wrong_is_a_finding(looked, devices, monkeypatch):
    monkeypatch.setattr(health, "Resident", lambda work, stream: work)
    monkeypatch.setattr(driver, "Stream", lambda ordinal: ordinal)
    monkeypatch.setattr(health.on_cuda, "build", lambda rung, config, resident: lambda index: None)
    errors = iter([0.5, float("nan")])
    monkeypatch.setattr(health.on_cuda, "error", lambda resident, run, bound: next(errors))
    found = looked()
    assert found["self-test on cuda:0"].ok
    assert not found["self-test on cuda:1"].ok
    assert "report it" in found["self-test on cuda:1"].advice
    monkeypatch.setattr(health, "Resident", None)
    assert not looked()["self-test on cuda:0"].ok


def test_the_vendors_library_is_named_or_why_it_is_not_there(looked, devices, monkeypatch):
    there = SimpleNamespace(missing=lambda: "", runs="cuBLAS 13.1 by PyTorch 2.11")
    absent = SimpleNamespace(missing=lambda: "cupy is not installed", runs=None)
    monkeypatch.setattr(health.cublas, "RIVALS", (there, absent))
    assert looked()["cublas"].value == "cuBLAS 13.1 by PyTorch 2.11"
    monkeypatch.setattr(health.cublas, "RIVALS", (absent,))
    assert "cupy is not installed" in looked()["cublas"].advice
    assert looked()["cublas"].ok


@pytest.mark.gpu
@pytest.mark.skipif(bool(driver.missing()), reason=driver.missing())
def test_on_a_device_a_product_is_right():
    found = {finding.name: finding for finding in lab.doctor()}
    assert found["cuda:0"].value.startswith(driver.device(0).name)
    assert found["self-test on cuda:0"].value.startswith("passed")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A cache folder with one entry of this version and two of others; nothing else is examined."""
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(health, "_EXAMINED", {"cache folder": health._cache_folder})
    monkeypatch.setattr(health, "_gpus", dict)
    own, older, oldest = (cache.key("cpu", version, b"1") for version in (jit.version(), "old", "older"))
    for name in (own, older, oldest):
        assert cache.write(str(tmp_path), name, bytes(1024 - 32))
    return tmp_path


def test_what_is_stored_is_told_by_version_and_pruned(folder):
    counted = sum(1 for entry in cache.listing(str(folder)) if entry.version in jit.versions())
    (found,) = lab.doctor()
    assert found.ok
    assert found.value.startswith(f"{folder}: {counted} entr")
    assert found.value.endswith("of this version, 2 entries (2 KiB) of others")
    assert "`gemmery doctor` can prune those of other versions" in found.advice
    assert lab.prune() == lab.Diagnosis("pruned", f"2 entries (2 KiB) removed from {folder}")
    (found,) = lab.doctor()
    assert (found.value.endswith("of this version"), found.advice) == (True, "")
    assert lab.prune().value == f"0 entries (0 KiB) removed from {folder}"


def test_a_folder_that_can_only_be_read_is_no_fault(folder, monkeypatch):
    monkeypatch.setattr(cache, "_failure", lambda *entry: OSError("read-only"))
    (found,) = lab.doctor()
    assert found.ok
    assert "entr" in found.value
    assert found.advice.startswith("others are not stored: make it a folder that only you can write")


def test_the_command_prunes_and_then_shows(folder, capsys):
    assert cli.run(["doctor", "--prune"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "pruned 2 entries (2 KiB) removed" in out
    assert "of others" not in out


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are POSIX's")
def test_a_folder_of_others_is_not_pruned(folder):
    folder.chmod(0o777)
    found = lab.prune()
    assert not found.ok
    assert "chmod 700" in found.advice
    assert len(os.listdir(folder)) >= 3


def test_without_a_folder_nothing_is_pruned(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path / "missing"))
    assert lab.prune().value == "there is no cache folder"
    assert not (tmp_path / "missing").exists()
    monkeypatch.setenv("GEMMERY_CACHE_DIR", "~nobody-of-that-name")
    assert lab.prune().value == "there is no cache folder"


def test_background_work_is_tried(monkeypatch):
    monkeypatch.setattr(tiers, "_work", tiers._Work())
    assert health._tiers().startswith("on: ")
    monkeypatch.setattr(tiers, "_work", tiers._Work())

    def fail(problem):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(health.dispatch, "specialized", fail)
    _, ok, advice = health._tiers()
    assert not ok
    assert advice == "report it: doctor: RuntimeError: no compiler"
    monkeypatch.setenv("GEMMERY_TIERS", "off")
    assert health._tiers().startswith("off, by GEMMERY_TIERS")
    monkeypatch.setenv("GEMMERY_TIERS", "perhaps")
    monkeypatch.setattr(health, "_EXAMINED", {"tiers": health._tiers})
    assert "one of on, off" in {finding.name: finding for finding in lab.doctor()}["tiers"].advice


def test_the_caches_in_memory_are_bounded_and_counted():
    counts = [part.partition(": ")[2].split() for part in health._memory().split(", ")]
    assert len(counts) == 7
    for used, of, places in counts:
        assert (of, 0 <= int(used) <= int(places)) == ("of", True)


def test_what_is_absent_is_not_marked_ok():
    output = io.StringIO()
    rows = [("torch", "not installed", True, ""), ("cpu", "Zen", True, ""), ("self-test", "failed", False, "")]
    terminal.findings(rows, Console(file=output, width=80))
    assert [line.split()[0] for line in output.getvalue().splitlines()] == ["-", "ok", "!!"]


def test_an_unknown_precision_is_a_fault(monkeypatch):
    name = "float32 precision"
    monkeypatch.setattr(health, "_EXAMINED", {name: health._EXAMINED[name]})

    def finding():
        return {one.name: one for one in lab.doctor()}[name]

    monkeypatch.setenv("GEMMERY_FLOAT32_PRECISION", "f32_plus")
    assert (finding().ok, finding().value) == (True, "f32_plus")
    monkeypatch.setenv("GEMMERY_FLOAT32_PRECISION", "double")
    assert not finding().ok
    assert "it must be one of tf32, f32_tensor" in finding().advice


def findings():
    return {finding.name: finding for finding in lab.doctor()}


def test_the_doctor_looks_at_everything_and_gives_advice_for_what_is_wrong():
    found = findings()
    assert {"cpu", "instruction set", "caches", "cores", "numpy blas", "environment", "cache folder"} <= set(found)
    assert found["self-test"].ok, found["self-test"].advice
    for finding in found.values():
        assert finding.value
        assert finding.ok or finding.advice


@pytest.fixture
def plain_environment(monkeypatch):
    """No variable that steers a BLAS, whatever the shell exports."""
    for name in config.distorting(libraries.STEERING):
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("plain_environment")
def test_the_doctor_sees_variables_that_distort(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    finding = findings()["environment"]
    assert not finding.ok
    assert "OPENBLAS_CORETYPE=Haswell" in finding.value
    assert "unset OPENBLAS_CORETYPE:" in finding.advice


@pytest.mark.usefixtures("plain_environment")
def test_the_doctor_accepts_a_thread_count(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert findings()["environment"].ok


def test_the_doctor_sees_a_cache_folder_that_others_can_write(monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(tmp_path))
    finding = findings()["cache folder"]
    assert not finding.ok
    assert "chmod 700" in finding.advice
    tmp_path.chmod(0o700)
    assert findings()["cache folder"].ok


def test_the_doctor_names_a_cache_folder_that_is_a_link_or_a_file(monkeypatch, tmp_path):
    real, link, file = tmp_path / "real", tmp_path / "link", tmp_path / "file"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    file.touch()
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(link))
    finding = findings()["cache folder"]
    assert not finding.ok
    assert finding.value == f"{link}, a link"
    assert f"links are not followed: set GEMMERY_CACHE_DIR={real}" in finding.advice
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(file))
    finding = findings()["cache folder"]
    assert not finding.ok
    assert finding.value == str(file)
    assert "a folder that only you can write" in finding.advice


def test_the_doctor_sees_more_threads_than_cores_and_values_that_are_none(monkeypatch):
    monkeypatch.setenv("GEMMERY_NUM_THREADS", "4096")
    assert not findings()["threads"].ok
    monkeypatch.setenv("GEMMERY_NUM_THREADS", "many")
    assert "'many'" in findings()["threads"].advice


@pytest.mark.parametrize(("busy", "advice"), [(0.1, ""), (1.7, "machine is busy: timings will be noisy")])
def test_the_doctor_tells_a_busy_machine(monkeypatch, busy, advice):
    monkeypatch.setattr(load, "watch", lambda: busy)
    finding = findings()["load"]
    assert finding.ok == (not advice)
    assert finding.advice.startswith(advice)
    assert bool(finding.advice) == bool(advice)
