"""A run as sheets, those of each experiment by the kind of its table, and as Markdown; a ladder also in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gemmery.ladder.rung import Rung
from gemmery_emulator.pages import numerals
from gemmery_lab import experiments
from gemmery_lab.experiments import LADDER, Experiment, TableKind
from gemmery_lab.measure.record import MachineRecord, Measurement, Run
from gemmery_lab.report import suite_tables, sweep_tables, words
from gemmery_lab.report.sheet import (
    Cell,
    Columns,
    Sheet,
    bandwidth,
    error,
    limits,
    measured,
    rate,
    share,
    table,
    tabulate,
)
from gemmery_lab.report.words import (
    Group,
    banner,
    doubts,
    gain,
    groups,
    is_square,
    label,
    largest,
    rival,
    speedup,
    weighed,
)

IDEA = "what it changed"


def square(group: Group, rungs: Sequence[Rung], machine: MachineRecord) -> Sheet:
    """Return one problem: all rungs, then the rivals."""
    by_name, parents = {rung.name: rung for rung in rungs}, {rung.name: rung.parent for rung in rungs}
    unit, scale = words.tick(group.first)
    best, against = max((m.gflops for m in group.all), default=0.0), rival(group)

    def name(m: Measurement) -> Cell:
        return Cell(label(m, group), tone="faint" if m.refused else "best" if m.gflops == best else "")

    def idea(m: Measurement) -> Cell:
        return Cell(by_name[m.kernel].idea if m.kernel in by_name else m.note or machine.blas, tone="faint")

    columns = [
        ("rung", name),
        (IDEA, idea),
        *measured(
            [
                (unit, lambda m: numerals.digits(m.seconds * scale)),
                (words.rate(group.first), rate),
                ("% of peak", share),
                ("× parent", lambda m: gain(m, parents.get(m.kernel), group)),
                (f"× {words.versioned(against, group.rivals)}", lambda m: gain(m, against, group)),
                ("error/bound", error),
            ]
        ),
    ]
    notes = [limits(group.every)]
    for m in group.every:
        if m.refused:
            notes.append(f"{label(m, group)} did not run: {m.refused}")
        elif m.note and m.kernel in by_name:
            notes.append(f"{label(m, group)}: {m.note}")
    title = f"{words.shape(group.first)}, {words.types(group.first)}"
    return tabulate(title, columns, group.every, [*notes, _of_other_types(group, rungs)], aside=True)


def other_shapes(problems: Sequence[Group], rungs: Sequence[Rung]) -> Sheet:
    """Return problems that are not squares, and problems that one rung is meant for, with their bandwidth."""
    ideas = {rung.name: rung.idea for rung in rungs} | {m.kernel: m.note for group in problems for m in group.rivals}
    parents = {rung.name: rung.parent for rung in rungs}
    rows = [m for group in problems for m in group.every]
    at = {id(m): group for group in problems for m in group.every}
    first, against = problems[0].first, rival(problems[0])
    unit, scale = words.tick(first)
    columns: Columns[Measurement] = [
        ("rung", lambda m: label(m, at[id(m)])),
        (IDEA, lambda m: Cell(ideas.pop(m.kernel, ""), tone="faint")),  # shown once
        ("shape", words.shape),
        *measured(
            [
                (unit, lambda m: numerals.digits(m.seconds * scale)),
                (words.rate(first), rate),
                ("GB/s", bandwidth),
                (f"× {words.versioned(against, rows)}", lambda m: gain(m, against, at[id(m)])),
                ("× parent", lambda m: gain(m, parents.get(m.kernel), at[id(m)])),
                ("error/bound", error),
            ]
        ),
    ]
    refusals = [f"{label(m, at[id(m)])} did not run at {words.shape(m)}: {m.refused}" for m in rows if m.refused]
    measurements = [m for group in problems for m in group.all]
    return tabulate(f"Other shapes, {words.types(first)}", columns, rows, [limits(measurements), *refusals], aside=True)


def _of_other_types(group: Group, rungs: Sequence[Rung]) -> str:
    """The rungs left out because they are for other element types."""
    ran, dtype = {m.kernel for m in group.rungs}, group.first.dtype
    others = [
        f"{rung.name} ({', '.join(rung.dtypes)})" for rung in rungs if rung.name not in ran and dtype not in rung.dtypes
    ]
    return f"not for {dtype}: {', '.join(others)}" if others else ""


class Branch(NamedTuple):
    """A rung and the branches below it."""

    rung: Rung
    below: tuple[Branch, ...]


def tree(rungs: Sequence[Rung]) -> tuple[Branch, ...]:
    """Return the rungs as a tree, in their order; a rung whose parent is missing is at the top."""
    names = {rung.name for rung in rungs}
    children: dict[str, list[Rung]] = {}
    for rung in rungs:
        children.setdefault(rung.parent if rung.parent and rung.parent in names else "", []).append(rung)

    def under(name: str) -> tuple[Branch, ...]:
        return tuple(Branch(rung, under(rung.name)) for rung in children.get(name, ()))

    return under("")


def walk(branches: Sequence[Branch], depth: int = 0) -> Iterator[tuple[int, Rung]]:
    """Yield each rung after its parent, with its depth in the tree."""
    for branch in branches:
        yield depth, branch.rung
        yield from walk(branch.below, depth + 1)


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
    kinds = ((records, records.experiment.table) for records in run.parts)
    return tuple(
        sheet
        for of, kind in kinds
        for sheet in SHEETS[_resembled(of.measurements) if kind is TableKind.ANY_SUITE else kind](of)
    )


def _resembled(measurements: Sequence[Measurement]) -> TableKind:
    """Return the table of the suites whose records look like these, which are of a suite that has no file here."""
    if suite_tables.has_pieces(measurements):
        return TableKind.FIRST_PRODUCTS
    if any(suite_tables.is_of_model(m) for m in measurements):
        return TableKind.TOKENS
    if any(suite_tables.is_total(m) for m in measurements):
        return TableKind.NEW_SHAPES
    return TableKind.PRODUCTS if any(m.flops for m in measurements) else TableKind.BY_CASE


def _ladder(records: Records) -> Sequence[Sheet]:
    """A sheet for each square, then one for all other problems."""
    squares = [group for group in records.problems if is_square(group.first)]
    others = [group for group in records.problems if group not in squares]
    sheets = [square(group, records.rungs, records.machine) for group in squares]
    return [*sheets, *([other_shapes(others, records.rungs)] if others else [])]


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
    TableKind.TOKENS: lambda of: [suite_tables.tokens(of.experiment.heading, of.measurements)],
    TableKind.BY_CASE: lambda of: suite_tables.by_case(of.experiment.heading, of.measurements),
}


def over_fastest(measurement: Measurement, group: Group) -> tuple[Measurement, tuple[float, float]] | None:
    """Return the fastest rival of a problem and (speed-up over it, spread); None if no rival ran.

    A rival that ran with several numbers of threads may be faster with fewer of them. The spread is the one of the
    turns that the rung and the rival took with the same number of threads.
    """
    ran = [m for m in group.rivals if m.seconds]
    if not ran or not measurement.seconds:
        return None
    fastest = min(ran, key=lambda m: m.seconds)
    spread = (speedup(measurement, fastest.kernel, group) or (0.0, 0.0))[1]
    return fastest, (fastest.seconds / measurement.seconds, spread)


def summary(results: Results) -> str:
    """Return the largest square of a ladder in one line; "" for other runs and for unreliable figures.

    >>> summary(results(run, CPU))  # doctest: +SKIP
    'n = 2048, f32: packed_threaded reaches 351 GFLOP/s, 78.0% of the peak, 0.94× NumPy; largest step: packed, 7.5×'
    """
    squares = [group for group in results.problems if is_square(group.first)]
    ran = [m for m in largest(squares).rungs if m.seconds] if squares else []
    if not ran or doubts(results.run):
        return ""
    group, parents = largest(squares), {rung.name: rung.parent or "" for rung in results.rungs}
    best = max(ran, key=lambda m: m.gflops)
    line = f"{words.shape(best)}, {words.types(best)}: {best.kernel} reaches "
    line += f"{numerals.digits(words.reached(best))} {words.rate(best)}"
    if part := words.share(best):
        line += f", {numerals.percent(part)} of the peak"
    if over := over_fastest(best, group):
        line += f", {numerals.times(*over[1])} {label(over[0], group)}"
    if steps := [(gain[0], m) for m in ran if (gain := speedup(m, parents[m.kernel], group))]:
        step, m = max(steps, key=lambda pair: pair[0])
        line += f"; largest step: {m.kernel}, {numerals.times(step)} {parents[m.kernel]}"
    return line


def markdown(run: Run, rungs: Sequence[Rung] = ()) -> str:
    """Return a run as Markdown: the machine, then a table for each sheet.

    >>> print(markdown(run, CPU))  # doctest: +SKIP
    # The ladder
    ...
    """
    parts = [f"# {words.title(run)}\n", f"{words.machine(run.machine)}. Measured {words.when(run)}.\n"]
    parts += [f"**{warning}**\n"] if (warning := banner(run)) else []
    parts += [f"## {sheet.title}\n\n{table(sheet)}" for sheet in sheets(run, rungs)]
    return "\n".join(parts)
