"""The load of other processes: what the kernel accounts, without what this process and its rivals use."""

import os
import subprocess
import sys
import time

import pytest

from gemmery import load
from gemmery.load import Reading


def test_what_is_ours_does_not_count():
    first = Reading(at=10.0, busy=100.0, own=7.0)
    assert load.others(first, Reading(at=12.0, busy=104.0, own=11.0)) == 0.0
    assert load.others(first, Reading(at=12.0, busy=104.0, own=8.0)) == 1.5
    assert load.others(first, Reading(at=12.0, busy=101.9, own=9.0)) == 0.0  # ticks are 10 ms long: never below 0
    assert load.others(first, first) == 0.0


def test_more_cores_bear_more():
    assert load.limit(1) == load.limit(2) == load.limit(15) == 0.3
    assert load.limit(100) == 2.0


@pytest.fixture
def readings(monkeypatch):
    """A meter whose readings are made up."""

    def meter(*seconds):
        rows = iter(Reading(*row) for row in seconds)
        monkeypatch.setattr(load.Meter, "_read", lambda self: next(rows))
        return load.Meter()

    return meter


def test_a_meter_reads_from_one_call_to_the_next(readings):
    meter = readings((0.0, 0.0, 0.0), (1.0, 1.5, 1.0), (2.0, 2.5, 2.0))
    assert meter.load() == 0.5
    assert meter.load() == 0.0


def test_a_moment_is_added_to_the_next_reading(readings):
    meter = readings((0.0, 0.0, 0.0), (1.0, 1.0, 0.0), (1.01, 1.02, 0.0), (2.0, 1.5, 0.0))
    assert [meter.load() for _ in range(3)] == [1.0, 1.0, 0.5]


def test_the_kernels_table_is_read_for_the_cores_that_may_be_used(monkeypatch, tmp_path):
    table = tmp_path / "stat"
    table.write_text("cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 1 10 5000 70 2 3 4 0 0\ncpu1 7 0 0 0 0 0 0 0 0 0\nintr 5\n")
    monkeypatch.setattr(load, "_STAT", str(table))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert load._busy() * os.sysconf("SC_CLK_TCK") == pytest.approx(120)  # not idle, not waiting for a disk
    monkeypatch.setattr(load, "_STAT", str(tmp_path / "absent"))
    assert load._busy() == 0.0


@pytest.mark.process
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="there is no /proc")
def test_a_child_counts_as_ours_while_it_runs_and_when_it_has_ended():
    spin = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ninput()"
    before = load._own(())
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        running = load._own((child.pid,)) - before
        child.communicate(b"\n")
    ended = load._own((child.pid,)) - before
    assert running >= 0.08
    assert ended >= 0.08
    before, start = load._own(()), time.process_time()
    while time.process_time() - start < 0.02:
        pass
    assert load._own(()) - before >= 0.02
