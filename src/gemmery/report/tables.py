"""A run as sheets: those of each experiment, by the kind of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemmery import experiments
from gemmery.bench.record import Machine, Measurement, Run
from gemmery.experiments import LADDER, Experiment, TableKind
from gemmery.ladder.rung import Rung
from gemmery.report.doubts import weighed
from gemmery.report.first_call import has_pieces, of_first_calls
from gemmery.report.new_shapes import is_total, of_new_shapes
from gemmery.report.sheet import Group, Sheet, by_block, by_size, groups, is_square, ladder_sheet, other_shapes
from gemmery.report.suites import by_case, products
from gemmery.report.sweeps import by_config, by_key, by_side


@dataclass(frozen=True)
class Records:
    """The records of one experiment in a run; `rungs` are those of the ladder."""

    experiment: Experiment
    measurements: tuple[Measurement, ...]
    machine: Machine
    rungs: Sequence[Rung]


def parts(run: Run, rungs: Sequence[Rung]) -> tuple[Records, ...]:
    """Return the records of a run by experiment, in order of appearance."""
    by_suite: dict[str, list[Measurement]] = {}
    for m in run.measurements:
        by_suite.setdefault(m.suite, []).append(m)
    return tuple(Records(experiments.find(suite), tuple(same), run.machine, rungs) for suite, same in by_suite.items())


def ladder_groups(run: Run, rungs: Sequence[Rung]) -> tuple[Group, ...]:
    """Return the problems of the ladder in a run, () if it has none of its records."""
    return groups((m for m in run.measurements if experiments.of(m) is LADDER), rungs)


def sheets(run: Run, rungs: Sequence[Rung]) -> tuple[Sheet, ...]:
    """Return a run as sheets: one for each problem of the ladder, each sweep, or each suite.

    >>> [sheet.title for sheet in sheets(run, CPU)]  # doctest: +SKIP
    ['n = 512, f32', 'n = 1024, f32']
    """
    return tuple(sheet for records in parts(weighed(run), rungs) for sheet in _sheets(records))


def _sheets(records: Records) -> Sequence[Sheet]:
    kind = records.experiment.table
    return SHEETS[_resembled(records.measurements) if kind is TableKind.ANY_SUITE else kind](records)


def _resembled(measurements: Sequence[Measurement]) -> TableKind:
    """Return the table of the suites whose records look like these, which are of a suite that has no file here."""
    if has_pieces(measurements):
        return TableKind.FIRST_PRODUCTS
    if any(is_total(m) for m in measurements):
        return TableKind.NEW_SHAPES
    return TableKind.PRODUCTS if any(m.flops for m in measurements) else TableKind.BY_CASE


def _ladder(records: Records) -> Sequence[Sheet]:
    """A sheet for each square, then one for all other problems."""
    problems, rungs = groups(records.measurements, records.rungs), records.rungs
    others = [group for group in problems if not is_square(group.one)]
    squares = [ladder_sheet(group, rungs, records.machine) for group in problems if is_square(group.one)]
    return [*squares, *([other_shapes(others, rungs)] if others else [])]


def _first_products(records: Records) -> Sequence[Sheet]:
    """First products with their pieces, which records of earlier versions do not have."""
    show = of_first_calls if has_pieces(records.measurements) else products
    return show(records.experiment.heading, records.measurements)


SHEETS: dict[TableKind, Callable[[Records], Sequence[Sheet]]] = {
    TableKind.LADDER: _ladder,
    TableKind.BY_SIZE: lambda records: [by_size(records.measurements)],
    TableKind.BY_BLOCK: lambda records: [by_block(records.measurements, records.machine)],
    TableKind.BY_KEY: lambda records: [by_key(records.measurements, records.experiment)],
    TableKind.BY_CONFIG: lambda records: [by_config(records.measurements, records.experiment)],
    TableKind.BY_SIDE: lambda records: [by_side(records.measurements, records.experiment)],
    TableKind.PRODUCTS: lambda records: products(records.experiment.heading, records.measurements),
    TableKind.FIRST_PRODUCTS: _first_products,
    TableKind.NEW_SHAPES: lambda records: [of_new_shapes(records.experiment.heading, records.measurements)],
    TableKind.BY_CASE: lambda records: [by_case(records.experiment.heading, records.measurements)],
}
