"""One run of a command, with its records and its progress, and who takes turns in it: rungs of a ladder, or of a suite.

A level of a ladder times each rung in turn with its parent and a rival; a contest of a suite times all together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

import gemmery
from gemmery import load
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.keywords import ACTIVATIONS
from gemmery.ladder.rung import Rung, find
from gemmery.problem import Config
from gemmery_lab import measurements
from gemmery_lab.measure import expressions as kinds
from gemmery_lab.measure import libraries, record, timing
from gemmery_lab.measure.libraries import RivalProcess
from gemmery_lab.measure.record import Measurement, OnEvent, Run, RunEvent, RunSteps
from gemmery_lab.measure.timing import Comparison, Contestant, Ratio, Sample, Timing
from gemmery_lab.measure.work import Work
from gemmery_lab.measurements import Backend, Opponent, Runnable, Stage, square
from gemmery_lab.on_cpu import Cpu, CpuStage

PRODUCT = "gm.matmul"
OPTIONS = {  # of the product, by the kind of device
    "cpu": ("packed", "threads"),  # packed=1: B is packed before, by gm.pack
    "cuda": ("batch_invariant", "bias", *ACTIVATIONS),
}
ONE_THREAD = "gm.matmul on one thread"
SUSTAINED = "sustained"  # the case of records without rests
SUSTAINED_ABOVE = 2 * 4096**3  # operations of a product: up to it a device does not reach its power limit for long


class Session(RunSteps[Measurement]):
    """The records of one run on a backend; a context manager that ends what the run started.

    `store` is a folder: each measurement is appended to the machine's file at once, so an interrupted run keeps them.
    """

    def __init__(self, backend: Backend, total: int, on_event: OnEvent, store: Path | None = None) -> None:
        super().__init__(total, self._tell)
        self.backend, self._machine, self._started = backend, backend.machine, record.now()
        self._on_event, self._store, self._meter = on_event, store, load.Meter(backend.children)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()

    @property
    def run(self) -> Run:
        """The records so far."""
        return Run(self._machine, self._started, tuple(self.records))

    def add(self, *records: Measurement) -> None:
        """Record results with the load since the last ones, store them, and tell the listener of each."""
        busy = self._meter.load()
        records = tuple(replace(m, load=busy) for m in records)
        if self._store is not None:
            record.append(record.path(self._store, self._machine.name), Run(self._machine, self._started, records))
        super().add(*records)

    def _tell(self, what: str, done: int, total: int, m: Measurement | None) -> None:
        self._on_event(RunEvent(m.kernel, done, total, m, self.run) if m else RunEvent(what, done, total))

    def compare(
        self, contestants: Sequence[Contestant], seconds: float, threads: int, rest: float = 0.0
    ) -> tuple[Comparison, int]:
        """Time contestants in turn; return the comparison and the device's clock meanwhile.

        There is a pause before each turn if they use several threads: idle workers of the last one may still spin. With
        a `rest` in seconds there is one too, and the order is drawn anew in each round.
        """
        self.backend.clock()
        pause, draw = (rest, random.Random(0)) if rest else (timing.IDLE_SECONDS if threads > 1 else 0.0, None)
        comparison = timing.compare(contestants, seconds, pause, draw=draw)
        return comparison, self.backend.clock()

    def timed(self, plain: Measurement, times: Timing, versus: Mapping[str, Ratio] | None = None) -> Measurement:
        """Return a record with its times, its ratios to others, and the limits of its kernel."""
        return measurements.timed(plain, times, versus, self.backend.limits(plain, self.begin))


def open_session(gpu: int | None, total: int, on_event: OnEvent, store: Path | None = None) -> Session:
    """Return a session on a GPU by its number, or on the CPU.

    Raises DeviceError if there is no such device.
    """
    if gpu is None:
        return Session(Cpu(), total, on_event, store)
    from gemmery_lab.on_cuda import Cuda  # loads NVIDIA's bindings

    return Session(Cuda(gpu), total, on_event, store)


class Level:
    """The rungs on one product, which share operands, rivals and the measurements so far.

    A rung whose call is predicted to take more than `seconds` does not run.
    """

    def __init__(self, session: Session, suite: str, work: Work, threads: int, seconds: float) -> None:
        self._session, self._backend = session, session.backend
        self._suite, self._work, self._threads, self._seconds = suite, work, threads, seconds
        self._stage = self._backend.stage(work)
        self._samples: dict[str, Sample] = {}  # of rungs
        self._times: dict[str, float] = {}
        self._contestants: dict[int, Contestant | None] = {}  # the rival, by threads
        self._rivals: dict[tuple[str, int], Measurement] = {}

    def measure(self, rung: Rung, config: Config, before: Measurement | None) -> Measurement:
        """Check a rung and time it in turn with a rival and its parent, or record why it does not run.

        `before` is its record for a smaller product.
        """
        threads = threads_of(rung, self._threads)
        full = {**rung.default, **config}
        plain = self._backend.blank(self._suite, rung.name, self._work, threads, config=full)
        try:
            entry = self._stage.rung(rung, full, threads)
            reason = self._too_slow(rung, full, before)
        except RefusedError as refused:
            reason = str(refused)
        if reason:
            return replace(plain, refused=reason)
        error = entry.error() if entry.error else 0.0
        self._samples[rung.name] = entry.sampler()
        contestants = [Contestant(rung.name, self._samples[rung.name]), *self._others(rung, threads)]
        comparison, clock = self._session.compare(contestants, self._backend.share(threads), threads)
        self._times[rung.name] = seconds = comparison.timings[rung.name].seconds
        if rival := self._contestants[threads]:  # its times are kept where the backend prefers them to those it has
            times, known = comparison.timings[rival.name], self._rivals[rival.name, threads]
            fastest = seconds == min(self._times.values())
            if not known.seconds or self._backend.replaces(times.samples, known.samples, fastest):
                self._rivals[rival.name, threads] = replace(self._session.timed(known, times), clock_mhz=clock)
        versus, parent = comparison.versus, rung.parent or ""
        if parent not in versus and parent in self._times:  # too slow for turns: one pair, of medians
            ratio = self._times[parent] / seconds
            versus = {**versus, parent: Ratio(ratio, ratio / 2, 1)}
        done = self._session.timed(plain, comparison.timings[rung.name], versus)
        return replace(done, error=error, checked=True, clock_mhz=clock)

    def rivals(self) -> list[Measurement]:
        """The records of the rivals on this product, or the reasons why there are none."""
        return list(self._rivals.values())

    def _too_slow(self, rung: Rung, config: Config, before: Measurement | None) -> str:
        """The reason not to run if one call would exceed the limit, predicted from the rate on a smaller product."""
        flops, small = self._work.problem.flops, self._backend.product_for(rung, self._backend.pilot, self._work)
        if flops <= small.problem.flops:
            return ""
        if before is not None and before.flops >= small.problem.flops:
            predicted = before.seconds * flops / before.flops
        else:
            sample = self._backend.stage(small).rung(rung, config, min(self._threads, 1)).sampler()
            predicted = sample(1, 1) / 1e9 * flops / small.problem.flops
        return measurements.too_slow(predicted, self._seconds)

    def _others(self, rung: Rung, threads: int) -> list[Contestant]:
        """Return the rival, and the parent unless it is too slow to take turns."""
        if threads not in self._contestants:
            self._contestants[threads] = self._rival(threads)
        rival, parent = self._contestants[threads], rung.parent or ""
        self._build_parent(parent)
        quick = parent in self._samples and self._times[parent] < self._backend.slow_parent
        return [*([rival] if rival else []), *([Contestant(parent, self._samples[parent])] if quick else [])]

    def _rival(self, threads: int) -> Contestant | None:
        """Return the first rival that takes the operands; the reasons of the others are recorded."""
        for name in self._backend.ladder_rivals():
            plain = self._backend.blank(self._suite, name, self._work, threads)
            try:
                entry = self._stage.rival(self._backend.rival(name, threads))
            except RefusedError as refused:
                self._rivals[name, threads] = replace(plain, refused=str(refused))
                continue
            self._rivals[name, threads] = replace(plain, note=entry.note)
            return Contestant(name, entry.sampler())
        return None

    def _build_parent(self, parent: str) -> None:
        """Build the parent for a product that is not a square of the ladder, if it was measured on those only."""
        rung = next((rung for rung in self._backend.ladder if rung.name == parent), None)
        if rung is None or parent in self._samples or self._work == square(self._work, self._work.n):
            return
        try:
            sample = self._stage.rung(rung, rung.default, min(self._threads, 1)).sampler()
        except RefusedError:
            return
        self._samples[parent], self._times[parent] = sample, sample(1, 1) / 1e9


def threads_of(rung: Rung, threads: int) -> int:
    """Return the number of threads that a rung runs on, of those allowed; 0 on a GPU."""
    return threads if rung.name.endswith("_threaded") else min(threads, 1)


@dataclass(frozen=True)
class Task:
    """One product of a suite: who multiplies it, on how many threads, and in how many seconds together."""

    suite: str
    work: Work
    labels: tuple[str, ...]  # of rungs; () for the product
    threads: int  # 0 on a GPU
    rivals: Sequence[Opponent]
    seconds: float
    rest: float = 0.0  # before each turn
    sustained: float = 0.0  # seconds of a turn without rest; 0: there is none


@dataclass(frozen=True)
class Entrant:
    """A contestant named by a suite: a rung with its config, or (`rung` None) the product with its options."""

    label: str
    rung: Rung | None
    config: dict[str, int]


def entrant(label: str, ladder: tuple[Rung, ...]) -> Entrant:
    """Return the rung that a suite calls "packed kc=256", or the product, as in "gm.matmul threads=1".

    Raises ArgumentError for an unknown rung, a key that it does not have, or a value that is not a whole number.
    """
    name, *words = label.split()
    rung = None if name == PRODUCT else find(ladder, name)
    on_gpu = any(other.geometry is not None for other in ladder)
    known = tuple(rung.space) if rung else OPTIONS["cuda" if on_gpu else "cpu"]
    config = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in known or not value.isdecimal():
            raise ArgumentError(f"{label!r}: {word!r} must be one of {', '.join(known) or 'nothing'}, = and a number")
        config[key] = int(value)
    return Entrant(label, rung, config)


def contest(session: Session, task: Task, stage: Stage | None = None, limits: bool = True) -> list[Measurement]:
    """Check the product or the named rungs, time them in turn with each rival, and return the records.

    `versus` of a record has its ratio to each other contestant; a rival has ratios next to named rungs alone. `stage`
    takes the place of the backend's for calls of another kind, of which no `limits` are measured: overhead counts.
    """
    backend, labels = session.backend, task.labels or (PRODUCT,)
    stage = stage or backend.stage(task.work)
    rows: dict[str, Measurement] = {}
    contestants: list[Contestant] = []

    def enter(take: Callable[[], Runnable], refusal: type[GemmeryError], name: str, **known: Any) -> None:
        """Check a contestant and make its sampler, or record the reason of its refusal."""
        rows[name] = plain = backend.blank(task.suite, name, task.work, task.threads, **known)
        try:
            entry = take()
            checked = replace(plain, note=entry.note)
            if entry.error:
                checked = replace(checked, error=entry.error(), checked=True)
            contestants.append(Contestant(name, entry.sampler()))
            rows[name] = checked
        except refusal as refused:
            rows[name] = replace(plain, refused=str(refused))

    for label in labels:
        contender = entrant(label, backend.ladder)
        rung, config = contender.rung, contender.config
        build = partial(stage.rung, rung, {**rung.default, **config}) if rung else partial(stage.product, config)
        enter(partial(build, task.threads), GemmeryError, label, config=config)
    for contestant in contestants if limits else ():  # before the times are taken
        backend.limits(rows[contestant.name], session.begin)
    if task.threads > 1 and limits and contestants and not task.labels:
        contestants.append(Contestant(ONE_THREAD, stage.product({"threads": 1}, 1).sampler()))
    for rival in task.rivals:
        enter(partial(stage.rival, rival), RefusedError, rival.name)
    if contestants:
        comparison, clock = session.compare(contestants, task.seconds, task.threads, task.rest)
        for name in rows.keys() & comparison.timings.keys():
            versus = comparison.ratios(name) if task.labels or name in labels else None
            timed = session.timed if limits else measurements.timed
            rows[name] = replace(timed(rows[name], comparison.timings[name], versus), clock_mhz=clock)
    lasting = list[Measurement]()  # at the power that the device sustains
    large = task.sustained and task.work.problem.flops > SUSTAINED_ABOVE
    if large and contestants and (race := backend.sustained(contestants, task.sustained)):
        case = ", ".join(filter(None, [task.work.case, SUSTAINED]))
        for name, times in race.comparison.timings.items():
            versus = race.comparison.ratios(name) if rows[name].versus else None
            row = session.timed(replace(rows[name], case=case), times, versus)
            lasting.append(replace(row, clock_mhz=race.clocks[name], power_w=race.watts[name]))
    return [*rows.values(), *lasting]


class CallStage(CpuStage):
    """The arrays of one kind of call."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def product(self, config: Config, threads: int) -> Runnable:
        """Take gemmery's expression of the call; the note has both. The library of its arrays must be installed."""
        work, is_numpy = self.work, self.work.arrays == "numpy"
        if missing := "" if is_numpy else libraries.find(work.arrays).missing():
            raise RefusedError(missing)
        convert: kinds.Convert = np.asarray if is_numpy else libraries.as_tensor

        def error() -> float:
            arrays = {name: convert(array) for name, array in kinds.operands(work, "ours").items()}
            result = kinds.result(work, "ours", {"gm": gemmery, **arrays})
            return min(kinds.error(work, result if is_numpy else result.float().numpy()), measurements.WRONG)

        sample = kinds.sample(work, "ours", {"gm": gemmery}, convert)
        note = f"{kinds.text(work, 'ours')} against {kinds.text(work, work.arrays)}"
        return Runnable(lambda: sample, error, note)

    def rival(self, opponent: RivalProcess) -> Runnable:
        opponent.prepare(self.work)
        return Runnable(lambda: opponent.sample, note=opponent.runs)


def calls(session: Session, task: Task) -> list[Measurement]:
    """Check one kind of call, time it in turn with the library that its arrays are of, and return the records."""
    library = [rival for rival in task.rivals if rival.name == task.work.arrays]
    return contest(session, replace(task, rivals=library), CallStage(task.work), limits=False)
