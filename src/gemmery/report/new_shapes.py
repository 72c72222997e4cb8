"""Records of products of new shapes as sheets."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.new_shapes import CASES, FIRST, REST, WORST
from gemmery.bench.record import Measurement
from gemmery.report import words
from gemmery.report.sheet import Cell, Sheet


def is_total(measurement: Measurement) -> bool:
    """Return True for the record of all products of new shapes in one state of the cache."""
    return measurement.case in CASES


def of_new_shapes(heading: str, measurements: Sequence[Measurement]) -> Sheet:
    """Return a row for each element type, number of threads and state of the cache, with the rival's total."""
    by_key = {(m.kernel, m.dtype, m.threads, m.case): m for m in measurements}
    rows, notes = [], []
    names = list(dict.fromkeys(m.kernel for m in measurements if m.kernel in words.RIVALS and m.seconds))
    for m in measurements:
        if m.refused:
            notes.append(f"{words.kernel(m.kernel)} did not run: {m.refused}")
        if not is_total(m):
            continue
        parts = {part: by_key.get((m.kernel, m.dtype, m.threads, f"{m.case}, {part}")) for part in (FIRST, WORST, REST)}
        rest = parts[REST] or m
        theirs = [by_key.get((name, m.dtype, m.threads, "")) for name in names]
        where = f", {words.cores(m.threads)}" if m.threads else ""
        rows.append(
            (
                Cell(f"{m.dtype}{where}, {m.case}"),
                Cell(words.duration(m.seconds)),
                *(Cell(words.duration(one.seconds) if (one := parts[part]) else "") for part in (FIRST, WORST)),
                *(Cell(words.duration(one.seconds) if one else "") for one in theirs),
                *(Cell(_ratio(m, name)) for name in names),
                *(Cell(_ratio(rest, name)) for name in names),
            )
        )
    one = measurements[0]
    head = ("products", "all", f"of it the {FIRST}", WORST, *map(words.kernel, names))
    ratios = (f"× {words.kernel(name)}" for name in names), (f"× {words.kernel(name)}, {REST}" for name in names)
    title = f"{heading}: {one.batch} products with sides up to {one.m}"
    return Sheet(title, (*head, *ratios[0], *ratios[1]), tuple(rows), tuple(dict.fromkeys(notes)))


def _ratio(m: Measurement, rival: str) -> str:
    return words.times(m.versus.get(rival), m.spread.get(rival, 0.0))
