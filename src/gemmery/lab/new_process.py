"""Work in a new process, with a cache folder and threads of its own: first products, with stored kernels or none."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmery import config, dtypes
from gemmery.bench import libraries, timing
from gemmery.bench.first_call import COLD, WARM, pieces
from gemmery.bench.record import Measurement
from gemmery.bench.work import Work
from gemmery.errors import GemmeryError
from gemmery.lab import measurements
from gemmery.lab.contest import Task
from gemmery.lab.session import Session

SOURCES = str(Path(__file__).parents[2])  # the folder from which `gemmery` is imported
# An installed package has byte code on disk: without it, compiling gemmery's Python code would take 50 ms.
_CLEARED = (*libraries.STEERING, "GEMMERY_", "PYTHONDONTWRITEBYTECODE")
ROUNDS = 9
_SCRIPT = """
import json, sys, time, numpy as np
sys.path.insert(0, {sources!r})
a, b = np.ones(({m}, {k}), np.{dtype}), np.ones(({k}, {n}), np.{dtype})
start = time.perf_counter_ns()
{product}
print(json.dumps(time.perf_counter_ns() - start))
"""
_OURS, _NUMPY = "import gemmery; gemmery.matmul(a, b)", "np.matmul(a, b)"
# The same in pieces: planning, loading and LLVM note when they begin and end, in any thread.
_PIECES = """
import json, sys, time, numpy as np
sys.path.insert(0, {sources!r})
a, b = np.ones(({m}, {k}), np.{dtype}), np.ones(({k}, {n}), np.{dtype})
start = time.perf_counter_ns()
import gemmery
gemmery.matmul
imported = time.perf_counter_ns() - start
from gemmery import dispatch
from gemmery.cpu import jit
def noted(home, name, spans):
    function = getattr(home, name)
    def call(*arguments, **options):
        begin = time.perf_counter_ns()
        try:
            return function(*arguments, **options)
        finally:
            spans.append((begin, time.perf_counter_ns()))
    setattr(home, name, call)
    return spans
spans = dict(load=noted(jit, "_load", []), compile=noted(jit, "_object", []), plan=[])
for name in ("plan", "specialised"):
    noted(dispatch, name, spans["plan"])
times = [time.perf_counter_ns()]
for _ in range(2):
    gemmery.matmul(a, b)
    times.append(time.perf_counter_ns())
spans = dict((name, [span for span in each if span[1] <= times[1]]) for name, each in spans.items())
print(json.dumps(dict(call=times[1] - times[0], next=times[2] - times[1], spans=spans, **{{"import": imported}})))
"""


def run_script(script: str, what: str, cache: str, threads: int) -> Any:
    """Return what a script prints last, as JSON; 0 threads leaves the number to the libraries.

    Raises GemmeryError with the last line of the process if `what` it does fails.
    """
    count = {name: str(threads) for name in (*libraries.THREADS, "GEMMERY_NUM_THREADS") if threads}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=config.child_environment(_CLEARED, {**count, "GEMMERY_CACHE_DIR": cache}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GemmeryError(f"{what} failed in a new process: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])


def first_call(session: Session, task: Task) -> list[Measurement]:
    """Time a first product with a cold cache, a warm cache, and in NumPy if that is among the rivals.

    Each time is that of `import gemmery` and one product in a new process. More processes time its pieces. There are
    fewer rounds if they take longer than the task's seconds.
    """
    work, threads = task.work, task.threads
    plain = measurements.blank(task.suite, WARM, work, threads)
    limits = session.backend.limits(plain, session.begin)
    seconds: dict[str, dict[int, float]] = {WARM: {}, COLD: {}}
    parts: dict[tuple[str, str], dict[int, float]] = {}
    with_numpy = "numpy" in [rival.name for rival in task.rivals]
    if with_numpy:
        seconds["numpy"] = {}
    with tempfile.TemporaryDirectory() as warm:
        run(_OURS, work, threads, warm)
        spent = 0.0
        for index in range(ROUNDS):
            seconds[WARM][index] = run(_OURS, work, threads, warm)
            with tempfile.TemporaryDirectory() as cold:
                seconds[COLD][index] = run(_OURS, work, threads, cold)
            if with_numpy:
                seconds["numpy"][index] = run(_NUMPY, work, threads, warm)
            with tempfile.TemporaryDirectory() as cold:
                for kernel, cache in ((WARM, warm), (COLD, cold)):
                    for piece, value in pieces(_ran(_PIECES, work, threads, cache)).items():
                        parts.setdefault((kernel, piece), {})[index] = value
            spent += sum(rounds[index] for rounds in seconds.values())
            if spent > task.seconds:
                break
    tally = timing.tally(seconds)
    rows = [
        measurements.timed(replace(plain, kernel=kernel), times, tally.versus if kernel == WARM else None, limits)
        for kernel, times in tally.timings.items()
    ]
    for (kernel, piece), rounds in parts.items():
        times = timing.tally({piece: rounds}).timings[piece]
        rows.append(measurements.timed(replace(plain, kernel=kernel, case=piece), times, limits=limits))
    return rows


def run(product: str, work: Work, threads: int, cache: str) -> float:
    """Return the seconds of `product` in a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    return float(_ran(_SCRIPT, work, threads, cache, product)) / 1e9


def _ran(script: str, work: Work, threads: int, cache: str, product: str = "") -> Any:
    """Return what a script prints as JSON in a new process."""
    script = script.format(
        sources=SOURCES, m=work.m, n=work.n, k=work.k, dtype=dtypes.get(work.dtype).numpy, product=product
    )
    return run_script(script, "a first product", cache, threads)
