"""Suites whose products are run by named rungs, against each other and the rivals."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import gemmery
import gemmery_lab as lab
import records
from gemmery import limits, tiers
from gemmery.cpu import threads
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.ladder.cpu import CPU
from gemmery.limits import Bandwidth
from gemmery_lab import session as contest
from gemmery_lab.measure import timing
from gemmery_lab.measure.work import Work
from gemmery_lab.measurements import Runnable
from gemmery_lab.report.suite_tables import products
from gemmery_lab.session import Task, entrant, open_session

SUITE = """
rivals = ["numpy"]
[[product]]
name = "who wins"
rungs = ["simd_row", "packed kc=16", "streamed", "gm.matmul", "gm.matmul threads=1"]
shapes = [[5, 40, 70]]
a = "col"
[[product]]
shapes = [[5, 6, 7]]
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(limits, "peak", lambda dtype, threads: 100.0 * threads)
    monkeypatch.setattr(limits, "bandwidth", lambda threads: Bandwidth(20.0, 18.0))


@pytest.fixture
def bench(tmp_path):
    def run(text):
        file = tmp_path / "mine.toml"
        file.write_text(text)
        return lab.bench([str(file)], seconds=0.05).measurements

    return run


PACKED = """
rivals = ["numpy"]
[[product]]
name = "weights"
rungs = ["gm.matmul packed=1", "gm.matmul"]
shapes = [[3, 40, 70]]
b = "col"
dtype = ["int8"]
out = "int32"
"""


def test_a_b_packed_before_is_checked_and_compared(bench):
    named = {m.kernel: m for m in bench(PACKED) if "leaves it out" not in m.refused}
    assert list(named) == ["gm.matmul packed=1", "gm.matmul", "numpy"]
    packed = named["gm.matmul packed=1"]
    assert packed.checked
    assert packed.error == 0
    assert packed.note == "packed"
    assert set(packed.versus) == {"gm.matmul", "numpy"}


BATCH = """
rivals = []
[[product]]
shapes = [[3, 5, 11]]
batch = [9000]
"""


def test_a_batch_is_timed_with_the_kernel_for_its_shape(bench, monkeypatch):
    timed, products, before = [], timing.products, tiers.state().finished

    def noting(function, *arrays):
        timed.append((function, tiers.state().finished, threads.generation))
        return products(function, *arrays)

    monkeypatch.setattr(timing, "products", noting)
    bench(BATCH)
    [(function, finished, generation)] = timed
    assert function is gemmery.matmul
    assert finished > before
    assert threads.generation <= generation + 1  # at each change the kernel would be dropped


def test_each_is_checked_and_compared_with_every_other(bench):
    rows = bench(SUITE)
    named = {m.kernel: m for m in rows if m.case == "who wins, a transposed" and "leaves it out" not in m.refused}
    assert list(named) == ["simd_row", "packed kc=16", "streamed", "gm.matmul", "gm.matmul threads=1", "numpy"]
    for label, m in named.items():
        assert m.seconds > 0
        assert set(m.versus) == set(m.spread) == set(named) - {label}
        assert m.checked == (label != "numpy")
        assert 0 <= m.error <= 1
    assert named["packed kc=16"].config == {"kc": 16}
    pair = named["simd_row"].versus["streamed"] * named["streamed"].versus["simd_row"]
    assert 0.5 < pair < 2  # medians of ratios and of their inverses
    assert [m.kernel for m in rows if m.case == ""] == ["gm.matmul", "numpy"]


def test_a_rung_that_refuses_is_recorded_with_its_reason(bench):
    rows = bench("rivals = []\n" + SUITE.split("\n", 2)[2].replace('"simd_row"', '"gemv"'))
    [gemv] = (m for m in rows if m.kernel == "gemv")
    assert "must be 1" in gemv.refused
    assert not gemv.seconds


def test_a_wrong_rung_is_found_out(bench, monkeypatch):
    real = contest.find

    def find(rungs, name):
        rung = real(rungs, name)
        if name != "streamed":
            return rung
        return type(rung)(name, rung.idea, None, rung.dtypes, rung.refuses, build=lambda p, c: lambda *_, threads: None)

    monkeypatch.setattr(contest, "find", find)
    errors = {m.kernel: m.error for m in bench(SUITE) if m.case}
    assert errors["streamed"] > 1
    assert errors["simd_row"] <= 1


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("nope", "'nope'"),
        ("packed kc", "mc, kc, nc"),
        ("packed kc=many", "'kc=many'"),
        ("packed block=8", "'block=8'"),
        ("scalar_naive block=8", "nothing"),
        ("gm.matmul kc=8", "threads"),
    ],
)
def test_a_bad_name_is_an_error(label, named):
    with pytest.raises(ArgumentError, match=named):
        entrant(label, CPU)


def test_a_bad_name_is_an_error_before_anything_is_measured(bench):
    with pytest.raises(ArgumentError, match="'nope'"):
        bench(SUITE.replace('"streamed"', '"nope"'))


def test_a_rival_that_takes_no_part_is_a_note_and_no_column():
    one = next(iter(records.bench().measurements))
    row = replace(one, suite="who", case="packs", kernel="packed", versus={}, spread={})
    absent = replace(row, kernel="torch", seconds=0.0, refused="suite who leaves it out", versus={}, spread={})
    (sheet,) = products("who", [absent, row])
    assert sheet.head == ("product", "packed", "peak")
    assert sheet.notes == ("PyTorch did not run: suite who leaves it out",)


class Stage:
    """Operands on which gm.matmul can be checked and not timed, and a rival that dies."""

    def product(self, config, threads):
        def refuse():
            raise RefusedError("no room for a graph")

        return Runnable(refuse, lambda: 0.5)

    def rival(self, opponent):
        raise GemmeryError("its process ended")


def test_what_cannot_be_timed_is_recorded_as_refused_and_not_as_checked():
    task = Task("mine", Work(4, 4, 4, "f32", "f32"), (), 1, (), 0.1)
    with open_session(None, 1, lambda event: None) as session:
        (m,) = contest.contest(session, task, Stage())
    assert (m.refused, m.checked, m.error, m.peak_gflops) == ("no room for a graph", False, 0.0, 0.0)


def test_a_rival_that_dies_ends_the_run():
    task = Task("mine", Work(4, 4, 4, "f32", "f32"), (), 1, (SimpleNamespace(name="numpy", runs=""),), 0.1)
    with open_session(None, 1, lambda event: None) as session, pytest.raises(GemmeryError, match="process ended"):
        contest.contest(session, task, Stage())
