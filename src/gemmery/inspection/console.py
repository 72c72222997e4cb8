"""Inspections in a terminal."""

from __future__ import annotations

from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.inspection import counters, side_by_side
from gemmery.inspection.records import Inspection, SideBySide
from gemmery.inspection.sections import SOURCE, Section, codes, sections, subject

STYLES = {"": "dim", side_by_side.FEWER: "green", side_by_side.MORE: "yellow", side_by_side.DIFFERS: "bold"}


def show_inspection(inspection: Inspection, console: Console, ptx: bool = False, sass: bool = False) -> None:
    """Print an inspection, and the requested code."""
    console.print(Text.assemble((inspection.rung, "bold"), (f": {inspection.idea}", "dim")))
    console.print(Text(subject(inspection), style="dim"))
    for section in sections(inspection):
        fitted = _fitted(section, console.width)
        _show(fitted, _table(fitted), console)
    for title, text in codes(inspection, ptx, sass):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Text(text), soft_wrap=True)


def show_side_by_side(pair: SideBySide, console: Console) -> None:
    """Print the facts of both, with the differences in colour."""
    console.print(Text(side_by_side.title(pair), style="bold"))
    console.print(Text(subject(pair.new, config=False), style="dim"))
    for inspection in (pair.old, pair.new):
        console.print(Text.assemble((f"{inspection.rung}: ", "dim"), inspection.idea))
    if glance := side_by_side.glance(pair):
        console.print(Text(glance))
    for section in side_by_side.sections(pair):
        _show(section, _two_columns(section), console)


def _show(section: Section, table: Table, console: Console) -> None:
    console.print()
    console.print(Text(section.title, style="bold"))
    console.print(table)
    for note in section.notes:
        console.print(Text(note, style="dim"))


def _fitted(section: Section, width: int) -> Section:
    """Counters cut to the columns of a terminal; any other section as it is."""
    if SOURCE not in section.head:
        return section
    head, rows, note = counters.fitted(section.head, section.rows, width - 2)  # the table's edges
    return replace(section, head=head, rows=rows, notes=(*section.notes, *filter(None, [note])))


def _table(section: Section) -> Table:
    rows, head = section.rows, section.head
    gap = 1 if head[:1] == counters.HEAD[:1] else 2
    table = Table(box=box.SIMPLE_HEAD if head else None, show_header=bool(head), padding=(0, gap, 0, 0))
    for index in range(len(rows[0]) if rows else len(head)):
        name = head[index] if head else ""
        left = index == 0 or not head or name == SOURCE
        table.add_column(name, justify="left" if left else "right", no_wrap=index == 0 or bool(head), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style="dim" if index == 0 else "") for index, cell in enumerate(row)))
    return table


def _two_columns(section: Section) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in section.head:
        table.add_column(name, justify="right" if name and section.numbers else "left", overflow="fold")
    for (name, old, new, *ratio), mark in zip(section.rows, section.marks, strict=True):
        table.add_row(Text(name, style="dim"), old, Text(new, style=STYLES[mark]), *ratio)
    return table
