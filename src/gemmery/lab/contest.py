"""Products of a suite: gemmery's own, or rungs named with their configs, next to the rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemmery.bench.record import Measurement
from gemmery.bench.timing import Contestant
from gemmery.bench.work import Work
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.lab import measurements
from gemmery.lab.backend import Opponent, Runnable, Stage
from gemmery.lab.session import Session
from gemmery.ladder.rung import Rung, find

PRODUCT = "gm.matmul"
ONE_THREAD = "gm.matmul on one thread"


@dataclass(frozen=True)
class Task:
    """One product of a suite: who multiplies it, on how many threads, and in how many seconds together."""

    suite: str
    work: Work
    labels: tuple[str, ...]  # of rungs; () for the product
    threads: int  # 0 on a GPU
    rivals: Sequence[Opponent]
    seconds: float


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
    known = tuple(rung.space) if rung else ("threads",)
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
    backend, work = session.backend, task.work
    stage = stage or backend.stage(work)
    rows: dict[str, Measurement] = {}
    contestants: list[Contestant] = []
    labels = task.labels or (PRODUCT,)
    for label in labels:
        config = (contender := entrant(label, backend.ladder)).config
        rows[label] = backend.blank(task.suite, label, work, task.threads, config=config)
        try:
            entry = _entry(stage, contender, task.threads)
            rows[label] = replace(rows[label], note=entry.note, **_checked(entry))
            contestants.append(Contestant(label, entry.sampler()))
        except GemmeryError as refused:
            rows[label] = replace(rows[label], refused=str(refused))
        if limits:
            backend.limits(rows[label], session.begin)
    if task.threads > 1 and limits and not task.labels and contestants:
        contestants.append(Contestant(ONE_THREAD, stage.product({}, 1).sampler()))
    for rival in task.rivals:
        rows[rival.name] = backend.blank(task.suite, rival.name, work, task.threads)
        try:
            entry = stage.rival(rival)
            rows[rival.name] = replace(rows[rival.name], note=entry.note)
            contestants.append(Contestant(rival.name, entry.sampler()))
        except RefusedError as refused:
            rows[rival.name] = replace(rows[rival.name], refused=str(refused))
    if contestants:
        comparison, clock = session.compare(contestants, task.seconds, task.threads)
        for name, times in comparison.timings.items():
            if name in rows:
                versus = comparison.ratios(name) if task.labels or name in labels else None
                timed = session.timed if limits else measurements.timed
                rows[name] = replace(timed(rows[name], times, versus), clock_mhz=clock)
    return list(rows.values())


def _entry(stage: Stage, entrant: Entrant, threads: int) -> Runnable:
    """Return a contestant of a suite on the operands. Raises RefusedError if it does not take them."""
    if entrant.rung is None:
        return stage.product(entrant.config, threads)
    return stage.rung(entrant.rung, {**entrant.rung.default, **entrant.config}, threads)


def _checked(entry: Runnable) -> dict[str, Any]:
    """Check one product; return what its record keeps of that."""
    return {} if entry.error is None else {"error": entry.error(), "checked": True}
