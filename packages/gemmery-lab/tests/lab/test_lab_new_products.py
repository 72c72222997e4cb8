"""Products of shapes never met: the shapes, the process that multiplies them, the records and their sheet."""

import json

import pytest

import gemmery
import gemmery_lab as lab
import records
from gemmery.errors import GemmeryError
from gemmery_lab import measurements, suites
from gemmery_lab.measure import processes
from gemmery_lab.measure.processes import EMPTY, FIRST, MET, REST, WARM, WORST
from gemmery_lab.measure.record import Run
from gemmery_lab.measure.suite import load
from gemmery_lab.measure.work import Work
from gemmery_lab.report.tables import sheets

WORK = Work(8, 8, 8, "f32", "f32", batch=3, seed=5)


def test_the_shapes_are_the_same_in_every_process():
    work = Work(1024, 1024, 1024, "f32", "f32", batch=500, seed=5)
    found = processes.shapes(work)
    assert found == processes.shapes(work)
    assert len(found) == 500
    assert {side for shape in found for side in shape} <= set(range(1, 1025))
    assert min(map(min, found)) == 1
    assert max(map(max, found)) > 900
    assert processes.flops(work) == sum(2 * m * n * k for m, n, k in found)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "int8"])
def test_operands_have_the_shapes_and_the_type(dtype):
    work = Work(8, 8, 8, dtype, dtype, batch=3, seed=5)
    found = processes.pairs(work)
    assert [(a.shape[0], b.shape[1], a.shape[1]) for a, b in found] == processes.shapes(work)
    assert all(a.shape[1] == b.shape[0] and a.flags.c_contiguous and a.any() for a, b in found)


def test_a_pass_sums_its_calls_and_knows_the_longest(monkeypatch):
    ticks = iter([0, 3, 10, 17, 20, 22])
    monkeypatch.setattr(processes.time, "perf_counter_ns", lambda: next(ticks))
    waited = []
    total, worst = processes.one_pass(lambda a, b: None, [(1, 2)] * 3, lambda: waited.append(1))
    assert total == 12e-9
    assert worst == 7e-9
    assert len(waited) == 3


def test_a_process_reports_each_pass(capsys):
    processes.run_new_shapes(gemmery, WORK.__dict__, "cpu", 0.0)
    found = json.loads(capsys.readouterr().out)
    numbers = {name for name, value in found.items() if not isinstance(value, list)}
    assert numbers == {"first", "new", "worst", "rival worst"}
    assert len(found["again"]) == len(found["rival"]) == processes.PASSES
    assert 0 < found["worst"] <= found["new"]
    assert 0 < found["rival worst"] <= found["rival"][0]


def test_a_process_that_fails_says_why():
    with pytest.raises(GemmeryError, match=r"failed in a new process: .*'f99'"):
        suites.run_passes(Work(8, 8, 8, "f99", "f99"), 1, "/nowhere")


def timed(*rounds: tuple[float, float]):
    """A stand-in for `run_passes`: (empty, warm) seconds of new shapes in each round, after the process that fills."""
    times = iter([1.0, *(one for pair in rounds for one in pair)])

    def run(work, threads, cache, device="cpu"):
        new = next(times)
        rival = {"rival": [1.0, 2.0, 9.0], "rival worst": [0.125]}
        return {"first": [0.5], "new": [new], "worst": [new / 4], "again": [0.25, 0.5, 0.75], **rival}

    return run


def test_records_have_totals_and_their_parts(monkeypatch):
    monkeypatch.setattr(suites, "run_passes", timed((7.5, 1.5), (8.5, 2.0), (9.5, 1.0)))
    plain = measurements.blank("new_shapes", "gm.matmul", WORK, 1)
    rows = {(m.kernel, m.case): m for m in suites.totals(plain, WORK, ["numpy"], 0.1)}
    ours = {case: m for (kernel, case), m in rows.items() if kernel == "gm.matmul"}
    parts = {f"{state}, {part}" for state in (EMPTY, WARM) for part in (FIRST, REST, WORST)}
    assert set(ours) == {EMPTY, WARM, MET} | parts
    assert ours[EMPTY].seconds == 9.0
    assert ours[WARM].seconds == 2.0
    assert ours[f"{WARM}, {REST}"].seconds == 1.5
    assert ours[f"{EMPTY}, {WORST}"].seconds == 8.5 / 4
    assert ours[MET].seconds == 0.5
    assert rows["numpy", ""].seconds == 2.0
    assert rows["numpy", WORST].seconds == 0.125
    assert {case for case, m in ours.items() if m.versus} == {EMPTY, WARM, MET, f"{WARM}, {REST}", f"{WARM}, {WORST}"}
    assert ours[WARM].versus["numpy"] == 1.0
    assert ours[f"{WARM}, {WORST}"].versus["numpy"] == 0.125 / (1.5 / 4)
    assert ours[MET].flops == processes.flops(WORK)


def test_without_a_rival_there_are_times_alone(monkeypatch):
    monkeypatch.setattr(suites, "run_passes", timed((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)))
    rows = suites.totals(measurements.blank("new_shapes", "gm.matmul", WORK, 1), WORK, [], 0.1)
    assert {m.kernel for m in rows} == {"gm.matmul"}
    assert not any(m.versus for m in rows)


def stored(monkeypatch) -> Run:
    rows = []
    for dtype in ("f32", "int8"):
        monkeypatch.setattr(suites, "run_passes", timed((7.5, 1.5), (8.5, 2.0), (9.5, 1.0)))
        work = Work(8, 8, 8, dtype, dtype, batch=3, seed=5)
        plain = measurements.blank("new_shapes", "gm.matmul", work, 1)
        rows += suites.totals(plain, work, ["numpy"], 0.1)
    rows.append(measurements.blank("new_shapes", "torch", WORK, 1, refused="only NumPy is timed in the same process"))
    return Run(records.MACHINE, "2026-11-22T10:00:00.000000+00:00", tuple(rows))


def test_a_sheet_has_a_row_for_each_state(monkeypatch):
    (sheet,) = sheets(stored(monkeypatch), ())
    assert sheet.title == "new shapes: 3 products with sides up to 8"
    assert [row[0].text for row in sheet.rows[:3]] == [f"f32, 1 thread, {case}" for case in (EMPTY, WARM, MET)]
    assert len(sheet.rows) == 6
    assert [cell.text for cell in sheet.rows[1]][1:6] == ["2.00 s", "500 ms", "375 ms", "2.00 s", "~1.00×"]
    assert [row[-1].text for row in sheet.rows[:3]] == ["", "0.333×", ""]
    assert [cell.text for cell in sheet.rows[2]][2:4] == ["", ""]
    assert all(len(row) == len(sheet.head) for row in sheet.rows)
    assert sheet.notes == ("PyTorch did not run: only NumPy is timed in the same process",)


def test_a_suite_runs_new_processes_beside_numpy(monkeypatch, tmp_path):
    monkeypatch.setattr(suites, "LEAST", 1)
    monkeypatch.setattr(suites, "ROUNDS", 1)
    file = tmp_path / "mine.toml"
    text = 'kind = "new_shapes"\nrivals = ["numpy"]\nthreads = [1]\n[[product]]\ncount = 2\nlargest = 4'
    file.write_text(text)
    run = lab.bench([str(file)], seconds=0.001)
    ours = {m.case: m for m in run.measurements if m.kernel == "gm.matmul"}
    assert ours[MET].samples == 1
    assert ours[EMPTY].seconds > ours[f"{EMPTY}, {FIRST}"].seconds > 0
    numpy = {m.case: m for m in run.measurements if m.kernel == "numpy"}
    assert numpy.keys() == {"", WORST}
    assert numpy[""].note.startswith("NumPy")


def test_all_threads_are_one_for_each_core(monkeypatch, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('threads = [1, "all"]\n[[product]]\nsquare = [4]')
    found = load(file)
    assert found.threads == (1, 0)
    for cores, counts in ((4, (1, 4)), (1, (1,))):
        monkeypatch.setattr(suites.target, "cores", lambda cores=cores: cores)
        assert suites._counts(found, 0) == counts
    assert suites._counts(found, 3) == (3,)
