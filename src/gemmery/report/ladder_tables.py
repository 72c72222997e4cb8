"""The ladder as sheets: a sheet for each square, and one for all other shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from gemmery.bench.record import MachineRecord, Measurement
from gemmery.ladder.rung import Rung
from gemmery.report import words
from gemmery.report.problems import Group, label, rival, speedup
from gemmery.report.sheet import Cell, Columns, Sheet, error, limits, measured, rate, share, tabulate

IDEA = "what it changed"


def square(group: Group, rungs: Sequence[Rung], machine: MachineRecord) -> Sheet:
    """Return one problem: all rungs, then the rivals."""
    by_name = {rung.name: rung for rung in rungs}
    unit, scale = words.tick(group.first)
    every = (*group.rungs, *group.rivals)
    best = max((m.gflops for m in group.all), default=0.0)

    def name(m: Measurement) -> Cell:
        return Cell(label(m, group), tone="faint" if m.refused else "best" if m.gflops == best else "")

    def idea(m: Measurement) -> Cell:
        return Cell(by_name[m.kernel].idea if m.kernel in by_name else m.note or machine.blas, tone="faint")

    columns = [
        ("rung", name),
        (IDEA, idea),
        *measured(
            [
                (unit, lambda m: words.digits(m.seconds * scale)),
                (words.rate(group.first), rate),
                ("% of peak", share),
                ("× parent", over_parent(by_name, group)),
                over_rival(group),
                ("error/bound", error),
            ]
        ),
    ]
    notes = [limits(every)]
    for m in every:
        if m.refused:
            notes.append(f"{label(m, group)} did not run: {m.refused}")
        elif m.note and m.kernel in by_name:
            notes.append(f"{label(m, group)}: {m.note}")
    title = f"{words.shape(group.first)}, {words.types(group.first)}"
    return replace(tabulate(title, columns, every, [*notes, _of_other_types(group, rungs)]), aside=True)


def other_shapes(problems: Sequence[Group], rungs: Sequence[Rung]) -> Sheet:
    """Return problems that are not squares, and problems that one rung is meant for, with their bandwidth."""
    by_name = {rung.name: rung for rung in rungs}
    ideas = {rung.name: rung.idea for rung in rungs} | {m.kernel: m.note for group in problems for m in group.rivals}
    first = problems[0].first
    unit, scale = words.tick(first)
    sheets = []
    for group in problems:
        columns: Columns[Measurement] = [
            ("rung", partial(label, group=group)),
            (IDEA, lambda m: Cell(ideas.pop(m.kernel, ""), tone="faint")),  # shown once
            ("shape", words.shape),
            *measured(
                [
                    (unit, lambda m: words.digits(m.seconds * scale)),
                    (words.rate(first), rate),
                    ("GB/s", lambda m: words.digits(m.bytes / m.seconds / 1e9)),
                    (over_rival(problems[0])[0], over_rival(group, rival(problems[0]))[1]),
                    ("× parent", over_parent(by_name, group)),
                    ("error/bound", error),
                ]
            ),
        ]
        every = (*group.rungs, *group.rivals)
        notes = [f"{label(m, group)} did not run at {words.shape(m)}: {m.refused}" for m in every if m.refused]
        sheets.append(tabulate(f"Other shapes, {words.types(first)}", columns, every, notes))
    notes = [limits(m for group in problems for m in group.all), *(note for sheet in sheets for note in sheet.notes)]
    rows = tuple(row for sheet in sheets for row in sheet.rows)
    return replace(sheets[0], rows=rows, notes=tuple(filter(None, dict.fromkeys(notes))), aside=True)


def over_parent(by_name: dict[str, Rung], group: Group) -> Callable[[Measurement], str]:
    """Return the cell of the speed-up over a rung's parent."""

    def cell(m: Measurement) -> str:
        parent = by_name[m.kernel].parent if m.kernel in by_name else ""
        gain = speedup(m, parent, group) if parent else None
        return words.times(*gain) if gain else ""

    return cell


def over_rival(group: Group, against: str = "") -> tuple[str, Callable[[Measurement], str]]:
    """Return the column of the speed-up over the rival of a problem, or over another."""
    against = against or rival(group)
    return f"× {words.kernel(against)}", lambda m: words.times(*(speedup(m, against, group) or (None,)))


def _of_other_types(group: Group, rungs: Sequence[Rung]) -> str:
    """The rungs left out because they are for other element types."""
    ran, dtype = {m.kernel for m in group.rungs}, group.first.dtype
    others = [
        f"{rung.name} ({', '.join(rung.dtypes)})" for rung in rungs if rung.name not in ran and dtype not in rung.dtypes
    ]
    return f"not for {dtype}: {', '.join(others)}" if others else ""
