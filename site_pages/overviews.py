"""Runs of suites in brief: how the product compares with the fastest rival, a row for each suite."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from gemmery_emulator.pages import numerals
from gemmery_lab.measure.processes import COMPARED
from gemmery_lab.measure.record import Measurement, Run
from gemmery_lab.report import words
from gemmery_lab.report.sheet import Cell, Sheet
from gemmery_lab.report.suite_tables import OWN, product, standing, tournaments

STATES = (
    "nothing compiled",
    "kernels cached",
    "kernels cached, after the first product",
    "all shapes met before",
    "kernels cached, the longest call",
)
OVERVIEW = ("suite", "products", "min", "median", "max", "% of peak", "slower than the fastest rival")


def _over_fastest(measurement: Measurement) -> tuple[float, float] | None:
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
        if m.kernel == OWN and m.seconds and m.case not in cases and _over_fastest(m):
            apart = (m.precision or m.dtype) if m.unit else words.cores(m.threads)
            apart = STATES[COMPARED.index(m.case)] if m.case in COMPARED else apart
            groups.setdefault((m.suite, apart), []).append(m)
    names = [suite for suite, _ in groups]
    rows = []
    for (suite, apart), same in groups.items():
        stand = [(m, over) for m in same if (over := _over_fastest(m))]
        shares = [part for m in same if (part := words.share(m)) is not None]
        slower = [f"{product(m)} ({numerals.times(*over)})" for m, over in stand if standing(*over) == "bad"]
        texts = [about.get(suite, suite) + (f" ({apart})" if names.count(suite) > 1 else ""), str(len(stand))]
        texts += [numerals.times(of([ratio for _, (ratio, _) in stand])) for of in (min, statistics.median, max)]
        texts.append(f"{numerals.percent(min(shares))} to {numerals.percent(max(shares))}" if shares else "")
        rows.append(tuple(map(Cell, (*texts, "; ".join(slower) or "none"))))
    return Sheet("How it compares", OVERVIEW, tuple(rows), sentences=(len(OVERVIEW) - 1,))


def brief_overview(run: Run, about: Mapping[str, str]) -> Sheet:
    """Return the overview without the number of products and without those that are slower.

    >>> brief_overview(run, {"small": "Small squares"}).head  # doctest: +SKIP
    ('suite', 'min', 'median', 'max', '% of peak')
    """
    full = overview(run, about)
    return Sheet(full.title, (OVERVIEW[0], *OVERVIEW[2:6]), tuple((row[0], *row[2:6]) for row in full.rows))
