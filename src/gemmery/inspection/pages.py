"""Inspections as self-contained HTML pages, with all of the code and the pictures of memory accesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gemmery.inspection import counters, side_by_side
from gemmery.inspection.records import AnyInspection, AnyPair, EmulatorCounts, Inspection
from gemmery.inspection.sections import codes, lesson, sections, subject
from gemmery.pages.pictures import pictures
from gemmery.pages.rendering import render
from gemmery.pages.svg import Plot
from gemmery.report.curves import roofline_plot


def inspection_page(inspection: AnyInspection) -> str:
    """The page of one rung or exhibit."""
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
        untraced=counters.untraced(counts) if counts and counts.chosen.untraced else "",
        codes=codes(inspection),
    )


def side_by_side_page(pair: AnyPair) -> str:
    """The page of two, with the pictures of both."""
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


def framed(page: str, title: str) -> str:
    """A page as a frame in another one, dark or light as the background behind it, light where that is unknown."""
    light = page.replace('<html lang="en">', '<html lang="en" data-scheme="light">', 1)
    return render("frame.html", __package__, page=light, title=title)


def paired_pictures(runs: Sequence[tuple[str, EmulatorCounts | None]]) -> list[list[Plot]]:
    """The pictures of both, those of a kind together; only the first of a kind says how to read it.

    Each run has a name, which begins the titles of its pictures unless it is "".
    """
    plots: dict[str, list[Plot]] = {}
    explained: frozenset[str] = frozenset()
    for number, (name, counts) in enumerate(runs, 1):
        for plot in pictures(counts.chosen, counts.source, explained=explained) if counts else ():
            title = f"{name}: {plot.title}" if name else plot.title
            plots.setdefault(plot.name, []).append(replace(plot, name=f"{number}-{plot.name}", title=title))
            explained |= {plot.name.partition("-")[0]}
    return list(plots.values())
