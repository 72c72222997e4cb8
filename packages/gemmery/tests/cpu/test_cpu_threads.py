"""The workers: the same bits for every number of threads, many callers, forks, signals, nothing while idle."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import probes
from gemmery import config
from gemmery.cpu import build, layout, pool, target
from gemmery.cpu import threads as counts
from gemmery.cpu.split import Unit
from gemmery.errors import ArgumentError
from gemmery.problem import Problem
from operands import numpy_dtype, place, random

pytestmark = pytest.mark.sampled(3)

COSTLY = Unit(1, 1, 1e6)  # every thread is worth waking
compiled = pytest.mark.skipif(not pool.address(), reason="this system has no compiled workers")
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
tasks = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system has no /proc/self/task")


def product(shape, name, out, threads, layouts="CCC"):
    m, n, k = shape
    a, b = place(random((1, m, k), name, 1), name, layouts[0]), place(random((1, k, n), name, 2), name, layouts[1])
    c = place(np.zeros((1, m, n), numpy_dtype(out)), out, layouts[2])
    kernel = build.packed(Problem(m, n, k, name, out), {})
    kernel(a.view, b.view, c.view, threads=threads)
    assert c.untouched_around()
    return c.array.tobytes()


@pytest.mark.parametrize("layouts", ["CCC", "FFC", "CCF"])
@pytest.mark.parametrize(
    ("name", "out"), [("f32", "f32"), ("f64", "f64"), ("bf16", "bf16"), ("f16", "f32"), ("int8", "int32")]
)
@pytest.mark.parametrize("shape", [(257, 263, 1031), (301, 64, 97), (7, 1500, 300), (1500, 5, 300), (130, 129, 2)])
def test_the_bits_are_the_same_for_every_number_of_threads(shape, name, out, layouts):
    alone = product(shape, name, out, 1, layouts)
    for threads in (2, 3, 5, 16):
        assert product(shape, name, out, threads, layouts) == alone


@pytest.mark.process
@compiled
def test_only_as_many_workers_start_as_a_product_uses():
    code = """
import probes
from gemmery.cpu import layout, pool
from gemmery.cpu.split import Unit
array, view = probes.zeros(1, 40, 40)
def run(threads): probes.mark(Unit(1, 1, 1e6))(view, view, view, threads=threads); return pool.started()
assert [run(t) for t in (1, 2, 2, 5, 3, 1000)] == [0, 1, 1, 4, 4, layout.WORKERS]
assert (array == 6).all()
"""
    succeeds(code)


def test_ten_threads_at_once():
    work = [((150, 130, 170), "f32"), ((64, 200, 90), "f64"), ((33, 500, 20), "int16")]
    alone = [product(shape, name, name, 1) for shape, name in work]
    start = threading.Barrier(10)

    def multiply(number):
        start.wait()
        for turn in range(20):
            shape, name = work[(number + turn) % 3]
            assert product(shape, name, name, 1 + (number + turn) % 4) == alone[(number + turn) % 3]

    with ThreadPoolExecutor(10) as executor:
        list(executor.map(multiply, range(10)))


@compiled
def test_a_second_caller_does_not_wait_for_the_first():
    """While the workers are held at a gate, another product runs on its caller's thread."""
    gate, (first, first_view), (second, second_view) = probes.Gate(), probes.zeros(1, 2, 1), probes.zeros(1, 40, 40)
    held = start(probes.gate(COSTLY), first_view, bias=gate.view, threads=2)
    gate.wait_for(2)
    beside = start(probes.mark(COSTLY), second_view, threads=2)
    beside.join(60)
    assert (second == 1).all()
    assert not first.any()
    gate.open()
    held.join(60)
    assert (first == 1).all()


@compiled
def test_more_callers_than_workspaces_take_turns():
    gate, kernel = probes.Gate(), probes.gate(None)
    results = [probes.zeros(1, 1, 1) for _ in range(layout.CALLERS + 6)]
    callers = [start(kernel, view, bias=gate.view) for _, view in results]
    gate.wait_for(layout.CALLERS)
    time.sleep(0.2)
    assert gate.words[0] == layout.CALLERS
    gate.open()
    for caller in callers:
        caller.join(60)
    assert all(array.item() == 1 for array, _ in results)


@pytest.mark.process
@compiled
@forks
def test_a_child_forked_in_the_middle_of_a_product_has_workers_of_its_own():
    gate, (array, view) = probes.Gate(), probes.zeros(1, 2, 1)
    plain = probes.mark(COSTLY)
    held = start(probes.gate(COSTLY), view, bias=gate.view, threads=2)
    gate.wait_for(2)
    taken = probes.slot(0)[0]
    child = os.fork()
    if child == 0:
        right = taken == 1 and probes.slot(0) == (0, 0, 0) and pool.started() == 0
        mine, mine_view = probes.zeros(1, 40, 40)
        plain(mine_view, mine_view, mine_view, threads=3)
        os._exit(0 if right and (mine == 1).all() and pool.started() == 2 else 1)
    status = os.waitpid(child, 0)[1]
    gate.open()
    held.join(60)
    assert status == 0
    assert (array == 1).all()


@pytest.mark.process
@forks
def test_children_of_a_process_that_goes_on_multiplying_get_the_same_bits():
    code = """
import os, threading
from test_cpu_threads import product
shape = (150, 130, 170)
alone, stop = product(shape, "f32", "f32", 1), threading.Event()
def work():
    while not stop.is_set():
        assert product(shape, "f32", "f32", 3) == alone
busy = threading.Thread(target=work)
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0 if product(shape, "f32", "f32", 3) == alone and product((90, 80, 70), "f64", "f64", 2) else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
busy.join()
"""
    succeeds(code)


@pytest.mark.process
@compiled
def test_a_process_ends_while_workers_wait_or_spin():
    code = """
import time, probes
from gemmery.cpu.split import Unit
array, view = probes.zeros(1, 40, 40)
probes.mark(Unit(1, 1, 1e6))(view, view, view, threads=6)
time.sleep({pause})
probes.mark(Unit(1, 1, 1e6))(view, view, view, threads={threads})
"""
    for pause, threads in ((0, 6), (0.05, 1), (0.05, 6)):
        succeeds(code.format(pause=pause, threads=threads))


@compiled
def test_idle_workers_wait_in_the_system():
    _, view = probes.zeros(1, 40, 40)
    probes.mark(COSTLY)(view, view, view, threads=4)
    sleeping = ctypes.c_int64.from_address(pool.address() + layout.SLEEPING)
    end = time.monotonic() + 60
    while sleeping.value < pool.started():
        assert time.monotonic() < end, f"{sleeping.value} of {pool.started()} workers sleep"
        time.sleep(0.001)


@pytest.mark.process
@compiled
def test_workers_wait_longer_for_the_next_job_of_a_series():
    """In a process of its own, which has one worker; a busy machine may stretch a pause, so several are tried."""
    code = """
import ctypes, time
import probes
from gemmery.cpu import layout, pool
from gemmery.cpu.split import Unit
array, view = probes.zeros(1, 40, 40)
run = probes.mark(Unit(1, 1, 1e6))
patience = ctypes.c_int64.from_address(pool.address() + layout.WORKER_SLOTS + 32)

def after(pause):
    run(view, view, view, threads=2)
    time.sleep(pause)
    run(view, view, view, threads=2)
    time.sleep(0.001)
    return patience.value

assert any(after(0.0004) > 0 for _ in range(300)), "a short sleep teaches the worker to wait"
assert any(after(0.02) == 0 for _ in range(100)), "and a long one not to"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@compiled
def test_an_interrupt_comes_when_the_result_is_whole():
    gate, (array, view) = probes.Gate(), probes.zeros(1, 4, 1)

    def interrupt():
        gate.wait_for(2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        gate.open()

    beside = threading.Thread(target=interrupt)
    beside.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        probes.gate(COSTLY)(view, view, view, bias=gate.view, threads=2)
        time.sleep(60)
    beside.join()
    assert (array == 1).all()


@pytest.mark.process
@compiled
@tasks
def test_workers_leave_signals_and_cores_as_they_were():
    """Signals go to the program's own threads, and no worker stays bound to the cores that were free once."""
    code = """
import os, time, probes
from pathlib import Path
from gemmery.cpu import pool
from gemmery.cpu.split import Unit
_, view = probes.zeros(1, 60, 60)
run = probes.mark(Unit(1, 1, 1e6))
run(view, view, view, threads=4)
for _ in range(100):
    time.sleep(0.001)
    run(view, view, view, threads=2)
time.sleep(0.2)
interrupt, fault, workers = 1 << 1, 1 << 10, 0
for task in Path("/proc/self/task").iterdir():
    blocked = int(next(l for l in (task / "status").read_text().splitlines() if l.startswith("SigBlk")).split()[1], 16)
    if blocked & interrupt:
        workers += 1
        assert not blocked & fault
    assert os.sched_getaffinity(int(task.name)) == os.sched_getaffinity(0)
assert workers == pool.started() == 3, workers
"""
    succeeds(code)


def test_the_number_of_threads_is_what_was_set_then_the_variable_then_the_cores(monkeypatch):
    monkeypatch.setattr(counts, "cores", lambda: 11)
    monkeypatch.setattr(counts, "_override", None)
    counts._allowed.cache_clear()
    try:
        monkeypatch.delenv("GEMMERY_NUM_THREADS", raising=False)
        assert counts.get() == 11
        monkeypatch.setenv("GEMMERY_NUM_THREADS", "5")
        counts._allowed.cache_clear()
        assert (config.num_threads(), counts.get()) == (5, 5)
        counts.set_(3)
        assert counts.get() == 3
        counts.set_(None)
        assert counts.get() == 5
        monkeypatch.setenv("GEMMERY_NUM_THREADS", "many")
        counts._allowed.cache_clear()
        with pytest.raises(ArgumentError, match="many"):
            counts.get()
        monkeypatch.setenv("GEMMERY_NUM_THREADS", "1000000")
        with pytest.raises(ArgumentError, match="GEMMERY_NUM_THREADS=1000000: it must be at most 256"):
            counts.get()
        monkeypatch.setenv("GEMMERY_NUM_THREADS", "9" * 50)
        with pytest.raises(ArgumentError, match=r"GEMMERY_NUM_THREADS=9{37}\.\.\.: it must be at most 256"):
            counts.get()
    finally:
        counts.set_(None)
        monkeypatch.undo()
        counts._allowed.cache_clear()


@pytest.mark.parametrize("count", [0, -1, 2.0, "4", True])
def test_a_number_of_threads_that_is_none_is_refused(count):
    with pytest.raises(ArgumentError, match="threads"):
        counts.set_(count)
    assert counts.get() >= 1


def start(kernel, view, **options):
    """Call a probe in a thread."""
    thread = threading.Thread(target=kernel, args=(view, view, view), kwargs=options, daemon=True)
    thread.start()
    return thread


def succeeds(code):
    """Run `code` in a new interpreter; it must end well and soon."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=here, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("variables", "limit"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": " 1,4"}, 1),
        ({"SLURM_CPUS_PER_TASK": "1"}, 1),
        ({"OMP_NUM_THREADS": "3", "SLURM_CPUS_PER_TASK": "2"}, 2),
        ({"OMP_NUM_THREADS": "0"}, 5),
        ({"OMP_NUM_THREADS": "many"}, 5),
        ({"OMP_NUM_THREADS": "64"}, 5),
        ({"OMP_NUM_THREADS": "1", "GEMMERY_NUM_THREADS": "4"}, 4),
        ({"MPI_LOCALNRANKS": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 1),
        ({"MPI_LOCALNRANKS": "2", "OMP_NUM_THREADS": "1"}, 1),
        ({"MPI_LOCALNRANKS": "2", "cores": "6"}, 5),  # mpiexec has bound each process to five of six cores
    ],
)
def test_limits_that_others_set_hold(monkeypatch, variables, limit):
    every = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "GEMMERY_NUM_THREADS")
    for name in (*every, "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: int(variables.get("cores", 5)))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(counts, "cores", lambda: 5)
    counts._allowed.cache_clear()
    try:
        assert counts._allowed() == limit
    finally:
        counts._allowed.cache_clear()


@pytest.mark.parametrize(
    ("files", "number"),
    [
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        (
            {
                "/proc/self/cgroup": "0::/a/b",
                "/sys/fs/cgroup/a/cpu.max": "100000 100000",
                "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            1,
        ),
        (
            {
                "/proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n0::/",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ({"/proc/self/cgroup": "0::/hidden", "/sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "torn"}, 8),
        ({}, 8),
    ],
)
def test_quotas_of_groups_of_both_versions_hold(monkeypatch, files, number):
    def text(path):
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    monkeypatch.setattr(target, "_text", text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert target.cores() == number


@pytest.mark.process
@pytest.mark.parametrize("first", ["gemmery", "threadpoolctl"])
def test_threadpoolctl_sees_and_limits_gemmery(first):
    pytest.importorskip("threadpoolctl")
    code = f"""
import {first}
import numpy as np, gemmery as gm
a = np.ones((8, 8), np.float32)
gm.set_num_threads(3)
gm.matmul(a, a)
import threadpoolctl
rows = [row for row in threadpoolctl.threadpool_info() if row["internal_api"] == "gemmery"]
assert [(row["user_api"], row["num_threads"], row["version"]) for row in rows] == [("blas", 3, gm.__version__)], rows
for user_api in (None, "blas"):
    with threadpoolctl.threadpool_limits(1, user_api=user_api):
        assert gm.get_num_threads() == 1
    assert gm.get_num_threads() == 3
with threadpoolctl.threadpool_limits(10**6, user_api="blas"):
    assert gm.get_num_threads() >= 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
