"""A run as sheets, those of each experiment by the kind of its table, of which ladders and sweeps are here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gemmery import dtypes
from gemmery.ladder.rung import Rung
from gemmery_emulator.pages import numerals
from gemmery_lab import experiments
from gemmery_lab.experiments import ANY_SUITE, LADDER, Axis, Experiment
from gemmery_lab.measure.processes import CASES, PIECES
from gemmery_lab.measure.record import MachineRecord, Measurement, Run
from gemmery_lab.report import sheet, suite_tables, words
from gemmery_lab.report.sheet import ByKernel, Cell, Columns, Sheet, tabulate
from gemmery_lab.report.words import Group, gain, groups, is_square, label, rival, weighed

IDEA = "what it changed"
BLOCK = 1024  # threads: CUDA Programming Guide, "Technical Specifications per Compute Capability"


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
        *sheet.measured(
            (unit, _time(scale)),
            (words.rate(group.first), sheet.rate),
            ("% of peak", sheet.share),
            ("× parent", lambda m: gain(m, parents.get(m.kernel), group)),
            (f"× {words.versioned(against, group.rivals)}", lambda m: gain(m, against, group)),
            ("error/bound", sheet.error),
        ),
    ]
    notes = [sheet.limits(group.every)]
    for m in group.every:
        if m.refused:
            notes.append(f"{label(m, group)} did not run: {m.refused}")
        elif m.note and m.kernel in by_name:
            notes.append(f"{label(m, group)}: {m.note}")
    ran, dtype = {m.kernel for m in group.rungs}, group.first.dtype
    absent = (rung for rung in rungs if rung.name not in ran and dtype not in rung.dtypes)
    others = [f"{rung.name} ({', '.join(rung.dtypes)})" for rung in absent]
    notes += [f"not for {dtype}: {', '.join(others)}"] if others else []
    title = f"{words.shape(group.first)}, {words.types(group.first)}"
    return tabulate(title, columns, group.every, notes, aside=True)


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
        *sheet.measured(
            (unit, _time(scale)),
            (words.rate(first), sheet.rate),
            ("GB/s", sheet.bandwidth),
            (f"× {words.versioned(against, rows)}", lambda m: gain(m, against, at[id(m)])),
            ("× parent", lambda m: gain(m, parents.get(m.kernel), at[id(m)])),
            ("error/bound", sheet.error),
        ),
    ]
    refusals = [f"{label(m, at[id(m)])} did not run at {words.shape(m)}: {m.refused}" for m in rows if m.refused]
    notes = [sheet.limits(m for group in problems for m in group.all), *refusals]
    return tabulate(f"Other shapes, {words.types(first)}", columns, rows, notes, aside=True)


def along(measurements: Sequence[Measurement], axis: Axis) -> dict[str, list[Measurement]]:
    """The records of each rung and config by name, along the axis; the config is named where a rung has several."""
    variants: dict[str, list[Measurement]] = {}
    for kernel in dict.fromkeys(m.kernel for m in measurements):
        same = [m for m in measurements if m.kernel == kernel]
        keys = dict.fromkeys(key for m in same for key in m.config if key != axis.key)
        differing = [key for key in keys if len({m.config.get(key) for m in same}) > 1]
        for m in sorted(same, key=lambda m: axis.of(m) or 0):
            config = "".join(f", {key} {m.config[key]}" for key in differing if key in m.config)
            variants.setdefault(f"{words.kernel(kernel)}{config}", []).append(m)
    return variants


def by_key(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return a row for each value of a key, for each rung."""
    axis, ran = experiment.axis, [m for m in measurements if m.seconds]
    best = {m.kernel: min(other.seconds for other in ran if other.kernel == m.kernel) for m in ran}
    rival = next((name for m in ran for name in m.versus if name in words.RIVALS), "cublas")
    variants = along(measurements, axis)
    names = {id(m): name for name, same in variants.items() for m in same}

    columns = [
        ("rung", lambda m: names[id(m)]),
        (axis.label, lambda m: "" if axis.of(m) is None else str(axis.of(m))),
        *sheet.measured(
            ("ms", lambda m: sheet.entry(m, _time(1e3), best[m.kernel] if axis.of(m) else 0.0)),
            (words.rate(measurements[0]), sheet.rate),
            ("% of peak", sheet.share),
            (f"× {words.kernel(rival)}", lambda m: sheet.ratio(m, rival)),
            ("error/bound", sheet.error),
            absent="refused",
        ),
    ]
    rows = [m for same in variants.values() for m in same]
    notes = [sheet.limits(ran), *_refusals(variants, axis)]
    title = f"{experiment.title}, {words.shape(measurements[0])}, {words.types(measurements[0])}"
    return tabulate(title, columns, rows, notes)


def by_side(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return microseconds: a row for each variant, a column for each length."""
    axis, ran = experiment.axis, [m for m in measurements if m.seconds]
    own = [m for m in ran if m.kernel not in words.RIVALS]
    values = sorted({axis.of(m) or 0 for m in measurements})
    best = {value: sheet.least(m for m in own if axis.of(m) == value) for value in values}
    variants = along(measurements, axis)

    rows = [(name, {axis.of(m): m for m in same}) for name, same in variants.items()]
    columns: Columns[tuple[str, dict[int | None, Measurement]]] = [
        ("µs", lambda row: row[0]),
        *(
            (str(value), lambda row, value=value: sheet.entry(row[1].get(value), _time(1e6), best[value], "refused"))
            for value in values
        ),
    ]
    fixed = f"{'K' if axis.side == 'n' else 'N'} = {_fixed(measurements[0], axis)}"
    notes = [sheet.limits(ran), *_refusals(variants, axis)]
    return tabulate(f"{experiment.title}, {fixed}, {words.types(measurements[0])}", columns, rows, notes)


def by_config(measurements: Sequence[Measurement], experiment: Experiment) -> Sheet:
    """Return a row for each config of each exhibit, with its ratio to its parent."""
    columns = [
        ("exhibit", lambda m: m.kernel),
        (experiment.axis.label, lambda m: ", ".join(f"{key} {value}" for key, value in m.config.items())),
        *sheet.measured(
            ("time", lambda m: numerals.duration(m.seconds)),
            ("× parent", lambda m: next((sheet.ratio(m, parent) for parent in m.versus), "")),
            ("error/bound", sheet.error),
            absent="refused",
        ),
    ]
    notes = [f"{m.kernel} at {m.config}: {m.refused}" for m in measurements if m.refused]
    return tabulate(experiment.title, columns, measurements, notes)


def by_size(measurements: Sequence[Measurement]) -> Sheet:
    """Return rates: a row for each n, a column for each kernel."""
    rows = sheet.pivoted(sorted(measurements, key=lambda m: m.n), lambda m: m.n)
    columns: Columns[tuple[int, ByKernel]] = [("n", lambda row: str(row[0])), *sheet.kernels(rows, sheet.rate)]
    notes = sheet.not_run(measurements, lambda m: f"{m.kernel} at n = {m.n}")
    title = f"{words.rate(measurements[0])} against n, {words.types(measurements[0])}"
    return tabulate(title, columns, rows.items(), [sheet.limits(measurements), *notes])


def side(cache: int, dtype: str) -> float:
    """Return the side of the largest three square blocks that fit in a cache of so many bytes."""
    return math.sqrt(cache / (3 * dtypes.get(dtype).size))


def by_block(measurements: Sequence[Measurement], machine: MachineRecord) -> Sheet:
    """Return times by the side of a block, and the cache that three blocks fit into; rivals have no block."""
    best = sheet.least(m for m in measurements if "block" in m.config)
    caches = words.caches(machine)
    memory = "memory" if caches else ""  # the caches are not known while the table grows

    def blocked(of: Callable[[int], str]) -> Callable[[Measurement], str]:
        """A cell of the bytes of the three blocks that a blocked product works on."""
        bytes_of = 3 * dtypes.get(measurements[0].dtype).size
        return lambda m: of(bytes_of * m.config["block"] ** 2) if "block" in m.config else ""

    columns: Columns[Measurement] = [
        ("block", lambda m: str(m.config.get("block", words.kernel(m.kernel)))),
        ("three blocks", blocked(numerals.size)),
        ("fit in", blocked(lambda count: next((name for name, size in caches if count <= size), memory))),
        ("ms", lambda m: sheet.entry(m, _time(1e3), best if "block" in m.config else 0.0)),
        (words.rate(measurements[0]), sheet.rate),
        ("% of peak", sheet.share),
    ]
    rows = sorted(measurements, key=lambda m: m.config.get("block", math.inf))
    notes = sheet.not_run(measurements, lambda m: f"block {m.config.get('block', '')}")
    title = f"{words.shape(measurements[0])}, {words.types(measurements[0])}"
    return tabulate(title, columns, rows, [sheet.limits(measurements), *notes])


def _time(scale: float) -> Callable[[Measurement], str]:
    return lambda m: numerals.digits(m.seconds * scale)


def _refusals(variants: Mapping[str, Sequence[Measurement]], axis: Axis) -> Iterator[str]:
    """Yield the reasons why lines were not run, each once with the values that share it."""
    for name, every in variants.items():
        reasons: dict[str, list[Measurement]] = {}
        for m in every:
            if m.refused:
                reasons.setdefault(re.sub(r"\d+", "", m.refused), []).append(m)
        for same in reasons.values():
            values = [str(value) for m in same if (value := axis.of(m)) is not None]
            where = f" at {', '.join(values)}" if values else ""
            yield f"{name}{where}: {same[0].refused}"


def marks(measurements: Sequence[Measurement], axis: Axis, machine: MachineRecord) -> tuple[tuple[float, str], ...]:
    """The limits of the device as places on the axis and their names."""
    if axis.threads:  # a config that does not fit for another reason is refused with it
        return ((BLOCK ** (1 / axis.threads), f"{BLOCK:,} threads, the limit of a block"),)
    if not (axis.side and machine.gpu.l2):
        return ()
    fills = machine.gpu.l2 / (_fixed(measurements[0], axis) * dtypes.get(measurements[0].dtype).size)
    return ((fills, f"W fills L2, {numerals.size(machine.gpu.l2)}"),)


def _fixed(m: Measurement, axis: Axis) -> int:
    """The side of the matrix that is not varied, which another run may have fixed elsewhere."""
    return m.k if axis.side == "n" else m.n


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
    """A run in the parts that reports show; ratios are ties if its figures are unreliable."""

    run: Run
    rungs: Sequence[Rung]
    parts: tuple[Records, ...]

    @property
    def problems(self) -> tuple[Group, ...]:
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
    """Return a run as sheets: one for each problem of the ladder, each sweep, or each suite."""
    parts = results(run, rungs).parts
    kinds = (_resembled(of.measurements) if of.experiment.table == ANY_SUITE else of.experiment.table for of in parts)
    return tuple(table for of, kind in zip(parts, kinds, strict=True) for table in SHEETS[kind](of))


def _resembled(measurements: Sequence[Measurement]) -> str:
    """Return the table of the suites whose records look like these, which are of a suite that has no file here."""
    if any(m.case in PIECES for m in measurements):
        return "first_products"
    if any(suite_tables.is_of_model(m) for m in measurements):
        return "tokens"
    if any(m.case in CASES for m in measurements):
        return "new_shapes"
    return "products" if any(m.flops for m in measurements) else "by_case"


def _ladder(records: Records) -> Sequence[Sheet]:
    """A sheet for each square, then one for all other problems."""
    squares = [group for group in records.problems if is_square(group.first)]
    others = [group for group in records.problems if group not in squares]
    sheets = [square(group, records.rungs, records.machine) for group in squares]
    return [*sheets, *([other_shapes(others, records.rungs)] if others else [])]


SHEETS: dict[str, Callable[[Records], Sequence[Sheet]]] = {
    "ladder": _ladder,
    "by_size": lambda of: [by_size(of.measurements)],
    "by_block": lambda of: [by_block(of.measurements, of.machine)],
    "by_key": lambda of: [by_key(of.measurements, of.experiment)],
    "by_config": lambda of: [by_config(of.measurements, of.experiment)],
    "by_side": lambda of: [by_side(of.measurements, of.experiment)],
    "products": lambda of: suite_tables.products(of.experiment.heading, of.measurements),
    "first_products": lambda of: suite_tables.first_products(of.experiment.heading, of.measurements),
    "new_shapes": lambda of: suite_tables.new_shapes(of.experiment.heading, of.measurements),
    "tokens": lambda of: [suite_tables.tokens(of.experiment.heading, of.measurements)],
    "by_case": lambda of: suite_tables.by_case(of.experiment.heading, of.measurements),
}
