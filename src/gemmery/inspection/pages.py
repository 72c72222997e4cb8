"""Inspections in a terminal, and as self-contained HTML pages with all of the code and pictures of memory accesses."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from gemmery.emulation.kernel_run import paired_pictures
from gemmery.emulation.terminal_tables import show_pair, show_section
from gemmery.inspection import side_by_side
from gemmery.inspection.records import AnyInspection, AnyPair, Inspection
from gemmery.inspection.sections import codes, lesson, sections, subject, untraced


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


def inspection_page(inspection: AnyInspection) -> str:
    """The page of one rung or exhibit."""
    from gemmery.pages.pictures import pictures  # load matplotlib
    from gemmery.pages.rendering import render
    from gemmery.report.curves import roofline_plot

    counts, device, roofline = inspection.emulated, "the CPU", None
    if isinstance(inspection, Inspection):
        device = inspection.device.name
        roofline = roofline_plot(inspection.rung, device, inspection.loads, inspection.once)
    return render(
        "inspection.html",
        __package__,
        title=f"{inspection.rung} on {device}",
        inspection=inspection,
        lesson=lesson(inspection.rung),
        subject=subject(inspection),
        sections=sections(inspection),
        roofline=None if inspection.exhibit else roofline,
        plots=pictures(counts.chosen, counts.source) if counts else (),
        untraced=untraced(counts) if counts and counts.chosen.untraced else "",
        codes=codes(inspection),
    )


def side_by_side_page(pair: AnyPair) -> str:
    """The page of two, with the pictures of both."""
    from gemmery.pages.rendering import render

    return render(
        "side_by_side.html",
        __package__,
        title=side_by_side.title(pair),
        glance=side_by_side.glance(pair),
        rungs=[(rung, lesson(rung.rung)) for rung in (pair.old, pair.new)],
        subject=subject(pair.new, config=False),
        sections=side_by_side.sections(pair),
        pairs=paired_pictures([(rung.rung, rung.emulated) for rung in (pair.old, pair.new)]),
    )
