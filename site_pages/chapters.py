"""A chapter of the tutorial: everything about a rung that is known from the registry, its source and its records."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from gemmery.errors import EmulationError, RefusedError
from gemmery.ladder.definitions import contents
from gemmery.ladder.diff import diff, source
from gemmery.ladder.rung import Rung
from gemmery.report.ladder_text import refusals
from gemmery.report.svg import Plot
from site_pages.course import Part
from site_pages.measured import Chart, Records

DEPTH = 1024  # the k for which a chapter states f(k)


@dataclass(frozen=True)
class Chapter:
    """What the template of a chapter shows; texts are plain, and HTML is in names that end with it."""

    rung: Rung
    opening: tuple[str, ...]  # paragraphs of the comment that opens the kernel
    bound: str
    expected: Mapping[str, float]
    refusals: tuple[str, ...]
    language: str  # of its source, as highlighters call it
    source: str
    changes: str  # from its parent, as a unified diff
    plots: tuple[Plot, ...]
    charts: Sequence[tuple[str, list[Chart]]]


def chapter(rung: Rung, part: Part, records: Records, rungs: Sequence[Rung], pictures: bool = True) -> Chapter:
    """Return the chapter of a rung; without `pictures` the emulator is not asked for any."""
    lines = diff(rung.parent, rung.name).lines if rung.parent else ()
    return Chapter(
        rung=rung,
        opening=tuple(opening(rung)),
        bound=f"{rung.bound(DEPTH):,.6g}",
        expected=rung.expect,
        refusals=refusals(rung),
        language="cuda" if part.on_gpu else "python",
        source=source(rung).rstrip(),
        changes="\n".join(lines),
        plots=drawn(rung) if pictures and part.on_gpu else (),
        charts=records.charts(rung, rungs),
    )


def opening(rung: Rung) -> list[str]:
    """The comment that opens a kernel, in paragraphs: of a .cu file its first lines, in Python the docstring."""
    text = contents(rung.source)
    if rung.geometry is None:
        tree = ast.parse(text)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == rung.name]
        return [
            re.sub(r"\s+", " ", part)
            for part in (ast.get_docstring(functions[0] if functions else tree) or "").split("\n\n")
        ]
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").strip())
    return re.split(r" (?=Idea: |Parent: |Measured )", " ".join(lines))


def drawn(rung: Rung) -> tuple[Plot, ...]:
    """The emulator's pictures of a GPU rung, of the smallest product where it refuses a large one."""
    from gemmery.inspection.gather import inspect_rung
    from gemmery.report.pictures import pictures

    try:
        counts = inspect_rung(rung.name, device="h200").emulated
    except (RefusedError, EmulationError):
        counts = inspect_rung(rung.name, n=32, device="h200").emulated
    return pictures(counts.chosen, counts.source, f"{rung.name}-") if counts else ()


def code_html(text: str) -> str:
    """A line of text with its code between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
