"""bench(): gemmery's product against the rival libraries, on suites of products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gemmery
from gemmery import config, dispatch, dtypes
from gemmery.bench import libraries, suite, timing
from gemmery.bench.record import Measurement, Run
from gemmery.bench.rival_process import RivalProcess
from gemmery.bench.suite import Suite
from gemmery.bench.timing import Contestant
from gemmery.bench.work import Work, operands
from gemmery.cpu import target
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.lab import asked, results
from gemmery.lab.calls import calls
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.first_call import first_call
from gemmery.lab.new_shapes import new_shapes
from gemmery.lab.rungs import estimate
from gemmery.lab.session import CpuSession
from gemmery.lab.threads import in_force, on
from gemmery.lab.tournament import entrant, tournament
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA

OURS = "gm.matmul"
ONE_THREAD = "gm.matmul on one thread"


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
    `threads` replaces the suites' number of threads, 0 keeps it. `seconds` is the time for one product, shared by all
    contestants. `store` is a folder: records are appended to <store>/<machine>.jsonl as they are taken, so that an
    interrupted run keeps what it has. `device` "" is the one that the suites are for; "cuda:1" is the second GPU.

    >>> run = bench(["square_f32"], seconds=1.0)  # doctest: +SKIP

    Raises ArgumentError for an unknown suite or rival, for rivals of suites that have none, for a suite file with a
    wrong key, and for suites of several devices; DeviceError if there is no such device.
    """
    if not seconds > 0:
        raise ArgumentError(f"seconds={seconds}: the time for one product must be above 0")
    loaded = [suite.load(suite.find(name)) for name in suites or suite.names()]
    device = device.strip().lower()
    kind = (device or (loaded[0].device if suites else "cpu")).partition(":")[0]
    if not suites:
        loaded = [found for found in loaded if found.device == kind]
    for found in loaded:
        if found.device != kind:
            raise ArgumentError(
                f"suite {found.name!r} is for {found.device}, not {kind}; choose suites of one device, and that device"
            )
    if rivals and all(found.kind in suite.ALONE for found in loaded):
        names = ", ".join(found.name for found in loaded)
        raise ArgumentError(f"rivals={', '.join(rivals)}: suite {names} has no rivals; leave them out")
    gpu = asked.ordinal(device or kind)
    named = {*rivals, *(name for found in loaded for name in found.rivals)}
    labels = {label for found in loaded for labels in found.rungs.values() for label in labels}
    if gpu is not None:
        from gemmery.lab.gpu.suites import bench as gpu_bench

        return gpu_bench(loaded, named, labels, rivals, seconds, gpu, on_event, store)
    for name in named:
        libraries.find(name)
    for found in loaded:
        for label in {label for labels in found.rungs.values() for label in labels}:
            entrant(label, CUDA if found.kind == "emulator" else CPU)
    rounds = [(found, count) for found in loaded for count in _counts(found, threads)]
    able = [(found, count) for found, count in rounds if count <= target.cores()]
    with CpuSession(sum(len(found.works) for found, _ in able), on_event, store) as session:
        for found, count in rounds:
            if (found, count) in able:
                run_suite(session, found, count, rivals, seconds)
            else:
                reason = f"{count} threads exceed the {target.cores()} cores of this process"
                session.add(results.blank(found.name, OURS, found.works[0], count, refused=reason))
        return session.run


def _counts(found: Suite, threads: int) -> tuple[int, ...]:
    """Return the numbers of threads with which a suite runs, each once."""
    return (threads,) if threads else tuple(dict.fromkeys(count or target.cores() for count in found.threads))


def expected(suites: Sequence[Suite], threads: int, seconds: float) -> str:
    """Return the number of measurements of suites and the time they take, as text."""
    return estimate(sum(len(one.works) * len(_counts(one, threads)) for one in suites), seconds)


def run_suite(session: CpuSession, found: Suite, threads: int, wanted: Sequence[str], seconds: float) -> None:
    """Run every product of a suite with that many threads; a rival that cannot run is recorded once."""
    if found.kind == "emulator":
        from gemmery.lab.emulator_speed import emulator_speed  # 0.2 s that other suites need not wait

        for work in found.works:
            session.begin(f"{found.name}: {work}")
            session.end(*emulator_speed(found.name, work, found.rungs.get(work.name, ()), seconds))
        return
    processes = []
    chosen, left_out = suite.taking_part(found, wanted, libraries.RIVALS)
    for name, reason in left_out.items():
        session.add(results.blank(found.name, name, found.works[0], threads, refused=reason))
    for name in chosen:
        session.begin(f"{found.name}: rival {name}")
        try:
            processes.append(session.rival(name, threads))
        except RefusedError as refused:
            session.add(results.blank(found.name, name, found.works[0], threads, refused=str(refused)))
    measure = {"calls": calls, "first_call": first_call}.get(found.kind, contest)
    for work in found.works:
        session.begin(f"{found.name}: {work}, {threads} thread{'s' * (threads != 1)}")
        if found.kind == "new_shapes":
            plain = results.blank(found.name, OURS, work, threads)
            notes = {rival.name: rival.runs for rival in processes}
            rows = new_shapes(plain, work, threads, tuple(notes), seconds)
            session.end(*(replace(m, note=notes.get(m.kernel, "")) for m in rows))
            continue
        if work.name in found.rungs:
            labels = found.rungs[work.name]
            session.end(*tournament(session, found.name, work, labels, threads, processes, seconds))
        else:
            session.end(*measure(session, found.name, work, threads, processes, seconds))


def results_folder() -> Path:
    """Return the folder of records in the user's data folder."""
    return Path(config.data_dir()) / "results"


def contest(
    session: CpuSession, name: str, work: Work, threads: int, rivals: Sequence[RivalProcess], seconds: float
) -> list[Measurement]:
    """Check gemmery on one product, time it in turn with each rival, and return the records."""
    limits = session.limits(work.dtype, threads)
    plain = results.blank(name, OURS, work, threads)
    try:
        given = operands(work)
        error, rung = _checked(work, given, threads)
    except GemmeryError as refused:
        return [replace(plain, refused=str(refused))]
    function = _product(gemmery.matmul, work)
    contestants = [Contestant(OURS, on(threads, timing.products(function, *given)))]
    if threads > 1:
        contestants.append(Contestant(ONE_THREAD, on(1, timing.products(function, *given))))
    rows, notes = [], {}
    for rival in rivals:
        try:
            notes[rival.name] = "; ".join(filter(None, (rival.prepare(work), rival.runs)))
            contestants.append(rival.contestant)
        except RefusedError as refused:
            rows.append(results.blank(name, rival.name, work, threads, refused=str(refused)))
    found = timing.compare(contestants, seconds, timing.IDLE_SECONDS if threads > 1 else 0.0)
    ours = replace(results.timed(plain, found.timings[OURS], limits, found.versus), note=rung)
    timed = [
        results.timed(results.blank(name, rival, work, threads, note=note), found.timings[rival], limits)
        for rival, note in notes.items()
    ]
    return [replace(ours, error=error, checked=True), *timed, *rows]


def _product(function: Callable[..., object], work: Work) -> Callable[..., object]:
    """The call a user would write: `dtype=` only if the result is wider."""
    if work.out == work.dtype:
        return function
    return functools.partial(function, dtype=dtypes.get(work.out).numpy)


def _checked(work: Work, given: tuple[Any, Any, Any], threads: int) -> tuple[float, str]:
    """Return (error over bound, name of the rung) of one product."""
    a, b, out = given
    rung = (dispatch.specialised(work.problem) or dispatch.plan(work.problem)).rung
    function = _product(gemmery.matmul, work)
    with in_force(threads):
        c = function(a, b) if out is None else function(a, b, out=out)
    return results.error(c, a, b, rung.bound, rung.normwise), rung.name
