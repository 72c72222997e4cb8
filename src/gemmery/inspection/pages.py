"""Inspections as self-contained HTML pages, with all of the code and the pictures of memory accesses."""

from __future__ import annotations

from gemmery.emulation.kernel_run import paired_pictures
from gemmery.inspection import side_by_side
from gemmery.inspection.records import AnyInspection, AnyPair, Inspection
from gemmery.inspection.sections import codes, lesson, sections, subject, untraced
from gemmery.pages.pictures import pictures
from gemmery.pages.rendering import render
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
        untraced=untraced(counts) if counts and counts.chosen.untraced else "",
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
