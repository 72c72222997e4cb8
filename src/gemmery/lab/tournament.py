"""Rungs against each other on products of a suite, each named with its config."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gemmery
from gemmery import arrays, dtypes
from gemmery.bench import timing
from gemmery.bench.record import Measurement
from gemmery.bench.rival_process import RivalProcess
from gemmery.bench.timing import Contestant
from gemmery.bench.work import Work, operands
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.lab import results
from gemmery.lab.level import Ready, refusal
from gemmery.lab.session import CpuSession
from gemmery.lab.threads import in_force, on
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Rung, find

PRODUCT = "gm.matmul"


@dataclass(frozen=True)
class Entrant:
    """A contestant named by a suite: a rung with its config, or (`rung` None) the product with its options."""

    label: str
    rung: Rung | None
    config: dict[str, int]


def entrant(label: str, ladder: tuple[Rung, ...] = CPU) -> Entrant:
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


def tournament(
    session: CpuSession,
    name: str,
    work: Work,
    labels: Sequence[str],
    threads: int,
    rivals: Sequence[RivalProcess],
    seconds: float,
) -> list[Measurement]:
    """Check the named rungs on one product, time them in turn with each rival, and return the records.

    `versus` of a record has its ratio to each other one.
    """
    limits = session.limits(work.dtype, threads)
    given = operands(work)
    rows: dict[str, Measurement] = {}
    contestants = []
    for one in map(entrant, labels):
        rows[one.label] = results.blank(name, one.label, work, threads, config=one.config)
        try:
            sample, error = _ready(one, work, given, threads)
        except GemmeryError as refused:
            rows[one.label] = replace(rows[one.label], refused=str(refused))
            continue
        rows[one.label] = replace(rows[one.label], error=error, checked=True)
        contestants.append(Contestant(one.label, on(threads, sample)))
    for rival in rivals:
        try:
            note = "; ".join(filter(None, (rival.prepare(work), rival.runs)))
            rows[rival.name] = results.blank(name, rival.name, work, threads, note=note)
            contestants.append(rival.contestant)
        except RefusedError as refused:
            rows[rival.name] = results.blank(name, rival.name, work, threads, refused=str(refused))
    if not contestants:
        return list(rows.values())
    found = timing.compare(contestants, seconds, timing.IDLE_SECONDS if threads > 1 else 0.0)
    for label in found.timings:
        rows[label] = results.timed(rows[label], found.timings[label], limits, found.ratios(label))
    return list(rows.values())


def _ready(one: Entrant, work: Work, given: tuple[Any, Any, Any], threads: int) -> tuple[timing.Sample, float]:
    """Return a sampler of one entrant, and its error over its bound on the operands to be timed.

    Raises RefusedError with the rung's reason if it does not take this product.
    """
    a, b, c = given
    c.fill(np.nan if dtypes.get(work.out).kind in "fc" else 1)  # so that unwritten elements show
    if one.rung is None:
        product = functools.partial(gemmery.matmul, threads=one.config["threads"]) if one.config else gemmery.matmul
        with in_force(threads):
            product(a, b, out=c)
        return timing.products(product, a, b, c), results.error(c, a, b, float)
    reason = refusal(one.rung, work)
    if reason:
        raise RefusedError(f"rung {one.rung.name}: {reason}")
    x, y, z = (arrays.view(matrix if matrix.ndim == 3 else matrix[None]) for matrix in given)
    ready = Ready(one.rung.build(work.problem, {**one.rung.default, **one.config}), x, y, z, threads)
    ready.run()
    return timing.calls(ready.run), results.error(c, a, b, one.rung.bound, one.rung.normwise)
