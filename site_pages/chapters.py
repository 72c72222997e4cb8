"""A chapter of the tutorial: everything about a rung that is known from the registry, its source and its records."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from gemmery import dtypes
from gemmery.errors import EmulationError, RefusedError
from gemmery.ladder.diff import LOOPS, contents, diff, docstring, pseudocode, source
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery_emulator.pages.svg import Plot
from site_pages.course import Part
from site_pages.documents import refusals
from site_pages.measured import Chart, Records

DEPTH = 1024  # the k for which a chapter states f(k)

BESIDE = re.compile(r"(---|\+\+\+) only ")  # begins a list of definitions in a difference of rungs
LARGE, SMALL = 4096, 32  # sides of the products that are inspected


@dataclass(frozen=True)
class Chapter:
    """What the template of a chapter shows; texts are plain, and HTML is in names that end with it."""

    rung: Rung
    loops: str  # pseudocode of a CPU rung
    bound: str
    expected: Mapping[str, float]
    refusals: tuple[str, ...]
    language: str  # of its source, as highlighters call it
    source: str
    changes: str  # from its parent, as a unified diff
    beside: str  # definitions of other files that only one of the two uses
    plots: tuple[Plot, ...]
    charts: Sequence[tuple[str, list[Chart]]]
    published: Sequence[str]  # tables of figures that are known from elsewhere
    sides: str  # the option of `gemmery inspect` for a rung, or a parent, that takes only small products


def chapter(rung: Rung, part: Part, records: Records, rungs: Sequence[Rung], pictures: bool = True) -> Chapter:
    """Return the chapter of a rung; without `pictures` the emulator is not asked for any."""
    lines = diff(rung.parent, rung.name).lines if rung.parent else ()
    first = next((place for place, line in enumerate(lines) if BESIDE.match(line)), len(lines))
    return Chapter(
        rung=rung,
        loops=pseudocode(rung.source, rung.name),
        bound=f"{rung.bound(DEPTH):,.6g}",
        expected=rung.expect,
        refusals=refusals(rung),
        language="cuda" if part.on_gpu else "python",
        source=source(rung).rstrip(),
        changes="\n".join(lines[:first]),
        beside="\n".join(lines[first:]),
        plots=drawn(rung) if pictures and part.on_gpu else (),
        charts=records.charts(rung, rungs),
        published=records.published.get(rung.name, ()),
        sides=f" --n {SMALL}" if any(only_small(row) for row in rungs if row.name in (rung.name, rung.parent)) else "",
    )


def only_small(rung: Rung) -> bool:
    """True for a GPU rung that refuses large products of any number of rows."""
    if rung.geometry is None:
        return False
    layout = "col" if dtypes.get(rung.dtypes[0]).size == 1 else "row"
    large = Problem(LARGE, LARGE, LARGE, rung.dtypes[0], dtypes.written(rung.dtypes[0]), b_layout=layout, device="h200")
    return all(map(rung.refuses, (large, large._replace(m=1, b_layout="col"))))


def opening(rung: Rung) -> list[str]:
    """The comment that opens a kernel, in paragraphs: of a .cu file its first lines, in Python the docstring."""
    text = contents(rung.source)
    if rung.geometry is None:
        parts = docstring(rung.source, rung.name)
        return [re.sub(r"\s+", " ", part) for part in parts if not part.startswith(LOOPS)]
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    return re.split(r" (?=Idea: |Parent: |Measured )", " ".join(lines))


def drawn(rung: Rung) -> tuple[Plot, ...]:
    """The emulator's pictures of a GPU rung, of the smallest product where it refuses a large one."""
    from gemmery_emulator.pages.pictures import pictures
    from gemmery_lab.inspection.gather import inspect_rung

    try:
        counts = inspect_rung(rung.name, device="h200").emulated
    except (RefusedError, EmulationError):
        counts = inspect_rung(rung.name, n=SMALL, device="h200").emulated
    return pictures(counts.chosen, counts.source, f"{rung.name}-") if counts else ()


def code_html(text: str) -> str:
    """A line of text with its code between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
