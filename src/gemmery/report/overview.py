"""The product against its rivals: for each suite, the ratio to the fastest rival on each problem."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from gemmery.bench.new_shapes import COMPARED
from gemmery.bench.record import Measurement, Run
from gemmery.report import words
from gemmery.report.sheet import Cell, Sheet
from gemmery.report.suite_tables import OWN, product, standing, tournaments

HEAD = ("suite", "products", "min", "median", "max", "% of peak", "slower than the fastest rival")


def fastest(measurement: Measurement) -> tuple[float, float] | None:
    """Return (ratio, spread) to the fastest rival on this problem, None when no rival ran."""
    rivals = [name for name in words.RIVALS if name in measurement.versus and not name.startswith(OWN)]
    return min(((measurement.versus[name], measurement.spread.get(name, 0.0)) for name in rivals), default=None)


def overview(run: Run, about: Mapping[str, str]) -> Sheet:
    """Return a table with a row for each suite and number of threads, on a GPU for each suite and element type.

    `about` maps a suite to what it multiplies.
    """
    cases = tournaments(run.measurements)
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in run.measurements:
        if m.kernel == OWN and m.seconds and m.case not in cases and fastest(m):
            apart = (m.precision or m.dtype) if m.unit else words.cores(m.threads)
            apart = m.case if m.case in COMPARED else apart
            groups.setdefault((m.suite, apart), []).append(m)
    names = [suite for suite, _ in groups]
    rows = [
        _row(about.get(suite, suite) + (f" ({apart})" if names.count(suite) > 1 else ""), same)
        for (suite, apart), same in groups.items()
    ]
    return Sheet("How it compares", HEAD, tuple(rows))


def summary(run: Run, about: Mapping[str, str]) -> Sheet:
    """Return the overview without the number of products and without those that are slower.

    >>> summary(run, {"small": "Small squares"}).head  # doctest: +SKIP
    ('suite', 'min', 'median', 'max', '% of peak')
    """
    full = overview(run, about)
    return Sheet(full.title, (HEAD[0], *HEAD[2:6]), tuple((row[0], *row[2:6]) for row in full.rows))


def _row(what: str, measurements: Sequence[Measurement]) -> tuple[Cell, ...]:
    stand = [(m, over) for m in measurements if (over := fastest(m))]
    ratios = [ratio for _, (ratio, _) in stand]
    shares = [part for m in measurements if (part := words.share(m)) is not None]
    slower = [f"{product(m)} ({words.times(*over)})" for m, over in stand if standing(*over) == "bad"]
    return (
        Cell(what),
        Cell(str(len(stand))),
        *(Cell(words.times(value)) for value in (min(ratios), statistics.median(ratios), max(ratios))),
        Cell(f"{words.percent(min(shares))} to {words.percent(max(shares))}" if shares else ""),
        Cell("; ".join(slower) or "none"),
    )
