"""The ladder as sheets, a sheet for each square and one for all other shapes, and as a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gemmery.bench.record import MachineRecord, Measurement
from gemmery.ladder.rung import Rung
from gemmery.pages import numerals
from gemmery.report import words
from gemmery.report.problems import Group, gain, label, rival
from gemmery.report.sheet import Cell, Columns, Sheet, bandwidth, error, limits, measured, rate, share, tabulate

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
