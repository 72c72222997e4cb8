"""Predictions of the micro-kernels for ARM: llvm-mca's answers, what is refused without it, the stored table."""

import json
import stat
from pathlib import Path

import pytest

from gemmery.errors import CompileError, DeviceError
from gemmery_lab import cli
from gemmery_lab.inspection import cpu_rung
from gemmery_lab.inspection.cpu_rung import CORES, TYPES, PredictedShare, predict, sheet

ROOT = Path(__file__).parents[4]


def fake(folder, name, version, cycles=""):
    """A program in place of llvm-mca, whose passes take as many cycles as the text it reads has lines."""
    program = folder / name
    says = cycles or 'echo "Total Cycles:      $(( 200 * $(grep -c .) ))"'
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Debian LLVM version {version}"; exit; fi\n{says}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def only(monkeypatch, folder):
    """No program is found outside a folder."""
    monkeypatch.setattr("shutil.which", lambda name: str(folder / name) if (folder / name).exists() else None)


def test_the_share_is_that_of_the_multiply_adds_in_the_loop(monkeypatch, tmp_path):
    fake(tmp_path, "llvm-mca", "14.0.6", "exit 1")
    fake(tmp_path, "llvm-mca-19", "19.1.7")
    only(monkeypatch, tmp_path)
    rows = predict(["neoverse-v2"])
    assert {row.llvm for row in rows} == {"19.1.7"}
    assert [(row.dtype, row.out) for row in rows] == list(TYPES)
    assert {row.instruction for row in rows} >= {"fmla", "bfmmla", "smmla", "mla"}
    for row in rows:
        assert row.share == round(24 / row.cycles, 3)
        assert row.multiply_adds % 24 == 0
    by_type = {row.dtype: row.multiply_adds // 24 for row in rows}
    assert by_type == {"f32": 4, "f64": 2, "f16": 4, "bf16": 16, "int8": 32, "int32": 4}


def test_a_program_that_is_missing_too_old_or_fails_is_named(monkeypatch, tmp_path):
    only(monkeypatch, tmp_path)
    with pytest.raises(DeviceError, match="no llvm-mca on the PATH: install LLVM 17 or newer"):
        predict()
    fake(tmp_path, "llvm-mca", "14.0.6")
    with pytest.raises(DeviceError, match="llvm-mca 14 is too old"):
        predict()
    fake(tmp_path, "llvm-mca", "17.0.1", "echo no such CPU >&2; exit 1")
    with pytest.raises(CompileError, match="neoverse-n1: no such CPU"):
        predict(["neoverse-n1"])


def test_the_stored_predictions_are_of_every_core_and_type():
    rows = [PredictedShare(**row) for row in json.loads((ROOT / "benchmarks/arm_predicted.json").read_text())]
    assert {(row.core, row.dtype, row.out) for row in rows} == {(core, *types) for core in CORES for types in TYPES}
    for row in rows:
        assert 0 < row.share <= 1
        assert row.model == CORES[row.core][1]
    table = sheet(rows)
    assert table.head == (
        "types",
        "neoverse-v2",
        "neoverse-v1",
        "neoverse-v1 sve_256",
        "neoverse-n1",
        "apple-m1 (Apple A7)",
        "cortex-a76 (Cortex-A57)",
    )
    assert len(table.rows) == len(TYPES)
    assert "not measured" in table.notes[0]


def test_the_command_prints_the_table_and_the_records(monkeypatch, capsys):
    row = PredictedShare("neoverse-n1", "Neoverse N1", "f32", "f32", "fmla", 96, 12.0, 0.5, "19.1.7")
    monkeypatch.setattr(cpu_rung, "predict", lambda: (row,))
    assert cli.run(["predict"]) == 0
    assert "50% fmla, 8" in capsys.readouterr().out
    assert cli.run(["predict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["share"] == 0.5
