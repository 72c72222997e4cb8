"""Many threads, forks, signals, and caches that other processes damage."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gemmery as gm
from gemmery import verify
from gemmery.cpu import launch
from operands import random

pytestmark = pytest.mark.sampled(3)

WORK = [
    (name, shape)
    for name in ("f32", "f64", "bf16", "int8")
    for shape in [(3, 3, 3), (64, 48, 32), (150, 130, 170), (300, 301, 302), (1, 200, 300)]
]
FEW = WORK[1:16:4]


def product(name, shape, **options):
    m, n, k = shape
    return gm.matmul(random((m, k), name, 1), random((k, n), name, 2), **options)


def check(name, shape, **options):
    m, n, k = shape
    a, b = random((m, k), name, 1), random((k, n), name, 2)
    assert verify.check(gm.matmul(a, b, **options), a, b).error_over_bound <= 1


def multiply_at_once(workers=10):
    """Every thread computes all products, each beginning with another, and gets the bits of a right result."""
    start = threading.Barrier(workers)

    def work(number):
        start.wait()
        own = WORK[number:] + WORK[:number]
        return {(name, shape): product(name, shape, threads=1 + number % 3).tobytes() for name, shape in own}

    with ThreadPoolExecutor(workers) as pool:
        seen = list(pool.map(work, range(workers)))
    for name, shape in WORK:
        check(name, shape, threads=1)
        assert {bits[name, shape] for bits in seen} == {product(name, shape, threads=1).tobytes()}


def fresh(code, cache=None, **options):
    """Run `code` in a new interpreter."""
    environment = {**os.environ, **({"GEMMERY_CACHE_DIR": str(cache)} if cache else {})}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        cwd=os.path.dirname(__file__),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def succeeds(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return out


def test_ten_threads_at_once():
    multiply_at_once()


@pytest.mark.process
def test_ten_threads_compile_the_same_kernels_at_once(tmp_path):
    succeeds(fresh("import test_concurrency; test_concurrency.multiply_at_once()", tmp_path))


def test_under_an_event_loop():
    async def work():
        await asyncio.gather(*(asyncio.to_thread(check, name, shape) for name, shape in WORK))

    asyncio.run(work())


def test_other_threads_run_while_a_long_product_does():
    x = random((1500, 1500), "f64", 1)
    ticks, done = [], threading.Event()

    def count():
        while not done.is_set():
            ticks.append(None)
            time.sleep(0.001)

    beside = threading.Thread(target=count)
    gm.matmul(x, x, threads=1)
    beside.start()
    before = len(ticks)
    gm.matmul(x, x, threads=1)
    during = len(ticks) - before
    done.set()
    beside.join()
    assert during >= 3


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_multiplies_and_the_parent_goes_on():
    code = """
import os, test_concurrency as t
for name, shape in t.FEW:
    t.check(name, shape, threads=2)
for new in range(3):
    child = os.fork()
    if child == 0:
        try:
            for name, shape in t.FEW:
                t.check(name, shape, threads=2)
            t.check("f32", (41, 42, 43 + new), threads=2)
            t.check("int16", (41, 42, 43 + new), threads=2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    for name, shape in t.FEW:
        t.check(name, shape, threads=2)
    assert os.waitpid(child, 0)[1] == 0
"""
    succeeds(fresh(code))


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_while_another_thread_multiplies():
    """Only gemmery runs at the moment of the fork: NumPy's BLAS has locks of its own, which a fork may catch held."""
    code = """
import os, threading
import gemmery as gm
from operands import random
operands = [(random((m, k), name, 1), random((k, n), name, 2)) for name, m, n, k in
            [("f32", 300, 301, 302), ("f64", 150, 130, 170), ("bf16", 64, 64, 64)]]
expected = [gm.matmul(a, b, threads=2).tobytes() for a, b in operands]
stop = threading.Event()
def work():
    while not stop.is_set():
        gm.matmul(*operands[0], threads=2)
busy = threading.Thread(target=work)
busy.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        right = [gm.matmul(a, b, threads=2).tobytes() for a, b in operands] == expected
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
busy.join()
"""
    succeeds(fresh(code))


@pytest.mark.process
@pytest.mark.parametrize("batches", [1, 40], ids=["one product", "a loop of products"])
def test_an_interrupt_leaves_the_process_usable_and_out_whole_or_an_error(batches):
    """One kernel runs to its end, and then KeyboardInterrupt is raised; between kernels it is raised at once."""
    code = f"""
import os, signal, sys, threading, time
import numpy as np
import gemmery as gm, test_concurrency as t
n = 2000 if {batches} == 1 else 500
x = np.random.default_rng(0).standard_normal(({batches}, 2, n, n), dtype=np.float32)
y = x.transpose(1, 0, 2, 3)[:, ::-1].transpose(1, 0, 2, 3)
gm.matmul(x[:1, :1], y[:1, :1])
out = np.full_like(x, 7)
start = time.perf_counter()
gm.matmul(x, y, out=out, threads=1)
whole, took = out.copy(), time.perf_counter() - start
caught = 0
for share in (0.1, 0.3, 0.5, 0.7, 0.9):
    out[...] = 7
    timer = threading.Timer(share * took, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        gm.matmul(x, y, out=out, threads=1)
        finished = True
    except KeyboardInterrupt:
        finished = False
        caught += 1
    try:
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    if finished:
        assert np.array_equal(out, whole)
assert caught, "no interrupt arrived during a product"
t.check("f32", (150, 130, 170))
t.check("f64", (64, 48, 32), threads=2)
print("usable")
"""
    assert "usable" in succeeds(fresh(code))


PRODUCTS = "import test_concurrency as t\nfor shape in [(3, 3, 3), (300, 301, 302)]: t.check('f32', shape)"


def entries(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def stored_once(tmp_path_factory):
    """A cache that the products have filled."""
    folder = tmp_path_factory.mktemp("stored")
    succeeds(fresh(PRODUCTS, folder))
    return folder


@pytest.fixture
def filled(stored_once, tmp_path):
    """A copy of that cache."""
    return shutil.copytree(stored_once, tmp_path / "cache")


@pytest.mark.process
def test_flipped_bytes_in_every_cache_file_only_cost_a_recompile(filled):
    stored = entries(filled)
    assert len(stored) > 3
    whole = {path: path.read_bytes() for path in stored}
    flipped = dict(zip(stored, [0, 40, -1] * 100, strict=False))
    for path, where in flipped.items():
        data = bytearray(whole[path])
        data[where] ^= 0xFF
        path.write_bytes(data)
    succeeds(fresh(PRODUCTS, filled))
    assert [path.name for path in stored if path.read_bytes()[flipped[path]] != whole[path][flipped[path]]] == []


@pytest.mark.process
def test_truncated_and_empty_cache_files_only_cost_a_recompile(filled):
    folder, *others = entries(filled)
    folder.unlink()
    folder.mkdir()
    for path, size in zip(others, [0, 10, 31, 32, 33, 1000] * 100, strict=False):
        path.write_bytes(path.read_bytes()[:size])
    succeeds(fresh(PRODUCTS, filled))
    assert folder.is_dir()


@pytest.mark.process
def test_killing_a_process_while_it_fills_the_cache_only_costs_a_recompile(tmp_path):
    """Killed at the first file that appears, at the second, at the fourth: each time at work on the next."""
    for count in (1, 2, 4):
        process = fresh(PRODUCTS, tmp_path)
        while process.poll() is None and len(entries(tmp_path)) < count:
            time.sleep(0.002)
        process.kill()
        process.communicate()
    succeeds(fresh(PRODUCTS, tmp_path))


@pytest.mark.process
def test_two_processes_fill_one_cache(tmp_path):
    for process in [fresh(PRODUCTS, tmp_path) for _ in range(2)]:
        succeeds(process)


@pytest.mark.process
def test_without_a_cache_that_can_be_used_products_are_still_right(tmp_path):
    occupied = tmp_path / "a file"
    occupied.write_text("in the way")
    succeeds(fresh(PRODUCTS, occupied))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    succeeds(fresh(PRODUCTS, shared))
    assert not entries(shared), "code was taken from, or left in, a folder that others can write"


@pytest.mark.process
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list threads in /proc")
def test_workers_sleep_when_idle_and_end_with_the_process():
    code = """
import os, sys, time
import test_concurrency as t
t.check("f32", (300, 301, 302), threads=2)
others = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
end = time.monotonic() + 60
while others:
    assert time.monotonic() < end, f"threads {others} run"
    states = {task: open(f"/proc/self/task/{task}/stat").read().rpartition(")")[2].split()[0] for task in others}
    others = {task for task in others if states[task] != "S"}
print("asleep", flush=True)
time.sleep(60)
"""
    process = fresh(code)
    assert process.stdout.readline().strip() == "asleep", process.communicate(timeout=60)[1]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM


# A thread that waits for itself waits for ever: then the process ends, with a traceback, after a minute.
REENTRANT = """
import faulthandler, gc, os, signal
faulthandler.dump_traceback_later(60, exit=True)
import test_concurrency as t
from gemmery.cpu import jit
from gemmery.cpu.ir import Module
from gemmery.cpu.target import host
done = []
def generate():
    made = Module(host())
    with made.function("empty"):
        pass
    {interrupt}
    return made
{prepare}
assert jit.load(host(), "test_reentrant", generate)["empty"]
assert done == [1], done
t.check("f32", (41, 42, 43), threads=2)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("prepare", "interrupt"),
    [
        (
            """
class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        t.check("f32", (33, 34, 35), threads=2)
        done.append(1)
gc.disable()
Cycle()
""",
            "gc.collect()",
        ),
        (
            """
def handler(number, frame):
    t.check("int16", (33, 34, 35), threads=2)
    done.append(1)
signal.signal(signal.SIGUSR1, handler)
""",
            "signal.raise_signal(signal.SIGUSR1)",
        ),
        (
            """
def handler(number, frame):
    child = os.fork()
    if child == 0:
        t.check("int32", (33, 34, 35), threads=2)
        os._exit(7)
    done.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) // 7)
signal.signal(signal.SIGUSR1, handler)
""",
            "signal.raise_signal(signal.SIGUSR1)",
        ),
        (
            """
def nested():
    done.append(1)
    return jit.load(host(), "test_reentrant", generate)
""",
            "done or nested()",
        ),
    ],
    ids=["the garbage collector", "a signal handler", "a signal handler that forks", "the same kernel"],
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no such signals")
def test_a_product_in_the_middle_of_a_compilation(prepare, interrupt, tmp_path):
    succeeds(fresh(REENTRANT.format(prepare=prepare, interrupt=interrupt), tmp_path))


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the C library is called by its Linux names")
def test_a_fork_that_python_does_not_see():
    """A C extension or a server forks without Python's hooks: the child multiplies, with workers of its own."""
    code = """
import ctypes, os, test_concurrency as t
from gemmery.cpu import pool
libc = ctypes.PyDLL(None)
for name, shape in t.FEW:
    t.check(name, shape, threads=3)
t.check("f32", (300, 301, 302), threads=3)
child = libc.fork()
if child == 0:
    started = pool.started()
    for name, shape in t.FEW:
        t.check(name, shape, threads=3)
    t.check("f32", (300, 301, 302), threads=3)
    os._exit(0 if started == 0 < pool.started() or not pool.address() else 1)
assert os.waitpid(child, 0)[1] == 0
t.check("f32", (300, 301, 302), threads=3)
"""
    succeeds(fresh(code))


def test_a_number_of_threads_that_is_set_during_a_first_product_is_kept(monkeypatch):
    """The plan of that product is for the old number: the next product is planned anew, for the new one."""
    planned, grid = [], launch.grid

    def planning(unit, batch, m, n, k, threads):
        planned.append(threads)
        if len(planned) == 1:
            gm.set_num_threads(1)
        return grid(unit, batch, m, n, k, threads)

    a, b = random((211, 223), "f32", 1), random((223, 227), "f32", 2)
    monkeypatch.setattr(launch, "grid", planning)
    gm.set_num_threads(2)
    try:
        for _ in range(2):
            gm.matmul(a, b)
    finally:
        gm.set_num_threads(None)
    assert planned[0] == 2
    assert planned[-1] == 1


def test_no_lock_waits_for_its_own_thread():
    """The collector and signal handlers run Python code anywhere: a plain Lock taken there again is never released."""
    sources = Path(gm.__file__).parents[3].glob("*/src/**/*.py")
    assert [path.name for path in sources if re.search(r"\bLock\(", path.read_text())] == []
