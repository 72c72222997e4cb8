"""Work in a new process, with a cache folder and threads of its own: first products, and those of shapes never met."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gemmery import config, dtypes
from gemmery.bench import libraries, timing
from gemmery.bench import new_shapes as shapes
from gemmery.bench.first_call import COLD, WARM, pieces
from gemmery.bench.new_shapes import COMPARED, EMPTY, FIRST, MET, REST, WORST
from gemmery.bench.record import Measurement
from gemmery.bench.work import Work
from gemmery.errors import GemmeryError, RefusedError
from gemmery.lab import measurements
from gemmery.lab.contest import PRODUCT, Task
from gemmery.lab.session import Session

SOURCES = str(Path(__file__).parents[2])  # the folder from which `gemmery` is imported
# An installed package has byte code on disk: without it, compiling gemmery's Python code would take 50 ms.
_CLEARED = (*libraries.STEERING, "GEMMERY_", "PYTHONDONTWRITEBYTECODE")
ROUNDS, LEAST = 9, 3  # rounds, and the least number of those with new shapes, however long they take
_PASSES = "import sys; sys.path.insert(0, {!r}); from gemmery.lab.passes import main; main({!r}, {!r}, {!r})"
Times = Mapping[str, list[float]]
_OPERANDS = """
import json, sys, time, numpy as np
sys.path.insert(0, {sources!r})
a, b = np.ones(({m}, {k}), np.{dtype}), np.ones(({k}, {n}), np.{dtype})
start = time.perf_counter_ns()
"""
_SCRIPT = "{product}\nprint(json.dumps(time.perf_counter_ns() - start))"
_OURS, _NUMPY = "import gemmery; gemmery.matmul(a, b)", "np.matmul(a, b)"
# The same in pieces: planning, loading and LLVM note when they begin and end, in any thread.
_PIECES = """
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


def _ran(code: str, work: Work, threads: int, cache: str, product: str = "") -> Any:
    """Return what code prints as JSON in a new process that has operands."""
    script = (_OPERANDS + code).format(
        sources=SOURCES, m=work.m, n=work.n, k=work.k, dtype=dtypes.get(work.dtype).numpy, product=product
    )
    return run_script(script, "a first product", cache, threads)


def new_shapes(session: Session, task: Task) -> list[Measurement]:
    """Time products of new shapes in new processes, next to NumPy, or cuBLAS through PyTorch, whose tensors they take.

    Raises RefusedError on a GPU without PyTorch among the rivals.
    """
    device = session.backend.device
    rivals = {rival.name: rival.runs for rival in task.rivals if device == "cpu" or rival.name == "cublas"}
    if device != "cpu" and not rivals:
        raise RefusedError("the products are of PyTorch's tensors; install torch and keep cublas among the rivals")
    plain = session.backend.blank(task.suite, PRODUCT, task.work, task.threads)
    rows = totals(plain, task.work, tuple(rivals), task.seconds, device)
    return [replace(m, note=rivals.get(m.kernel, "")) for m in rows]


def totals(
    plain: Measurement, work: Work, rivals: Sequence[str], seconds: float, device: str = "cpu"
) -> list[Measurement]:
    """Time the products of a work in new processes, and return records like `plain`.

    A round is one process with an empty cache and one with a cache that has met these products; each also runs the
    rival. There are fewer rounds if they take longer than `seconds`.
    """
    threads = plain.threads
    plain = replace(plain, flops=shapes.flops(work), bytes=0, case="")
    measured: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as warm:
        run_passes(work, threads, warm, device)
        spent = 0.0
        for index in range(ROUNDS):
            if index >= LEAST and spent > seconds:
                break
            with tempfile.TemporaryDirectory() as empty:
                times = {
                    EMPTY: run_passes(work, threads, empty, device),
                    shapes.WARM: run_passes(work, threads, warm, device),
                }
            for label, value in _labelled(times).items():
                measured.setdefault(label, {})[index] = value
            spent += sum(sum(map(sum, each.values())) for each in times.values())
    rival = next(iter(rivals), "")
    theirs = measured.pop("")
    rows = []
    for label, rounds in measured.items():
        tally = timing.tally({label: rounds, rival: theirs} if rival and label in COMPARED else {label: rounds})
        rows.append(measurements.timed(replace(plain, case=label), tally.timings[label], tally.versus))
    if rival:
        rows.append(measurements.timed(replace(plain, kernel=rival), timing.tally({rival: theirs}).timings[rival]))
    return rows


def _labelled(times: Mapping[str, Times]) -> dict[str, float]:
    """Return the seconds of one round by label; "" is the rival."""
    seconds = {}
    for state, each in times.items():
        first, new, worst = each["first"][0], each["new"][0], each["worst"][0]
        seconds[state] = first + new
        seconds |= {f"{state}, {FIRST}": first, f"{state}, {REST}": new, f"{state}, {WORST}": worst}
    seconds[MET] = statistics.median(times[shapes.WARM]["again"])
    return {**seconds, "": statistics.median(times[shapes.WARM]["rival"])}


def run_passes(work: Work, threads: int, cache: str, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of the passes of a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    rest = timing.IDLE_SECONDS if threads > 1 else 0.0
    script = _PASSES.format(SOURCES, asdict(work), device, rest)
    times = run_script(script, "products of new shapes", cache, threads)
    return {name: value if isinstance(value, list) else [value] for name, value in times.items()}
