"""Records: written whole, read back equal, and no damage to a file hides the rest of it."""

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import sys

import pytest

from gemmery.cpu import llvm, target
from gemmery.cpu.target import Target
from gemmery.errors import ArgumentError
from gemmery_lab.measure import libraries, record
from gemmery_lab.measure.record import Gpu, MachineRecord, Measurement, Run

MACHINE = MachineRecord(
    "a-cpu-avx2-4c", "A CPU", "avx2", 4, 32768, 1 << 20, 0, "Linux 6", "3.11.0", "2.0", "0.50", "blas", "0.1"
)


def measurement(**changes):
    plain = Measurement("s", "packed", 4, 5, 6, "f32", "f32", 1, 1, 0.5, 0.4, 0.6, 9, 240, 100)
    return dataclasses.replace(plain, **changes)


def run(*measurements, started="2026-01-01T00:00:00.000001+00:00"):
    return Run(MACHINE, started, measurements)


def test_what_is_appended_is_read_back(tmp_path):
    file = tmp_path / "new" / "a.jsonl"
    full = measurement(
        case="cold",
        config={"block": 8},
        peak_gflops=10.0,
        bandwidth_gbs=2.0,
        versus={"numpy": 1.5},
        spread={"numpy": 0.1},
        error=0.25,
        checked=True,
        note="é",
    )
    record.append(file, run(full, measurement(refused="too slow", seconds=0.0)))
    assert record.read(file) == (run(full, measurement(refused="too slow", seconds=0.0)),)


def test_a_gpu_is_part_of_its_machine(tmp_path):
    file = tmp_path / "a.jsonl"
    gpu = Gpu("A GPU", 90, 132, 50 << 20, 1980, 700.0, "580.1", "13.0", "13.5")
    timed = measurement(unit="CUDA cores", precision="tf32", copy_gbs=4.0, clock_mhz=1755)
    wanted = Run(dataclasses.replace(MACHINE, gpu=gpu), "run", (timed,))
    record.append(file, wanted)
    assert record.read(file) == (wanted,)


def test_a_machine_that_was_written_before_there_were_gpus_is_read(tmp_path):
    file = tmp_path / "a.jsonl"
    record.append(file, run(measurement()))
    old = json.loads(file.read_text().splitlines()[0])
    del old["machine"]["gpu"]
    file.write_text("\n".join([json.dumps(old), *file.read_text().splitlines()[1:]]))
    assert record.read(file) == (run(measurement()),)
    assert record.read(file)[0].machine.gpu.name == ""


def test_a_gpu_of_a_later_version_is_read_without_what_is_not_known(tmp_path):
    file = tmp_path / "a.jsonl"
    record.append(file, Run(dataclasses.replace(MACHINE, gpu=Gpu("A GPU")), "run", ()))
    file.write_text(file.read_text().replace('"sms": 0', '"sms": 0, "fans": 4'))
    assert record.read(file)[0].machine.gpu == Gpu("A GPU")


def test_measurements_of_one_run_arrive_one_by_one_and_the_machine_once(tmp_path):
    file = tmp_path / "a.jsonl"
    for k in range(3):
        record.append(file, run(measurement(k=k)))
    assert file.read_text().count('"machine"') == 1
    assert [m.k for m in record.read(file)[0].measurements] == [0, 1, 2]


def test_two_runs_at_once_do_not_mix(tmp_path):
    file = tmp_path / "a.jsonl"
    for k in range(4):
        record.append(file, run(measurement(k=k), started=f"run{k % 2}"))
    assert [(r.started, [m.k for m in r.measurements]) for r in record.read(file)] == [
        ("run0", [0, 2]),
        ("run1", [1, 3]),
    ]


@pytest.mark.parametrize("kept", [1, 20, 60])
def test_a_torn_line_costs_itself_alone(tmp_path, kept):
    file = tmp_path / "a.jsonl"
    record.append(file, run(measurement(k=1), measurement(k=2)))
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    file.write_bytes(whole[: last + kept])
    assert [m.k for m in record.read(file)[0].measurements] == [1]
    record.append(file, run(measurement(k=3)))
    assert [m.k for m in record.read(file)[0].measurements] == [1, 3]


def test_a_torn_machine_line_is_written_again(tmp_path):
    file = tmp_path / "a.jsonl"
    record.append(file, run())
    file.write_bytes(file.read_bytes()[:10])
    record.append(file, run(measurement(k=3)))
    assert [m.k for m in record.read(file)[0].measurements] == [3]


def test_no_figure_that_is_not_a_number_is_stored(tmp_path):
    file = tmp_path / "a.jsonl"
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            record.append(file, run(measurement(seconds=value)))
    assert not file.exists()


def test_a_key_of_a_later_version_is_left_out(tmp_path):
    file = tmp_path / "a.jsonl"
    record.append(file, run(measurement()))
    file.write_text(file.read_text().replace('"suite"', '"later": 1, "suite"'))
    assert record.read(file) == (run(measurement()),)


def test_a_whole_line_that_is_no_record_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    record.append(file, run(measurement()))
    with file.open("a") as handle:
        handle.write(json.dumps({"run": "x", "measurement": {"suite": "s"}}) + "\n")
    with pytest.raises(ArgumentError, match=re.escape(f"{file}:3")):
        record.read(file)


def test_a_missing_file_is_an_error_in_words(tmp_path):
    with pytest.raises(ArgumentError, match=r"absent\.jsonl"):
        record.read(tmp_path / "absent.jsonl")


def test_gflops_come_from_the_median_and_a_refused_one_has_none():
    assert measurement().gflops == pytest.approx(240 / 0.5 / 1e9)
    assert measurement(seconds=0.0).gflops == 0.0


def test_the_fingerprint_of_this_machine_names_a_file():
    found = record.cpu_machine()
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*-\d+c", found.name)
    assert found.cores >= 1
    assert found.numpy
    assert found.blas


@pytest.mark.parametrize(
    ("features", "suffix"),
    [("amx_tile amx_bf16 amx_int8", ""), ("", "-without-amx"), ("amx_bf16 amx_int8", "-without-amx")],
)
def test_a_xeon_has_other_records_without_its_tile_unit(monkeypatch, features, suffix):
    xeon = Target("avx512", frozenset(features.split()) | {"avx512_fp16"}, model="GenuineIntel 6 207")
    monkeypatch.setattr(target, "host", lambda: xeon)
    monkeypatch.setattr(llvm, "host_cpu", lambda: "emeraldrapids")
    monkeypatch.setattr(libraries, "steering", list)
    assert record.cpu_machine.__wrapped__().name == f"emeraldrapids-avx512{suffix}-{target.cores()}c"


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variable names kernels of x86")
def test_the_machine_runs_what_the_rival_runs_whatever_the_shell_exports():
    script = "from gemmery_lab.measure import record; print(record.cpu_machine().blas)"
    plain = {name: value for name, value in os.environ.items() if not name.startswith(libraries.STEERING)}
    said = [
        subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
        for env in (plain, {**plain, "OPENBLAS_CORETYPE": "Prescott"})
    ]
    assert said[0] == said[1]
    assert "kernels" in said[0]


@pytest.mark.parametrize(
    "row",
    [
        5,
        [],
        {},
        {"run": "a", "machine": 5},
        {"run": "a", "measurement": [1]},
        {"run": 7, "machine": dataclasses.asdict(MACHINE)},
        {"run": ["a"], "measurement": {}},
        {"run": "a", "measurement": {**dataclasses.asdict(measurement()), "seconds": "soon"}},
        {"run": "a", "machine": {**dataclasses.asdict(MACHINE), "gpu": 3}},
        {"run": "a", "machine": {**dataclasses.asdict(MACHINE), "cpu": None}},
    ],
    ids=str,
)
def test_a_line_of_another_shape_is_named(tmp_path, row):
    file = tmp_path / "a.jsonl"
    record.append(file, run(measurement()))
    with file.open("a") as handle:
        handle.write(json.dumps(row) + "\n")
    with pytest.raises(ArgumentError, match=re.escape(f"{file}:3: not a record")):
        record.read(file)
