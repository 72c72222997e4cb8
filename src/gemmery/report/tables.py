"""A run as sheets: those of each experiment, by the kind of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemmery import experiments
from gemmery.bench.record import MachineRecord, Measurement, Run
from gemmery.experiments import LADDER, Experiment, TableKind
from gemmery.ladder.rung import Rung
from gemmery.report import ladder_tables, model_tables, suite_tables, sweep_tables
from gemmery.report.doubts import weighed
from gemmery.report.problems import Group, groups, is_square
from gemmery.report.sheet import Sheet


@dataclass(frozen=True)
class Records:
    """The records of one experiment in a run; `problems` are those of a ladder, () of others."""

    experiment: Experiment
    measurements: tuple[Measurement, ...]
    machine: MachineRecord
    rungs: Sequence[Rung]
    problems: tuple[Group, ...]


@dataclass(frozen=True)
class Results:
    """A run in the parts that reports show, grouped once; ratios are ties if its figures are unreliable."""

    run: Run
    rungs: Sequence[Rung]
    parts: tuple[Records, ...]

    @property
    def problems(self) -> tuple[Group, ...]:
        """The problems of the ladder."""
        return tuple(group for records in self.parts for group in records.problems)

    @property
    def climbed(self) -> tuple[Rung, ...]:
        """The rungs that took part in the ladder, in its order."""
        ran = {m.kernel for group in self.problems for m in group.rungs}
        return tuple(rung for rung in self.rungs if rung.name in ran)


def results(run: Run, rungs: Sequence[Rung] = ()) -> Results:
    """Return the records of a run by experiment, in order of appearance."""
    run = weighed(run)
    by_suite: dict[str, list[Measurement]] = {}
    for m in run.measurements:
        by_suite.setdefault(m.suite, []).append(m)
    parts = []
    for suite, same in by_suite.items():
        experiment = experiments.find(suite)
        problems = groups(same, rungs) if experiment is LADDER else ()
        parts.append(Records(experiment, tuple(same), run.machine, rungs, problems))
    return Results(run, rungs, tuple(parts))


def sheets(run: Run, rungs: Sequence[Rung]) -> tuple[Sheet, ...]:
    """Return a run as sheets: one for each problem of the ladder, each sweep, or each suite.

    >>> [sheet.title for sheet in sheets(run, CPU)]  # doctest: +SKIP
    ['n = 512, f32', 'n = 1024, f32']
    """
    return tabulated(results(run, rungs))


def tabulated(run: Results) -> tuple[Sheet, ...]:
    """Return the sheets of a run that has been grouped."""
    return tuple(sheet for records in run.parts for sheet in _sheets(records))


def _sheets(records: Records) -> Sequence[Sheet]:
    kind = records.experiment.table
    return SHEETS[_resembled(records.measurements) if kind is TableKind.ANY_SUITE else kind](records)


def _resembled(measurements: Sequence[Measurement]) -> TableKind:
    """Return the table of the suites whose records look like these, which are of a suite that has no file here."""
    if suite_tables.has_pieces(measurements):
        return TableKind.FIRST_PRODUCTS
    if any(model_tables.is_of_model(m) for m in measurements):
        return TableKind.TOKENS
    if any(suite_tables.is_total(m) for m in measurements):
        return TableKind.NEW_SHAPES
    return TableKind.PRODUCTS if any(m.flops for m in measurements) else TableKind.BY_CASE


def _ladder(records: Records) -> Sequence[Sheet]:
    """A sheet for each square, then one for all other problems."""
    squares = [group for group in records.problems if is_square(group.first)]
    others = [group for group in records.problems if group not in squares]
    sheets = [ladder_tables.square(group, records.rungs, records.machine) for group in squares]
    return [*sheets, *([ladder_tables.other_shapes(others, records.rungs)] if others else [])]


SHEETS: dict[TableKind, Callable[[Records], Sequence[Sheet]]] = {
    TableKind.LADDER: _ladder,
    TableKind.BY_SIZE: lambda of: [sweep_tables.by_size(of.measurements)],
    TableKind.BY_BLOCK: lambda of: [sweep_tables.by_block(of.measurements, of.machine)],
    TableKind.BY_KEY: lambda of: [sweep_tables.by_key(of.measurements, of.experiment)],
    TableKind.BY_CONFIG: lambda of: [sweep_tables.by_config(of.measurements, of.experiment)],
    TableKind.BY_SIDE: lambda of: [sweep_tables.by_side(of.measurements, of.experiment)],
    TableKind.PRODUCTS: lambda of: suite_tables.products(of.experiment.heading, of.measurements),
    TableKind.FIRST_PRODUCTS: lambda of: suite_tables.first_products(of.experiment.heading, of.measurements),
    TableKind.NEW_SHAPES: lambda of: suite_tables.new_shapes(of.experiment.heading, of.measurements),
    TableKind.TOKENS: lambda of: [model_tables.tokens(of.experiment.heading, of.measurements)],
    TableKind.BY_CASE: lambda of: suite_tables.by_case(of.experiment.heading, of.measurements),
}
