"""First calls, timed in new processes: what they take in all and in pieces, and in which cache."""

import pytest

import gemmery_lab as lab
from gemmery.errors import GemmeryError
from gemmery_lab import suites
from gemmery_lab.measure import processes, suite
from gemmery_lab.measure.processes import PIECES
from gemmery_lab.measure.work import Work
from gemmery_lab.report.tables import sheets

pytestmark = pytest.mark.sampled(3)


def test_the_time_of_new_shapes_counts_their_processes(tmp_path):
    """7 processes of 2 s for a work of few operations, with 10 rests of 0.25 s each if there are workers."""
    file = tmp_path / "mine.toml"
    file.write_text('kind = "new_shapes"\nthreads = [1]\n[[product]]\ncount = 2\nlargest = 8\ndtype = ["f32", "f16"]')
    mine = suite.load(file)
    assert suites.expected([mine], 0, 3.0) == "2 measurements, about 30 s"
    assert suites.expected([mine], 2, 3.0) == "2 measurements, about 60 s"
    assert suites.expected([suite.load(suite.find("new_shapes"))], 1, 3.0) == "4 measurements, about 70 s"


def test_a_first_call_is_timed_in_new_processes(tmp_path):
    file = tmp_path / "first.toml"
    file.write_text('kind = "first_call"\nrivals = ["numpy"]\n[[product]]\nsquare = [8]')
    run = lab.bench([str(file)], seconds=0.001)
    found = {m.kernel: m for m in run.measurements if not m.refused and not m.case}
    assert set(found) == {suites.COLD_CACHE, suites.WARM_CACHE, "numpy"}
    assert set(found[suites.WARM_CACHE].versus) == {suites.COLD_CACHE, "numpy"}
    assert all(m.seconds > 0 for m in found.values())
    pieces = {(m.kernel, m.case): m.seconds for m in run.measurements if m.case}
    assert set(pieces) == {(kernel, piece) for kernel in (suites.COLD_CACHE, suites.WARM_CACHE) for piece in PIECES}
    assert pieces[suites.COLD_CACHE, "compile"] > 0
    assert pieces[suites.WARM_CACHE, "compile"] == 0
    assert all(
        pieces[suites.WARM_CACHE, piece] > 0 for piece in ("import", "plan", "load", "the rest", "the next call")
    )
    (sheet,) = sheets(run, ())
    assert [row[0].text for row in sheet.rows] == [
        "n = 8, f32, warm cache",
        "n = 8, f32, cold cache",
        "n = 8, f32, NumPy",
    ]
    assert sheet.head[1:] == ("first product", *PIECES, "× cold cache", "× NumPy")
    assert all(len(row) == len(sheet.head) for row in sheet.rows)


def test_spans_of_several_threads_count_once():
    spans = {"plan": [(0, 100)], "load": [(10, 40), (20, 60), (70, 80)], "compile": [(25, 55)]}
    taken = processes.pieces({"import": 7, "call": 110, "next": 3, "spans": spans})
    nanoseconds = {name: round(1e9 * value) for name, value in taken.items()}
    assert nanoseconds == {"import": 7, "plan": 40, "compile": 40, "load": 20, "the rest": 10, "the next call": 3}


def test_a_first_call_fills_the_cache_it_is_given_and_no_other(monkeypatch, tmp_path):
    mine, given = tmp_path / "mine", tmp_path / "given"
    monkeypatch.setenv("GEMMERY_CACHE_DIR", str(mine))
    assert suites.run(suites._OURS, Work(8, 8, 8, "f32", "f32"), 1, str(given)) > 0
    assert list(given.iterdir())
    assert not mine.exists()


def test_a_first_call_that_fails_says_why():
    with pytest.raises(GemmeryError, match="ZeroDivisionError"):
        suites.run("1 / 0", Work(2, 2, 2, "f32", "f32"), 1, "/nowhere")
