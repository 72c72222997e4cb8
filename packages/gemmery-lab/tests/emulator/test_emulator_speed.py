"""The suite that times the emulator: its records, what is checked with them, what it refuses, its table."""

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings")

import gemmery_lab as lab
from gemmery.cuda import nvrtc
from gemmery.errors import ArgumentError, DeviceError
from gemmery.ladder.cuda import CUDA
from gemmery_lab import launches
from gemmery_lab.launches import CHECKED, COUNTED, READY
from gemmery_lab.measure import suite
from gemmery_lab.measure.work import Work
from gemmery_lab.report.tables import sheets
from gemmery_lab.session import Task

SUITE = """kind = "emulator"
[[product]]
name = "f32"
rungs = ["simt_naive", "mma_f64", "simt_threadtile"]
square = [16, 32]
dtype = ["f32"]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short suite with a rung that does not take its type."""
    file = tmp_path_factory.mktemp("suites") / "tiny.toml"
    file.write_text(SUITE)
    return lab.bench([str(file)], seconds=0.001)


def test_each_rung_is_timed_in_three_ways(run):
    """On one thread, the best among the samples, and no rate that could be taken for this machine's."""
    taken = [m for m in run.measurements if not m.refused]
    keys = [(m.kernel, m.n, m.case) for m in taken]
    rungs, ways = ("simt_naive", "simt_threadtile"), (COUNTED, CHECKED, READY)
    assert keys == [(rung, n, way) for n in (16, 32) for rung in rungs for way in ways]
    for m in taken:
        assert m.threads == 1
        assert m.samples >= launches.LEAST
        assert 0 < m.best <= m.seconds
        assert m.flops == m.bytes == 0


def test_what_is_timed_was_checked(run):
    """Runs have an error within their bound; making a kernel ready computes nothing."""
    for m in run.measurements:
        if not m.refused:
            assert m.checked == (m.case != READY)
            assert m.error <= 1


def test_a_rung_that_does_not_take_the_product_says_why(run):
    refused = [m for m in run.measurements if m.refused]
    assert [(m.kernel, m.n) for m in refused] == [("mma_f64", 16), ("mma_f64", 32)]
    assert all("not f32" in m.refused for m in refused)


def test_without_the_compiler_a_record_says_what_is_missing(monkeypatch):
    """A suite among others does not end them."""

    def absent(*_):
        raise DeviceError("NVRTC is not found")

    monkeypatch.setattr(nvrtc, "ptx", absent)
    rows = launches.emulator_speed(None, Task("s", Work(8, 8, 8, "f32", "f32"), ("simt_naive",), 0, (), 0.001))
    assert [m.refused for m in rows] == ["NVRTC is not found"]


def test_a_finding_is_an_error(monkeypatch):
    """A kernel with a fault is not timed as a right one."""
    true = launches.emulated_rung
    monkeypatch.setattr(launches, "emulated_rung", lambda *given: replace(true(*given), findings=("a race",)))
    rows = launches.emulator_speed(None, Task("s", Work(16, 16, 16, "f32", "f32"), ("simt_naive",), 0, (), 0.001))
    assert [m.error > 1 for m in rows] == [True, True, False]


def test_its_table_has_a_row_for_each_product(run):
    """A kernel that ran several products has its shape in each row; a way that one lacks is blank."""
    (sheet,) = sheets(run, CUDA)
    assert sheet.head == ("kernel", COUNTED, CHECKED, READY)
    assert [row[0].text for row in sheet.rows] == [
        f"{rung}, n = {n}, f32" for n in (16, 32) for rung in ("simt_naive", "simt_threadtile")
    ]
    assert all(len(row) == 4 for row in sheet.rows)
    refused = {m.refused for m in run.measurements if m.refused}
    assert set(sheet.notes) == {f"mma_f64 was not run for f32: {reason}" for reason in refused}


def test_the_shipped_suite_has_the_rungs_that_are_watched():
    """Tiles in shared memory, in registers, on tensor cores; vectors; and large ones."""
    found = suite.load(suite.find("emulator"))
    assert found.kind == "emulator"
    named = {label for labels in found.rungs.values() for label in labels}
    assert named >= {"simt_naive", "simt_smem", "simt_pipelined", "mma_pipelined", "mma_f64", "gemv_vectorized"}
    assert {(work.m, work.n) for work in found.works} == {(256, 256), (1, 1024), (1024, 1024)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('kind = "emulator"\n[[product]]\nsquare = [8]', "rungs"),
        ('kind = "emulator"\ndevice = "cuda"\n[[product]]\nname = "a"\nrungs = ["simt_naive"]\nsquare = [8]', "cpu"),
        ('kind = "emulator"\n[[product]]\nname = "a"\nrungs = ["packed"]\nsquare = [8]', "packed"),
    ],
)
def test_a_suite_that_makes_no_sense_is_refused(tmp_path, text, said):
    """Without rungs, for a GPU, or with a rung of the CPU's ladder."""
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        lab.bench([str(file)])
