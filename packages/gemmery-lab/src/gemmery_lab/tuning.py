"""tune(): measures the constants of the CPU's model on this machine, and writes the table that replaces them.

A question is a few constants, values for them, and products for which those values mean different plans. Successive
halving answers it: all candidates are timed for a short while, the better half for longer, until one is left, which is
then timed against the constants so far. All contestants of a round take turns, and what counts is the ratio to the
constants so far, over all products of the question. Candidates with the same plan of a product share its time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np

from gemmery import arrays, config, dispatch, load
from gemmery.cpu import build, target, tuned
from gemmery.cpu import threads as cpu_threads
from gemmery.cpu.launch import Launch
from gemmery.cpu.target import Constants, Target
from gemmery.errors import ArgumentError, CheckError
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import find
from gemmery_lab.measure import record, timing
from gemmery_lab.measure.timing import Contestant, Sample
from gemmery_lab.measure.work import Work, operands

OnQuestion = Callable[[str, int, int], None]  # what begins, how many are answered, of how many
LEAST_GAIN = 0.01  # of the time: less is no reason for another constant
FILLED = 0.8  # of the time is planned for: the shortest races of slow products take longer than their share
BUSY = 3  # times the spread that a gain must be on a machine that others use
IDLE = 0.003  # s after which workers sleep
_IDLE_CALLS = 8  # of a sample
_TURNS = 6  # a comparison takes each contestant at least so often, calibration included
_LISTS = "times", "spreads", "busy"  # of a row of the cache: the scores of its rounds
_NOTHING: dict[str, list[float]] = {key: [] for key in _LISTS}
# Fields that a cache of Kernel Tuner must have.
_UNTIMED = dict.fromkeys(("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"), 0)


@dataclass(frozen=True)
class Probe:
    """A product that tells candidates apart; `idle`: its workers sleep before."""

    m: int
    n: int
    k: int
    dtype: str
    threads: int = 1
    idle: bool = False

    @property
    def work(self) -> Work:
        """The product as the lab knows it."""
        return Work(self.m, self.n, self.k, self.dtype, self.dtype)

    def __str__(self) -> str:
        on_threads = f" on {self.threads} threads" if self.threads > 1 else ""
        return f"{self.work}{on_threads}{' after a pause' * self.idle}"


@dataclass(frozen=True)
class Question:
    """Values of constants, and the products that show which are best."""

    name: str
    values: dict[str, tuple[float, ...]]
    probes: tuple[Probe, ...]

    def candidates(self, base: Constants) -> list[Constants]:
        """Return `base` with every combination of the values and its own, the closest first, without `base` itself."""
        values = [{*each, getattr(base, key)} for key, each in self.values.items()]
        changes = [dict(zip(self.values, each, strict=True)) for each in itertools.product(*values)]

        def distance(candidate: Constants) -> float:
            return sum(abs(math.log(getattr(candidate, key) / getattr(base, key))) for key in self.values)

        return sorted({base._replace(**change) for change in changes} - {base}, key=lambda c: (distance(c), c))


def questions(host: Target, threads: int) -> tuple[Question, ...]:
    """Return what is measured on a CPU: those of threads only if there are several."""
    l2, packed = host.l2 or 1 << 20, find(CPU, "packed").space

    def squares(multiples: Sequence[float], rows: int = 0) -> tuple[Probe, ...]:
        """Products with a B of so many times L2, and this many rows of A or as many as B has."""
        sides = [(math.isqrt(int(x * l2 / size)), dtype) for x in multiples for dtype, size in (("f32", 4), ("f64", 8))]
        return tuple(Probe(rows or max(side, 200), side, side, dtype) for side, dtype in sides)

    rows = tuple(Probe(m, 1536, 1536, "f32") for m in (48, 96, 128, 192, 256, 384))
    sides = [math.isqrt(x * l2 // 4) for x in (2, 3, 6, 12, 24)]
    wide = tuple(Probe(side, side, k, "f32") for side in sides for k in (16, 64))
    large = Probe(768, 4096, 1536, "f32", threads), Probe(768, 4096, 768, "f64")
    alone = (
        Question("rungs: B in place, many rows", {"direct_many": (0.12, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.5)},
                 squares((0.18, 0.31, 0.43, 0.62, 0.87, 1.25, 2.0))),
        Question("rungs: B in place, few rows", {"direct_few": (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)},
                 squares((0.75, 1.25, 1.75, 2.5, 4.0, 6.5), 48)),
        Question("rungs: B of int8 in place", {"direct_int8": (64, 256, 1024, 4096, 16_384)},
                 tuple(Probe(n, n, n, "int8") for n in (12, 24, 48, 96))),
        Question("rungs: B of int16 in place", {"direct_int16": tuple(x << 10 for x in (6, 10, 15, 24, 30, 48, 96))},
                 tuple(Probe(n, n, n, "int16") for n in (64, 80, 96, 112, 128, 160))),
        Question("rungs: rows of streams", {"streamed_rows": (32, 64, 112, 160, 224, 320, 512)}, rows),
        Question("rungs: a large C", {"large_c": (1.0, 2.5, 4.0, 8.0, 16.0, 64.0)}, wide),
        Question("blocks", {"mc": packed["mc"], "nc": packed["nc"]}, large),
    )  # fmt: skip
    if threads == 1:
        return alone
    small = tuple(Probe(n, n, n, "f32", threads) for n in (48, 64, 80, 96, 112, 128, 160, 192))
    slept = tuple(Probe(n, n, n, "f32", threads, idle=True) for n in (96, 128, 160, 208, 256, 320))
    shared = (
        Question("threads: worth waking", {"worth": (2000, 4000, 8000, 16_000, 32_000, 64_000)}, small),
        Question("threads: waking sleepers", {"wakes": (25_000, 50_000, 100_000, 200_000, 400_000, 800_000)}, slept),
    )
    return (*shared, *alone)


@dataclass(frozen=True)
class Score:
    """The time of a candidate divided by that of the constants so far, the spread of that ratio, and the load then."""

    time: float
    spread: float
    busy: float  # cores that other processes used


@contextmanager
def _in_force(constants: Constants) -> Iterator[None]:
    """Plan products by these constants within a `with` block."""
    before, target.override = target.override, constants
    build.forget()
    try:
        yield
    finally:
        target.override = before
        build.forget()


def _planned(probe: Probe, constants: Constants) -> tuple[Launch, tuple[object, ...]]:
    """Return the kernel of a product under these constants, and its plan: equal plans are the same work."""
    problem = probe.work.problem
    with _in_force(constants):
        rung, config, _ = dispatch.choice(problem)
        launch = rung.build(problem, config)
        assert isinstance(launch, Launch)
        return launch, (rung.name, launch.plan(1, probe.m, probe.n, probe.k, probe.threads))


def least(question: Question, base: Constants) -> float:
    """Return about how many seconds a question takes at least."""
    total = 0.0
    every = [base, *question.candidates(base)]
    for probe in question.probes:
        launch, _ = _planned(probe, base)
        ns = launch.unit.work(probe.m, probe.n, probe.k) if launch.unit else 0.0
        turn = _IDLE_CALLS * (IDLE * 1e9 + ns) if probe.idle else max(ns, timing.SAMPLE_NS)
        variants = len({_planned(probe, each)[1] for each in every})
        total += (variants > 1) * 2 * variants * _TURNS * turn / 1e9  # two rounds
    return max(total, 1e-3)


def race(
    question: Question, base: Constants, candidates: Sequence[Constants], seconds: float, end: float
) -> list[Score]:
    """Time candidates in turn with `base` on each product of a question, for about so many seconds.

    Raises CheckError for a candidate that gives other bits, and TimeoutError when the clock is at `end`.
    """
    logs, spreads, meter = [0.0] * len(candidates), [0.0] * len(candidates), load.Meter()
    plans = [[_planned(probe, each) for each in (base, *candidates)] for probe in question.probes]
    apart = [len({plan for _, plan in each}) > 1 for each in plans]
    for probe, planned in itertools.compress(zip(question.probes, plans, strict=True), apart):
        operands_of = operands(probe.work)
        a, b, c = (arrays.view(array[None]) for array in operands_of)
        runs: dict[object, Callable[[], None]] = {}
        bits = set()
        for constants, (launch, plan) in zip((base, *candidates), planned, strict=True):
            if plan in runs:
                continue
            with _in_force(constants):
                runs[plan] = partial(launch.run, launch.job(a, b, c, 1, 0, None, probe.threads), a, b)
            operands_of[2].view(np.uint8).fill(0xFF)  # NaN
            _sampler(runs[plan], False, end)(1, 0)
            bits.add(operands_of[2].tobytes())
        if len(bits) > 1:
            raise CheckError(f"{probe.work}: the bits of C depend on {', '.join(question.values)}; report it")
        names = {plan: str(at) for at, plan in enumerate(runs)}
        contestants = [Contestant(names[plan], _sampler(run, probe.idle, end)) for plan, run in runs.items()]
        rest = probe.idle * _IDLE_CALLS * IDLE  # which the sampler itself makes
        comparison = timing.compare(contestants, seconds / sum(apart), rest, pause=lambda _: None)
        for index, (_, plan) in enumerate(planned[1:]):
            ratio = comparison.versus.get(names[plan])  # none for the plan of `base`
            logs[index] += math.log(ratio.median) if ratio else 0
            spreads[index] += ratio.spread if ratio else 0
    count, busy, sums = len(question.probes), meter.load(), zip(logs, spreads, strict=True)
    return [Score(round(math.exp(log / count), 4), round(spread / count, 4), busy) for log, spread in sums]


def _sampler(run: Callable[[], None], idle: bool, end: float) -> Sample:
    """Return a sampler of a product, each after a pause if `idle`; it raises TimeoutError from `end` on."""
    one_by_one = timing.calls(run)

    def sample(inner: int, warm: int) -> int:
        if monotonic() >= end:
            raise TimeoutError
        if not idle:
            return one_by_one(inner, warm)
        count, total = min(inner, _IDLE_CALLS), 0
        for _ in range(count):
            sleep(IDLE)
            total += one_by_one(1, 0)
        return total * inner // count

    return sample


@dataclass(frozen=True)
class Outcome:
    """The answer to a question: constants before and after, and the score of the best other ones."""

    question: str
    before: dict[str, float]
    after: dict[str, float]
    score: Score | None  # None: not measured


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`: the table's path, "" without one, and an outcome for each question."""

    path: str
    outcomes: tuple[Outcome, ...]
    seconds: float


class _Journal:
    """The rounds so far, kept in a file beside the table: what a run measured before an interrupt is not lost."""

    def __init__(self, path: Path, host: Target, ordered: Sequence[Question], fresh: bool) -> None:
        self.path, self._questions, self._host = path, ordered, host
        self.rounds: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing, or damaged
            text = path.read_text("utf-8")
            # Raises ValueError for another version or machine.
            tuned.read(text, target.described(host), target.modeled(host)._asdict())
            rows = json.loads(text)["cache"].items()
            self.rounds = {} if fresh else {key: row for key, row in rows if _is_whole(key, row)}

    def scores(self, candidates: Sequence[Constants], at: int) -> list[Score] | None:
        """Return the scores of a round, None if it was not measured."""
        rows = [self.rounds.get(",".join(map(str, each)), _NOTHING) for each in candidates]
        if any(len(row[name]) <= at for row in rows for name in _LISTS):
            return None
        return [Score(*(row[name][at] for name in _LISTS)) for row in rows]

    def add(self, candidates: Sequence[Constants], scores: Sequence[Score], at: int) -> None:
        for each, score in zip(candidates, scores, strict=True):
            key = ",".join(map(str, each))
            old, new = self.rounds.get(key, _NOTHING), zip(_LISTS, (score.time, score.spread, score.busy), strict=True)
            lists = {name: [*old[name][:at], value] for name, value in new}
            row = {"time": score.time, **lists, **_UNTIMED, "timestamp": record.now()}
            self.rounds[key] = {**each._asdict(), **row}
        self.write(self.path, {})

    def write(self, path: Path, constants: dict[str, float]) -> None:
        keys, rows = Constants._fields, [target.modeled(self._host)._asdict(), *self.rounds.values()]
        products = {each.name: [str(probe) for probe in each.probes] for each in self._questions}
        machine = tuned.versioned(target.described(self._host))
        own = {"machine": machine, "constants": constants, "written": record.now()}
        table = {
            "schema_version": "1.1.0",
            "device_name": self._host.cpu,
            "kernel_name": "gemmery.matmul",
            "problem_size": "those of gemmery.products",
            "tune_params_keys": keys,
            "tune_params": {key: sorted({row[key] for row in rows}) for key in keys},
            "objective": "time",
            "gemmery": {**own, "products": products},
            "cache": self.rounds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(f"{json.dumps(table, indent=1, allow_nan=False)}\n", "utf-8")
        new.replace(path)


def _is_whole(key: str, row: dict[str, Any]) -> bool:
    """Return True for a row as a journal adds it. Raises KeyError and TypeError for some others."""
    whole = all(row[name] and all(-math.inf < score < math.inf for score in row[name]) for name in _LISTS)
    return whole and key == ",".join(str(row[field]) for field in Constants._fields)


def tune(minutes: float = 10.0, fresh: bool = False, on_step: OnQuestion = record.ignore) -> Tuning:
    """Measure the constants of this machine for at most about so many minutes, and write its table.

    Questions that take least come first; one for which the time is too short keeps the model's constants. If all are
    kept there is no table, unless the package has one, and an older one of this machine is removed: to read one takes a
    first product 4 ms. A run that was interrupted goes on where it was, unless `fresh`. `on_step` hears of each.

    >>> tune(0.2).seconds < 15  # doctest: +SKIP
    True

    Raises ArgumentError for minutes that are not above 0, and where there is no home folder.
    """
    if not 0 < minutes < math.inf:
        raise ArgumentError(f"minutes={minutes}: the time to tune must be above 0; give 10 for a whole table")
    started, host = monotonic(), target.host()
    names, end = config.table_files(target.described(host)), started + 60 * minutes
    path, old = (Path(config.data_dir(), "tables", name) for name in names)
    base, threads = target.modeled(host), cpu_threads.get()
    needed = [(least(each, base), at, each) for at, each in enumerate(questions(host, threads))]
    ordered = [(seconds, each) for seconds, _, each in sorted(needed)]
    unfinished = path.with_suffix(".unfinished.json")
    journal = _Journal(unfinished, host, [each for _, each in ordered], fresh)
    outcomes, constants = list[Outcome](), dict[str, float]()
    for done, (needs, question) in enumerate(ordered):
        on_step(question.name, done, len(ordered))
        share = FILLED * (end - monotonic()) / (len(ordered) - done)
        best, score = _answer(question, base, journal, share, needs, end) or (base, None)
        before = {key: getattr(base, key) for key in question.values}
        if score:
            doubt = 1 if score.busy <= load.limit(target.cores()) else BUSY
            base = best if score.time < 1 - max(doubt * score.spread, LEAST_GAIN) else base
        after = {key: getattr(base, key) for key in before}
        constants |= after if score else {}
        outcomes.append(Outcome(question.name, before, after, score))
    # Without a table of the user's the package's would serve.
    tables = (Path(folder, path.name) for folder in config.table_folders())
    shipped = any(table != path and table.exists() for table in tables)
    changed = shipped or any(each.before != each.after for each in outcomes)
    if changed:
        journal.write(path, constants)
    for file in (unfinished, old, *(() if changed else (path,))):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not there, or has other tables
        path.parent.rmdir()
    on_step("", len(ordered), len(ordered))
    return Tuning(str(path) if changed else "", tuple(outcomes), monotonic() - started)


def _answer(
    question: Question, base: Constants, journal: _Journal, share: float, needs: float, end: float
) -> tuple[Constants, Score] | None:
    """Return the best candidate and its score next to `base`, or None if not all rounds end before `end`.

    The rounds share `share` seconds; two take at least `needs`.
    """
    running = question.candidates(base)
    rounds = min(max(2, int(share / needs)), math.ceil(math.log2(len(running))) + 1)
    at = 0
    while True:
        start = monotonic()
        scores = journal.scores(running, at)
        if scores is None:
            if start + needs / 2 > end:
                return None
            try:
                scores = race(question, base, running, share / rounds, end)
            except TimeoutError:
                return None
            journal.add(running, scores, at)
        if len(running) == 1:
            return running[0], scores[0]
        ranked = sorted(zip(running, scores, strict=True), key=lambda each: each[1].time)
        now = monotonic()
        last = at + 2 >= rounds or end - now < 2 * (now - start)  # a busy machine takes longer than planned
        running = [candidate for candidate, _ in ranked[: 1 if last else -(-len(ranked) // 2)]]
        at += 1
