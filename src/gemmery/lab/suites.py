"""bench(): gemmery's product against the rival libraries, on suites of products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gemmery import config
from gemmery.bench import suite
from gemmery.bench.record import Measurement, Run
from gemmery.bench.suite import ON_A_GPU, Suite, taking_part
from gemmery.cpu import target
from gemmery.errors import ArgumentError, RefusedError
from gemmery.lab import asked
from gemmery.lab.backend import TURNS, Opponent
from gemmery.lab.climb import estimate
from gemmery.lab.contest import PRODUCT, SUSTAINED_ABOVE, Task, calls, contest, entrant
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.new_process import first_call, new_shapes
from gemmery.lab.session import Session, open_session


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
    asked.budget(seconds)
    loaded = [suite.load(suite.find(name)) for name in suites or suite.names()]
    device = device.strip().lower()
    kind = (device or (loaded[0].device if suites else "cpu")).partition(":")[0]
    if not suites:
        loaded = [each for each in loaded if each.device == kind]
    for each in loaded:
        if each.device != kind:
            raise ArgumentError(
                f"suite {each.name!r} is for {each.device}, not {kind}; choose suites of one device, and that device"
            )
    if rivals and all(each.kind in suite.ALONE for each in loaded):
        names = ", ".join(each.name for each in loaded)
        raise ArgumentError(f"rivals={', '.join(rivals)}: suite {names} has no rivals; leave them out")
    gpu = asked.ordinal(device or kind)
    _check_names(loaded, rivals, kind)
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


def _check_names(suites: Sequence[Suite], rivals: Sequence[str], kind: str) -> None:
    """Raise ArgumentError for an unknown rival or rung, before anything is measured."""
    for name in {*rivals, *(name for each in suites for name in each.rivals)}:
        asked.rival(name, kind)
    for each in suites:
        ladder = asked.registry("cuda" if each.kind == "emulator" else kind)
        for label in {label for labels in each.rungs.values() for label in labels}:
            entrant(label, ladder)


def _counts(suite: Suite, threads: int) -> tuple[int, ...]:
    """Return the numbers of threads with which a suite runs, each once; 0 on a GPU."""
    if suite.device != "cpu":
        return (0,)
    return (threads,) if threads else tuple(dict.fromkeys(count or target.cores() for count in suite.threads))


def expected(suites: Sequence[Suite], threads: int, seconds: float) -> str:
    """Return the number of measurements of suites and the time they take, as text."""
    count = sum(len(each.works) * len(_counts(each, threads)) for each in suites)
    raced = sum(without_rest(each, work.problem.flops, 1 + len(each.rivals)) for each in suites for work in each.works)
    return estimate(count, seconds + raced / count)


def without_rest(suite: Suite, flops: int, contestants: int) -> float:
    """Return the seconds of a race without rests between so many contestants at a product; 0 if there is none."""
    return suite.sustained * (1 + TURNS * contestants) if flops > SUSTAINED_ABOVE else 0.0


def run_suite(session: Session, suite: Suite, threads: int, requested: Sequence[str], seconds: float) -> None:
    """Run every product of a suite next to its rivals; one that cannot run is recorded once."""
    rivals = _rivals(session, suite, threads, requested)
    measure, on_threads = _measure(suite.kind), f", {threads} thread{'s' * (threads != 1)}" if threads else ""
    for work in suite.works:
        session.begin(f"{suite.name}: {work}{on_threads}")
        labels = suite.rungs.get(work.name, ())
        try:
            rows = measure(
                session, Task(suite.name, work, labels, threads, rivals, seconds, suite.rest, suite.sustained)
            )
        except RefusedError as refused:
            rows = [session.backend.blank(suite.name, PRODUCT, work, threads, refused=str(refused))]
        session.end(*rows)


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


def _measure(kind: str) -> Callable[[Session, Task], list[Measurement]]:
    """Return what measures a task of this kind of suites."""
    if kind == "emulator":
        from gemmery.lab.emulator_speed import emulator_speed  # 0.2 s that other suites need not wait

        return emulator_speed
    if kind in ON_A_GPU:
        from gemmery.lab import launches  # loads NVIDIA's bindings

        return launches.call if kind == "call" else launches.compilations
    return {"calls": calls, "first_call": first_call, "new_shapes": new_shapes}.get(kind, contest)


def results_folder() -> Path:
    """Return the folder of records in the user's data folder."""
    return Path(config.data_dir()) / "results"
