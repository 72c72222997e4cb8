"""Products while kernels are compiled for them in the background: right, with the same bits before and after."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.sampled(3)

# Products that come back often, so that each gets a kernel of its own; `compiled` are the kernels' names.
REPEATED = """
import os, signal, sys, threading
import numpy as np
import gemmery as gm
from gemmery import tiers, verify
from gemmery.cpu import jit
compiled, genuine = [], jit._object
jit._object = lambda target, name, text: compiled.append(name) or genuine(target, name, text)
draw = np.random.default_rng(7)
operands = [
    (draw.standard_normal((m, k)).astype(dtype), draw.standard_normal((k, n)).astype(dtype))
    for m, n, k in [(2, 3, 4), (8, 8, 8), (5, 7, 16), (13, 3, 9)] for dtype in (np.float32, np.float64)
]
first = [gm.matmul(a, b).tobytes() for a, b in operands]
for a, b in operands:
    assert verify.check(gm.matmul(a, b), a, b).error_over_bound <= 1
del compiled[:]
def right():
    return [gm.matmul(a, b).tobytes() for a, b in operands] == first
def often(times=400):
    for _ in range(times):
        assert right()
"""
ALONE = """
often()
tiers.wait()
assert tiers.state().finished == len(operands), tiers.state()
assert tiers.state().failures == ()
assert len(compiled) == len(operands)
often(3)
"""
OFF = """
often()
assert tiers.state() == (False, 0, 0, 0, ()) and threading.active_count() == 1
assert not compiled  # each product was compiled for its shape before it ran
"""
THREADS = """
started = [threading.Thread(target=often) for _ in range(4)]
for thread in started: thread.start()
for thread in started: thread.join()
tiers.wait()
assert right() and not tiers.state().failures
"""
FORKS = """
for turn in range(3):
    often(40)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            often(100)
            tiers.wait()
            code = 0 if right() and not tiers.state().failures else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
often()
"""
INTERRUPTED = """
signal.signal(signal.SIGALRM, lambda number, frame: right() or os._exit(9))  # a product in the middle of anything
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
often()
signal.setitimer(signal.ITIMER_REAL, 0)
tiers.wait()
assert right() and not tiers.state().failures
"""


@pytest.fixture(scope="module")
def general(tmp_path_factory):
    """A cache folder with the kernels for every shape."""
    folder = tmp_path_factory.mktemp("general")
    run(folder, "")
    return folder


def run(folder, script, tiers="on"):
    environment = {**os.environ, "GEMMERY_CACHE_DIR": str(folder), "GEMMERY_TIERS": tiers}
    done = subprocess.run(
        [sys.executable, "-c", REPEATED + script],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
timers = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")


@pytest.mark.process
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(ALONE, id="alone"),
        pytest.param(THREADS, id="threads"),
        pytest.param(FORKS, id="forks", marks=forks),
        pytest.param(INTERRUPTED, id="signals", marks=timers),
    ],
)
def test_products_that_come_back_often_keep_their_bits(script, general, tmp_path):
    run(shutil.copytree(general, tmp_path / "own"), script)


@pytest.mark.process
def test_with_tiers_off_nothing_runs_in_the_background(tmp_path):
    run(tmp_path, OFF, "off")
