"""The first product of a new process, after importing NumPy: with and without kernels cached on disk, and in pieces."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemmery import config, dtypes
from gemmery.bench import libraries, timing
from gemmery.bench.first_call import COLD, WARM, pieces
from gemmery.bench.record import Measurement
from gemmery.bench.rival_process import RivalProcess
from gemmery.bench.work import Work
from gemmery.errors import GemmeryError
from gemmery.lab import results
from gemmery.lab.session import CpuSession

ROUNDS = 9
_SOURCES = str(Path(__file__).parents[2])
_SCRIPT = """
import json, sys, time, numpy as np
sys.path.insert(0, {sources!r})
a, b = np.ones(({m}, {k}), np.{dtype}), np.ones(({k}, {n}), np.{dtype})
start = time.perf_counter_ns()
{product}
print(json.dumps(time.perf_counter_ns() - start))
"""
# An installed package has byte code on disk: without it, compiling gemmery's Python code would take 50 ms.
_CLEARED = (*libraries.STEERING, "GEMMERY_", "PYTHONDONTWRITEBYTECODE")
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
    def call(*given, **named):
        begin = time.perf_counter_ns()
        try:
            return function(*given, **named)
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
spans = dict((name, [one for one in each if one[1] <= times[1]]) for name, each in spans.items())
print(json.dumps(dict(call=times[1] - times[0], next=times[2] - times[1], spans=spans, **{{"import": imported}})))
"""


def first_call(
    session: CpuSession, name: str, work: Work, threads: int, rivals: Sequence[RivalProcess], seconds: float
) -> list[Measurement]:
    """Time a first product with a cold cache, a warm cache, and in NumPy if that is among the rivals.

    Each time is that of `import gemmery` and one product in a new process. More processes time its pieces. There are
    fewer rounds if they take longer than `seconds`.
    """
    limits = session.limits(work.dtype, threads)
    taken: dict[str, dict[int, float]] = {WARM: {}, COLD: {}}
    parts: dict[tuple[str, str], dict[int, float]] = {}
    with_numpy = "numpy" in [rival.name for rival in rivals]
    if with_numpy:
        taken["numpy"] = {}
    with tempfile.TemporaryDirectory() as warm:
        run(_OURS, work, threads, warm)
        spent = 0.0
        for index in range(ROUNDS):
            taken[WARM][index] = run(_OURS, work, threads, warm)
            with tempfile.TemporaryDirectory() as cold:
                taken[COLD][index] = run(_OURS, work, threads, cold)
            if with_numpy:
                taken["numpy"][index] = run(_NUMPY, work, threads, warm)
            with tempfile.TemporaryDirectory() as cold:
                for kernel, cache in ((WARM, warm), (COLD, cold)):
                    for piece, value in run_in_pieces(work, threads, cache).items():
                        parts.setdefault((kernel, piece), {})[index] = value
            spent += sum(rounds[index] for rounds in taken.values())
            if spent > seconds:
                break
    found = timing.tally(taken)
    rows = [
        results.timed(
            results.blank(name, kernel, work, threads),
            found.timings[kernel],
            limits,
            found.versus if kernel == WARM else None,
        )
        for kernel in taken
    ]
    for (kernel, piece), rounds in parts.items():
        plain = replace(results.blank(name, kernel, work, threads), case=piece)
        rows.append(results.timed(plain, timing.tally({piece: rounds}).timings[piece], limits))
    return rows


def run(product: str, work: Work, threads: int, cache: str) -> float:
    """Return the seconds of `product` in a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    return float(_ran(_SCRIPT, work, threads, cache, product)) / 1e9


def run_in_pieces(work: Work, threads: int, cache: str) -> dict[str, float]:
    """Return the seconds of each piece of a first product in a new process, as `run`."""
    return pieces(_ran(_PIECES, work, threads, cache))


def _ran(script: str, work: Work, threads: int, cache: str, product: str = "") -> Any:
    """Return what a script prints as JSON in a new process."""
    script = script.format(
        sources=_SOURCES, m=work.m, n=work.n, k=work.k, dtype=dtypes.get(work.dtype).numpy, product=product
    )
    environment = config.child_environment(
        _CLEARED,
        {
            **dict.fromkeys(libraries.THREADS, str(threads)),
            "GEMMERY_NUM_THREADS": str(threads),
            "GEMMERY_CACHE_DIR": cache,
        },
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GemmeryError(f"a first product failed in its process: {last[0]}")
    return json.loads(done.stdout)
