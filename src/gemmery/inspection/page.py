"""Inspections as self-contained HTML pages, with all of the code and the pictures of memory accesses."""

from __future__ import annotations

import html
from dataclasses import replace

from gemmery.inspection import counters, side_by_side
from gemmery.inspection.records import Inspection, SideBySide
from gemmery.inspection.sections import ROOFLINE, SOURCE, Section, codes, lesson, sections, subject
from gemmery.report.page import document, drawing, figure
from gemmery.report.pictures import pictures
from gemmery.report.roofs import roofline_plot

LEGEND = (
    "<p class=legend><span class=fewer>Green</span> costs less than the first rung, <span class=more>orange</span> "
    "costs more, <span class=differs>blue</span> differs otherwise.</p>"
)


def inspection_page(inspection: Inspection) -> str:
    """The page of one rung or exhibit."""
    plot = (
        None
        if inspection.exhibit
        else roofline_plot(inspection.rung, inspection.device.name, inspection.loads, inspection.once)
    )
    parts = [
        _section(section, drawing(plot) if plot and section.title == ROOFLINE else "")
        for section in sections(inspection)
    ]
    code = [
        f"<details><summary>{html.escape(title)}</summary><pre class=code>{html.escape(text)}</pre></details>"
        for title, text in codes(inspection)
    ]
    run = inspection.emulated
    figures = [figure(plot) for plot in pictures(run.chosen, run.source)] if run else []
    if run and run.chosen.untraced:
        figures.append(f"<section><p class=note>{html.escape(counters.untraced(run))}</p></section>")
    head = (
        f"<header><h1>{html.escape(inspection.rung)}</h1><p class=lead>{html.escape(inspection.idea)}</p>"
        f"<p>{html.escape(lesson(inspection.rung))}</p><p class=faint>{html.escape(subject(inspection))}</p></header>"
    )
    title = f"{inspection.rung} on {inspection.device.name}"
    return document(title, head, *parts, *figures, "<section>", *code, "</section>")


def side_by_side_page(pair: SideBySide) -> str:
    """The page of two, with the pictures of both."""
    both = (pair.old, pair.new)
    ideas = "".join(
        f"<p><b>{html.escape(rung.rung)}</b>: {html.escape(rung.idea)}. {html.escape(lesson(rung.rung))}</p>"
        for rung in both
    )
    title = side_by_side.title(pair)
    head = (
        f"<header><h1>{html.escape(title)}</h1><p class=lead>{html.escape(side_by_side.glance(pair))}</p>{ideas}"
        f"<p class=faint>{html.escape(subject(pair.new, config=False))}</p></header>"
    )
    drawn: dict[str, list[str]] = {}
    explained: frozenset[str] = frozenset()
    for number, inspection in enumerate(both, 1):
        run = inspection.emulated
        for plot in pictures(run.chosen, run.source, explained=explained) if run else ():
            renamed = replace(plot, name=f"{number}-{plot.name}", title=f"{inspection.rung}: {plot.title}")
            drawn.setdefault(plot.name, []).append(figure(renamed))
            explained |= {plot.name.partition("-")[0]}
    pairs = [f"<div class=pair>{''.join(plots)}</div>" for plots in drawn.values()]
    first, *others = (_section(section) for section in side_by_side.sections(pair))
    return document(title, head, LEGEND, first, *pairs, *others)


def _section(section: Section, drawing: str = "") -> str:
    notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in section.notes)
    scroll = "'scroll wide'" if SOURCE in section.head else "scroll"
    return (
        f"<section><h2>{html.escape(section.title)}</h2><div class={scroll}>{_table(section)}</div>{notes}{drawing}"
        "</section>"
    )


def _table(section: Section) -> str:
    numbers = len(section.head) > 3 if section.marks else bool(section.head)
    classes = [" class=source" if name == SOURCE else "" for name in section.head] or [""] * len(section.rows[0])
    marks = [[*classes[:2], f" class={mark}" if mark else "", *classes[3:]] for mark in section.marks]
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(section.head, classes, strict=False))
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{html.escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row, kinds in zip(section.rows, marks or [classes] * len(section.rows), strict=True)
    )
    kind = "figures" if numbers else "words"
    return f"<table class={kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
