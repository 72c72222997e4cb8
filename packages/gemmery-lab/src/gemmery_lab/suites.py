"""bench(): gemmery's product against the rival libraries, on suites of products.

First products, and those of shapes never met, run in new processes, with a cache folder and threads of their own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gemmery import config, dtypes
from gemmery.cpu import target
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import GemmeryError, RefusedError
from gemmery_lab import asked, measurements
from gemmery_lab.climb import estimate
from gemmery_lab.measure import libraries, processes, timing
from gemmery_lab.measure.libraries import SOURCES
from gemmery_lab.measure.processes import COLD_CACHE, COMPARED, EMPTY, FIRST, MET, REST, WARM, WARM_CACHE, WORST, pieces
from gemmery_lab.measure.record import Measurement, OnEvent, Run, ignore
from gemmery_lab.measure.suite import ON_A_GPU, Suite, taking_part
from gemmery_lab.measure.work import Work
from gemmery_lab.measurements import TURNS, Opponent
from gemmery_lab.on_cpu import in_force
from gemmery_lab.session import PRODUCT, SUSTAINED_ABOVE, Session, Task, calls, contest, entrant, open_session

LOSES = 0.97  # of the other's time
Measure = Callable[[Session, Task], list[Measurement]]


def bench(
    suites: Sequence[str] = (),
    rivals: Sequence[str] = (),
    threads: int = 0,
    seconds: float = 3.0,
    store: Path | None = None,
    on_event: OnEvent = ignore,
    device: str = "",
) -> Run:
    """Time `gemmery.matmul` and the rivals in turn on every product of the suites.

    `suites` are names ("small", "square_f32", ...) or paths of .toml files; () takes all suites of the device.
    `rivals` are names ("numpy", "torch", "cublas", ...) that replace the suites' own; () takes those that a suite
    names, or all that are installed if it names none. Installed rivals that are left out are recorded as refused.
    `threads` replaces the suites' own, 0 keeps them. `seconds` is the time for one product, shared by all contestants.
    `store` is a folder: records are appended to <store>/<machine>.jsonl as they are taken. `device` "" is the one that
    the suites are for; "cuda:1" is the second GPU.

    >>> run = bench(["square_f32"], seconds=1.0)  # doctest: +SKIP

    Raises ArgumentError for an unknown suite or rival, for rivals of suites that have none, for a suite file with a
    wrong key, and for suites of several devices; DeviceError if there is no such device.
    """
    asked.budget(seconds)
    loaded = asked.suites(suites, rivals, device)
    kind = loaded[0].device
    gpu = asked.ordinal(device.strip().lower() or kind)
    for each in loaded:  # unknown rungs, before anything is measured
        ladder = asked.registry("cuda" if each.kind == "emulator" else kind)
        for label in {label for labels in each.rungs.values() for label in labels}:
            entrant(label, ladder)
    cores = target.cores()
    rounds = [(each, count) for each in loaded for count in _counts(each, threads)]
    total = sum(len(each.works) for each, count in rounds if count <= cores)
    with open_session(gpu, total, on_event, store) as session:
        for each, count in rounds:
            if count <= cores:
                run_suite(session, each, count, rivals, seconds)
            else:
                reason = f"{count} threads exceed the {cores} cores of this process"
                session.add(session.backend.blank(each.name, PRODUCT, each.works[0], count, refused=reason))
        return session.run


def _counts(suite: Suite, threads: int) -> tuple[int, ...]:
    """Return the numbers of threads with which a suite runs, each once; 0 on a GPU. Raises ArgumentError."""
    if suite.device != "cpu":
        return (0,)
    counts = [cpu_threads.checked(threads)] if threads else [count or target.cores() for count in suite.threads]
    return tuple(dict.fromkeys(counts))


def expected(suites: Sequence[Suite], threads: int, seconds: float) -> str:
    """Return the number of measurements of suites and the time they take, as text."""
    runs = [(each, count, work) for each in suites for count in _counts(each, threads) for work in each.works]
    times = [_new_shapes_seconds(work, count) if each.kind == "new_shapes" else seconds for each, count, work in runs]
    large = (each for each in suites for work in each.works if work.problem.flops > SUSTAINED_ABOVE)
    raced = sum(each.sustained * (1 + TURNS * (1 + len(each.rivals))) for each in large)  # without rests
    return estimate(len(times), (sum(times) + raced) / len(times))


# A process of `new_shapes` takes about so many seconds, and NumPy so many operations a second where it has no BLAS.
_PROCESS, _WITHOUT_BLAS = 2.0, 1e9


def _new_shapes_seconds(work: Work, threads: int) -> float:
    """Return about how many seconds a work of `new_shapes` takes, in the fewest rounds."""
    rests = 2 * processes.PASSES * timing.IDLE_SECONDS * (threads > 1)
    rival = 0 if work.dtype in ("f32", "f64") or not threads else processes.flops(work) / _WITHOUT_BLAS
    return (1 + 2 * LEAST) * (_PROCESS + rests + rival)


def run_suite(session: Session, suite: Suite, threads: int, requested: Sequence[str], seconds: float) -> None:
    """Run every product of a suite next to its rivals; one that cannot run is recorded once."""
    rivals = _rivals(session, suite, threads, requested)
    measures: dict[str, Measure] = {"calls": calls, "first_call": first_call, "new_shapes": new_shapes}
    if suite.kind in (*ON_A_GPU, "emulator"):
        from gemmery_lab import launches  # loads NVIDIA's bindings and the emulator

        measures = {"call": launches.call, "compile": launches.compilations, "emulator": launches.emulator_speed}
    measure = measures.get(suite.kind, contest)
    on_threads = f", {threads} thread{'s' * (threads != 1)}" if threads else ""
    for work in suite.works:
        session.begin(f"{suite.name}: {work}{on_threads}")
        labels = suite.rungs.get(work.name, ())
        task = Task(suite.name, work, labels, threads, rivals, seconds, suite.rest, suite.sustained)
        try:
            # One change: each change of the number of threads drops what calls have prepared.
            with in_force(threads):
                rows = measure(session, task)
            if suite.kind == "choices":
                refuse_slower(rows, labels)
        except RefusedError as refused:
            rows = [session.backend.blank(suite.name, PRODUCT, work, threads, refused=str(refused))]
        session.end(*rows)


def refuse_slower(rows: Sequence[Measurement], labels: Sequence[str]) -> None:
    """Raise RefusedError if the first of our kernels, the chosen one, takes longer than another of them.

    A choice loses by more than LOSES, and by more than the spread of the ratios.
    """
    own = rows[0]
    for name in labels[1:]:
        ratio = own.versus.get(name, 1.0)
        if ratio + own.spread.get(name, 0.0) < LOSES:
            raise RefusedError(
                f"{own.kernel} ({own.note}) takes {1 / ratio:.2f} of the time of {name}: no choice of ours may lose to "
                "another; correct the choice"
            )


def _rivals(session: Session, suite: Suite, threads: int, requested: Sequence[str]) -> list[Opponent]:
    """Return the rivals of a suite that can run, and record the reasons of the others."""
    backend, rivals = session.backend, list[Opponent]()
    names, refusals = taking_part(suite, requested, backend.rivals)
    for name in names:
        session.begin(f"{suite.name}: rival {name}")
        try:
            rivals.append(backend.rival(name, threads))
        except RefusedError as refused:
            refusals[name] = str(refused)
    for name, reason in refusals.items():
        session.add(backend.blank(suite.name, name, suite.works[0], threads, refused=reason))
    return rivals


# An installed package has byte code on disk: without it, compiling gemmery's Python code would take 50 ms.
_CLEARED = (*libraries.STEERING, "GEMMERY_", "PYTHONDONTWRITEBYTECODE")
ROUNDS, LEAST = 9, 3  # rounds, and the least number of those with new shapes, however long they take
_PASSES = """
import sys
sys.path[:0] = {!r}
import gemmery
from gemmery_lab.measure.processes import run_new_shapes
run_new_shapes(gemmery, {!r}, {!r}, {!r})
"""
Times = Mapping[str, list[float]]
_OPERANDS = """
import json, sys, time, numpy as np
sys.path[:0] = {sources!r}
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
for name in ("plan", "specialized"):
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
    command, own = [sys.executable, "-c", script], {**count, "GEMMERY_CACHE_DIR": cache}
    environment = config.child_environment(_CLEARED, own)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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
    plain = measurements.blank(task.suite, WARM_CACHE, work, threads)
    limits = session.backend.limits(plain, session.begin)
    scripts = {WARM_CACHE: _OURS, COLD_CACHE: _OURS}
    if "numpy" in [rival.name for rival in task.rivals]:
        scripts["numpy"] = _NUMPY
    seconds: dict[str, dict[int, float]] = {kernel: {} for kernel in scripts}
    parts: dict[tuple[str, str], dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as warm:
        run(_OURS, work, threads, warm)
        for index in range(ROUNDS):
            for kernel, product in scripts.items():
                with tempfile.TemporaryDirectory() as cold:
                    cache = cold if kernel == COLD_CACHE else warm
                    seconds[kernel][index] = run(product, work, threads, cache)
            with tempfile.TemporaryDirectory() as cold:
                for kernel, cache in ((WARM_CACHE, warm), (COLD_CACHE, cold)):
                    for piece, value in pieces(_ran(_PIECES, work, threads, cache)).items():
                        parts.setdefault((kernel, piece), {})[index] = value
            if sum(sum(rounds.values()) for rounds in seconds.values()) > task.seconds:
                break
    tally = timing.tally(seconds)
    own = {WARM_CACHE: tally.versus}
    times = [(plain, kernel, each, own.get(kernel)) for kernel, each in tally.timings.items()]
    for (kernel, piece), rounds in parts.items():
        times.append((replace(plain, case=piece), kernel, timing.tally({piece: rounds}).timings[piece], None))
    rows = ((replace(row, kernel=kernel), each, versus) for row, kernel, each, versus in times)
    return [measurements.timed(row, each, versus, limits) for row, each, versus in rows]


def run(product: str, work: Work, threads: int, cache: str) -> float:
    """Return the seconds of `product` in a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    return float(_ran(_SCRIPT, work, threads, cache, product)) / 1e9


def _ran(code: str, work: Work, threads: int, cache: str, product: str = "") -> Any:
    """Return what code prints as JSON in a new process that has operands."""
    sides, dtype = {"m": work.m, "n": work.n, "k": work.k}, dtypes.get(work.dtype).numpy
    script = (_OPERANDS + code).format(sources=SOURCES, dtype=dtype, product=product, **sides)
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
    plain = replace(plain, flops=processes.flops(work), bytes=0, case="")
    measured: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as warm:
        run_passes(work, threads, warm, device)
        spent = 0.0
        for index in range(ROUNDS):
            if index >= LEAST and spent > seconds:
                break
            with tempfile.TemporaryDirectory() as empty:
                times = {state: run_passes(work, threads, at, device) for state, at in ((EMPTY, empty), (WARM, warm))}
            seconds_of = {}
            for state, each in times.items():
                first, new, worst = each["first"][0], each["new"][0], each["worst"][0]
                seconds_of[state] = first + new
                seconds_of |= {f"{state}, {FIRST}": first, f"{state}, {REST}": new, f"{state}, {WORST}": worst}
            repeated, total = (statistics.median(times[WARM][part]) for part in ("again", "rival"))
            seconds_of |= {MET: repeated, "": total, WORST: times[WARM]["rival worst"][0]}
            for label, value in seconds_of.items():
                measured.setdefault(label, {})[index] = value
            spent += sum(sum(map(sum, each.values())) for each in times.values())
    theirs = {case: dict.fromkeys(rivals[:1], measured.pop(case)) for case in ("", WORST)}
    rows = []
    for label, rounds in measured.items():
        opponent = theirs[WORST if label.endswith(WORST) else ""] if label in COMPARED else {}
        tally = timing.tally({label: rounds, **opponent})
        rows.append(measurements.timed(replace(plain, case=label), tally.timings[label], tally.versus))
    for case, opponent in theirs.items():
        for rival, own in (timing.tally(opponent).timings if opponent else {}).items():
            rows.append(measurements.timed(replace(plain, kernel=rival, case=case), own))
    return rows


def run_passes(work: Work, threads: int, cache: str, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of the passes of a new process with the cache folder `cache`.

    Raises GemmeryError with the last line of the process if it fails.
    """
    rest = timing.IDLE_SECONDS if threads > 1 else 0.0
    script = _PASSES.format(SOURCES, asdict(work), device, rest)
    times = run_script(script, "products of new shapes", cache, threads)
    return {name: value if isinstance(value, list) else [value] for name, value in times.items()}
