"""Products of a suite: gemmery's own, or rungs named with their configs, and calls of every kind, next to rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gemmery
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.keywords import ACTIVATIONS
from gemmery.ladder.rung import Rung, find
from gemmery.problem import Config
from gemmery_lab import measurements
from gemmery_lab.backend import Opponent, Runnable, Stage
from gemmery_lab.measure import expressions as kinds
from gemmery_lab.measure import libraries
from gemmery_lab.measure.libraries import RivalProcess
from gemmery_lab.measure.record import Measurement
from gemmery_lab.measure.timing import Contestant
from gemmery_lab.measure.work import Work
from gemmery_lab.on_cpu import CpuStage, in_force, on
from gemmery_lab.session import Session

PRODUCT = "gm.matmul"
OPTIONS = {  # of the product, by the kind of device
    "cpu": ("packed", "threads"),  # packed=1: B is packed before, by gm.pack
    "cuda": ("batch_invariant", "bias", *ACTIVATIONS),
}
ONE_THREAD = "gm.matmul on one thread"
SUSTAINED = "sustained"  # the case of records without rests
SUSTAINED_ABOVE = 2 * 4096**3  # operations of a product: up to it a device does not reach its power limit for long


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
        enter(partial(_entry, stage, contender, task.threads), GemmeryError, label, config=contender.config)
    for contestant in contestants if limits else ():  # before the times are taken
        backend.limits(rows[contestant.name], session.begin)
    if task.threads > 1 and limits and contestants and not task.labels:
        contestants.append(Contestant(ONE_THREAD, stage.product({}, 1).sampler()))
    for rival in task.rivals:
        enter(partial(stage.rival, rival), RefusedError, rival.name)
    if contestants:
        comparison, clock = session.compare(contestants, task.seconds, task.threads, task.rest)
        for name in rows.keys() & comparison.timings.keys():
            versus = comparison.ratios(name) if task.labels or name in labels else None
            timed = session.timed if limits else measurements.timed
            rows[name] = replace(timed(rows[name], comparison.timings[name], versus), clock_mhz=clock)
    large = task.sustained and task.work.problem.flops > SUSTAINED_ABOVE
    return [*rows.values(), *(_sustained(session, task, contestants, rows) if large and contestants else ())]


def _sustained(
    session: Session, task: Task, contestants: Sequence[Contestant], rows: Mapping[str, Measurement]
) -> Iterator[Measurement]:
    """Yield a record of each contestant at the power that the device sustains."""
    case = ", ".join(filter(None, [task.work.case, SUSTAINED]))
    race = session.backend.sustained(contestants, task.sustained)
    if race is None:
        return
    for name, times in race.comparison.timings.items():
        versus = race.comparison.ratios(name) if rows[name].versus else None
        row = session.timed(replace(rows[name], case=case), times, versus)
        yield replace(row, clock_mhz=race.clocks[name], power_w=race.watts[name])


def _entry(stage: Stage, entrant: Entrant, threads: int) -> Runnable:
    """Return a contestant of a suite on the operands. Raises RefusedError if it does not take them."""
    if entrant.rung is None:
        return stage.product(entrant.config, threads)
    return stage.rung(entrant.rung, {**entrant.rung.default, **entrant.config}, threads)


class CallStage(CpuStage):
    """The arrays of one kind of call."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def product(self, config: Config, threads: int) -> Runnable:
        """Take gemmery's expression of the call; the note has both."""
        convert = _convert(self.work)

        def error() -> float:
            with in_force(threads):
                return min(kinds.error(self.work, _result(self.work, convert)), measurements.WRONG)

        sample = kinds.sample(self.work, "ours", {"gm": gemmery}, convert)
        note = f"{kinds.text(self.work, 'ours')} against {kinds.text(self.work, self.work.arrays)}"
        return Runnable(lambda: on(threads, sample), error, note)

    def rival(self, opponent: RivalProcess) -> Runnable:
        """Take the library's expression."""
        opponent.prepare(self.work)
        return Runnable(lambda: opponent.sample, note=opponent.runs)


def calls(session: Session, task: Task) -> list[Measurement]:
    """Check one kind of call, time it in turn with the library that its arrays are of, and return the records."""
    library = [rival for rival in task.rivals if rival.name == task.work.arrays]
    with in_force(task.threads):  # one change: each change of the number of threads drops what calls have prepared
        return contest(session, replace(task, rivals=library), CallStage(task.work), limits=False)


def _convert(work: Work) -> kinds.Convert:
    """Return what makes an operand of NumPy's array. Raises RefusedError where the library is not installed."""
    if work.arrays == "numpy":
        return lambda array: array
    missing = libraries.find(work.arrays).missing()
    if missing:
        raise RefusedError(missing)
    return libraries.as_tensor


def _result(work: Work, convert: kinds.Convert) -> Any:
    """Return the result of one call as an array of NumPy."""
    arrays = {name: convert(array) for name, array in kinds.operands(work, "ours").items()}
    result = kinds.result(work, "ours", {"gm": gemmery, **arrays})
    return result if work.arrays == "numpy" else result.float().numpy()
