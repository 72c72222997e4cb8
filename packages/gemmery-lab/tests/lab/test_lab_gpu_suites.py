"""Suites on a made-up GPU, and races without rests."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import gemmery_lab as lab
from gemmery.errors import RefusedError
from gemmery_lab import on_cuda, suites
from gemmery_lab import session as contest
from gemmery_lab import suites as shapes
from gemmery_lab.measure import suite, torch_operands
from gemmery_lab.measure.timing import Contestant
from gemmery_lab.session import Session, Task
from made_up_device import SPEEDS, WORK, MadeUp, Put, nanoseconds, numpy_for_a_device, rival, rung, session

__all__ = ["numpy_for_a_device"]  # a fixture


@pytest.fixture
def product(monkeypatch):
    """gm.matmul on NumPy's arrays, and the time until its call returns."""
    SPEEDS["gm.matmul"] = 2.0
    chosen = SimpleNamespace(rung=rung("simt_a", dtypes=("f32", "f16")))
    monkeypatch.setattr(on_cuda.dispatch, "choice", lambda problem: chosen)

    def own(resident, function):
        return Put(np.matmul, resident.sets, nanoseconds("gm.matmul", resident.work))

    calls = []

    def own_calls(resident, function):
        def sample(inner, warm):
            calls.append(inner)
            return 5000 * inner

        return sample

    monkeypatch.setattr(torch_operands, "own", own)
    monkeypatch.setattr(torch_operands, "own_calls", own_calls)
    return calls


def records_of(tmp_path, kind, *rivals):
    """The records of a suite of one product on the made-up device, and the names of what began."""
    file, begun = tmp_path / "mine.toml", []
    file.write_text(f'device = "cuda"\n{kind}\n[[product]]\nsquare = [64]')
    on = Session(MadeUp(rivals=rivals), 1, begun.append)
    suites.run_suite(on, suite.load(file), 0, (), 0.1)
    return on.run.measurements, [event.what for event in begun if event.measurement is None]


@pytest.mark.usefixtures("product")
def test_a_suite_compares_the_product_with_what_is_installed(tmp_path):
    absent = replace(rival(), name="cublas_cupy", missing=lambda: "cupy is not installed")
    (cupy, ours, theirs), begun = records_of(tmp_path, "", rival(), absent)
    assert (cupy.kernel, cupy.refused) == ("cublas_cupy", "cupy is not installed")
    assert (ours.suite, ours.kernel, ours.note, ours.threads) == ("mine", "gm.matmul", "simt_a", 0)
    assert ours.versus == pytest.approx({"cublas": 0.25}, rel=1e-3)
    assert ours.checked
    assert 0 < ours.error <= 1
    assert (ours.unit, ours.clock_mhz, ours.copy_gbs, ours.peak_gflops) == ("CUDA cores", 1755, 4000.0, 60000.0)
    assert (theirs.kernel, theirs.note, theirs.versus) == ("cublas", "cuBLAS 99, torch.mm", {})
    assert begun[-1] == "mine: 64x64x64 f32"


def test_the_time_of_a_call_is_taken_after_one_that_compiles(tmp_path, product):
    theirs = replace(rival(), calls=lambda resident: lambda inner, warm: 20_000 * inner)
    (ours, cublas), _ = records_of(tmp_path, 'kind = "call"', theirs)
    assert product[:3] == [1, 1, 1]  # that one, and two that calibrate
    assert (ours.kernel, ours.checked, ours.seconds) == ("gm.matmul, host", False, pytest.approx(5e-6))
    assert (ours.versus, cublas.versus) == ({"cublas": pytest.approx(4.0)}, {})
    assert ours.peak_gflops == ours.bandwidth_gbs == 0.0
    assert (cublas.kernel, cublas.note) == ("cublas", "cuBLAS 99")


def test_a_product_that_the_device_has_no_room_for_is_recorded(tmp_path, monkeypatch):
    def full(self, work):
        raise RefusedError("make it smaller")

    monkeypatch.setattr(MadeUp, "resident", full)
    records, _ = records_of(tmp_path, "", rival())
    assert [(m.kernel, m.refused) for m in records] == [("gm.matmul", "make it smaller")]


def test_without_names_the_suites_of_the_cpu_are_run(monkeypatch):
    ran = []
    monkeypatch.setattr("gemmery_lab.suites.run_suite", lambda session, found, *more: ran.append(found.name))
    lab.bench(seconds=1.0)
    assert "square_f32" in ran
    assert not any(name.startswith("gpu_") for name in ran)


def test_new_shapes_on_a_gpu_are_those_of_pytorch(monkeypatch):
    asked = []

    def rows(plain, *given):
        asked.append(given)
        return [replace(plain, case="warm cache"), replace(plain, kernel="cublas", case="")]

    monkeypatch.setattr(shapes, "totals", rows)
    on = session(ordinal=1, rivals=(rival(),))
    task = Task("gpu_new_shapes", WORK, (), 0, (on.backend.rival("cublas"),), 0.1)
    found = shapes.new_shapes(on, task)
    assert asked == [(WORK, ("cublas",), 0.1, "cuda:1")]
    assert [(m.suite, m.kernel, m.unit, m.note) for m in found] == [
        ("gpu_new_shapes", "gm.matmul", "CUDA cores", ""),
        ("gpu_new_shapes", "cublas", "CUDA cores", rival().runs),
    ]
    with pytest.raises(RefusedError, match="install torch"):
        shapes.new_shapes(on, replace(task, rivals=()))


class Clock:
    """Seconds that pass while contestants work."""

    now = 0.0


def working(name, nanoseconds, clock, log):
    def sample(inner, warm):
        clock.now += inner * nanoseconds / 1e9
        log.append((name, inner))
        return round(inner * nanoseconds)

    return Contestant(name, sample)


class Meter:
    """A monitor that reads a watt more at each burst of whoever works."""

    reads_power = False

    def __init__(self, log):
        self.log, self.since = log, 0

    def forget(self):
        self.since = len(self.log)

    def power(self):
        mine = self.log[self.since :]
        self.forget()
        return 100.0 * len({name for name, _ in mine}) + (mine[-1][0] == "a")

    def clock(self):
        return 1500


def test_without_rest_the_start_of_a_turn_does_not_count():
    clock, log = Clock(), []
    contestants = [working("a", 1e6, clock, log), working("b", 2e6, clock, log)]
    meter = Meter(log)
    race = on_cuda.race(contestants, meter, turn=1.0, rounds=4, now=lambda: clock.now)
    assert race.comparison.timings["a"].seconds == pytest.approx(1e-3)
    assert race.comparison.ratios("a")["b"].median == pytest.approx(2.0)
    assert race.comparison.timings["b"].samples == 4
    assert race.watts == {"a": 101.0, "b": 100.0}  # only its own readings
    assert race.clocks == {"a": 1500, "b": 1500}
    assert clock.now == pytest.approx(9.0, rel=0.1)  # a turn to heat up, and eight
    assert not meter.reads_power


def test_the_time_of_a_suite_counts_its_races(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('device = "cuda"\nrivals = ["cublas"]\nsustained = 1.0\n[[product]]\nsquare = [64, 8192]')
    assert suites.expected([suite.load(file)], 0, 1.5) == "2 measurements, about 10 s"


def test_a_call_longer_than_a_turn_is_timed_once():
    clock, log = Clock(), []
    race = on_cuda.race([working("a", 5e9, clock, log)], Meter(log), turn=1.0, rounds=1, now=lambda: clock.now)
    assert race.comparison.timings["a"].seconds == pytest.approx(5.0)


def test_large_products_are_raced_without_rest_too(monkeypatch):
    monkeypatch.setattr(contest, "SUSTAINED_ABOVE", WORK.problem.flops - 1)
    on = session(rivals=(rival(),), ladder=(rung("quick", speed=16.0),))
    clock, log = Clock(), []
    on.backend.sustained = lambda contestants, turn: on_cuda.race(
        [working(each.name, 1e6 * (index + 1), clock, log) for index, each in enumerate(contestants)],
        Meter(log),
        turn,
        now=lambda: clock.now,
    )
    task = Task("mine", WORK, ("quick",), 0, [on.backend.rival("cublas")], 0.1, rest=0.001, sustained=0.5)
    rows = contest.contest(on, task)
    assert [(m.kernel, m.case) for m in rows] == [
        *((name, "") for name in ("quick", "cublas")),
        *((name, "sustained") for name in ("quick", "cublas")),
    ]
    assert rows[2].versus == {"cublas": pytest.approx(2.0)}
    assert rows[2].joules == pytest.approx(rows[2].power_w * 1e-3)
    assert rows[0].power_w == 0
    small = replace(task, work=replace(WORK, m=63))
    assert [m.case for m in contest.contest(on, small)] == ["", ""]
