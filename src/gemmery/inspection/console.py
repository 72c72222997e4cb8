"""Inspections in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from gemmery.emulation.terminal_tables import show_pair, show_section
from gemmery.inspection import side_by_side
from gemmery.inspection.records import AnyInspection, AnyPair
from gemmery.inspection.sections import codes, sections, subject


def show_inspection(inspection: AnyInspection, console: Console, ptx: bool = False, sass: bool = False) -> None:
    """Print an inspection, and the requested code."""
    console.print(Text.assemble((inspection.rung, "bold"), (f": {inspection.idea}", "dim")))
    console.print(Text(subject(inspection), style="dim"))
    for section in sections(inspection):
        show_section(section, console)
    for title, text in codes(inspection, ptx, sass):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Text(text), soft_wrap=True)


def show_side_by_side(pair: AnyPair, console: Console) -> None:
    """Print the facts of both, with the differences in colour."""
    console.print(Text(side_by_side.title(pair), style="bold"))
    console.print(Text(subject(pair.new, config=False), style="dim"))
    for inspection in (pair.old, pair.new):
        console.print(Text.assemble((f"{inspection.rung}: ", "dim"), inspection.idea))
    if glance := side_by_side.glance(pair):
        console.print(Text(glance))
    for section in side_by_side.sections(pair):
        show_pair(section, console)
