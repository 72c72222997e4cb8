"""The lanes of a warp over time, around a branch at which they diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gemmery.emulator.trace import Divergence, Stretch
from gemmery.report import words
from gemmery.report.pictures.drawing import cell, label, legend, svg
from gemmery.report.pictures.wording import called, seen
from gemmery.report.svg import Plot
from gemmery.report.words import plural

WARP = 32
LEFT, LANE = 150, 13  # of the picture: labels, and the width of a lane
TOP, GAP = 22, 3
READING = "Lanes run across, time runs down; a band is as high as the logarithm of its instructions."
CODE = 42  # characters of a source line that are shown

WAYS = {"together": "s7", "taken": "accent", "other": "s2"}


def divergence_picture(found: Divergence, source: Mapping[str, str], name: str = "divergence") -> Plot:
    """Lanes across, time down: a band for each stretch of instructions, filled where a lane is active.

    `source` gives the text of lines, for the busiest ones of the stretches.
    """
    parts = [label(LEFT - 12, 9, "lane", "muted", anchor="end")]
    parts += [label(LEFT + (lane + 0.5) * LANE, 9, str(lane), "muted", 10) for lane in (0, 8, 16, 24, 31)]
    top = float(TOP)
    for stretch in found.stretches:
        height = _height(stretch.instructions)
        parts += _band(found, stretch, top, height)
        code = source.get(str(stretch.busiest or stretch.first), "").strip()
        shown = code if len(code) <= CODE else f"{code[: CODE - 1]}…"
        if shown:
            parts.append(label(LEFT + WARP * LANE + 14, top + height / 2, shown, "ink", 11, "start", mono=True))
        top += height + GAP
    meanings = ((WAYS["taken"], "lanes that branch"), (WAYS["other"], "lanes that do not"), (WAYS["together"], "both"))
    parts.append(legend(LEFT, top + 12, (*meanings, ("rule", "idle"))))
    issued = sum(stretch.instructions for stretch in found.stretches)
    worked = sum(stretch.instructions * sum(stretch.lanes) for stretch in found.stretches)
    apart = sum(stretch.instructions for stretch in found.stretches if _way(found, stretch) != "together")
    taken, active = sum(found.taken), sum(found.active)
    caption = (
        f"{called(found)}: {taken} of {plural(active, 'lane')} branch, {active - taken} do not, and the warp runs both "
        f"paths one after the other. It issues {apart:,} of {plural(issued, 'instruction')} for some of its lanes "
        f"only; {words.percent(worked / (WARP * issued))} of the lanes' time is used."
    )
    described = f"lanes over time at the branch of {seen(found)}: {taken} of {active} lanes branch"
    return Plot(name, f"Lanes at the branch of {seen(found)}", caption, svg(described, top + 24, parts))


def _height(instructions: int) -> float:
    """Grows with the logarithm of the instructions, so that a few and some hundred both stay legible."""
    return 24 + 7 * math.log2(max(instructions, 1))


def _way(found: Divergence, stretch: Stretch) -> str:
    """The path that a stretch belongs to: that of the lanes that branch, that of the others, or both."""
    sides = {
        taken for active, taken, works in zip(found.active, found.taken, stretch.lanes, strict=True) if works and active
    }
    if len(sides) != 1:
        return "together"
    return "taken" if sides.pop() else "other"


def _band(found: Divergence, stretch: Stretch, top: float, height: float) -> list[str]:
    """A stretch: its lines, its length, and its lanes."""
    alone = stretch.first == stretch.last
    lines = str(stretch.first) if alone else f"{stretch.first}–{stretch.last.number}"
    if stretch.first.file == found.line.file:
        lines = f"line {stretch.first.number}" if alone else f"lines {stretch.first.number}–{stretch.last.number}"
    middle, fill = top + height / 2, WAYS[_way(found, stretch)]
    parts = [
        label(LEFT - 12, middle - 7, lines, "ink", 11, "end"),
        label(LEFT - 12, middle + 7, plural(stretch.instructions, "instruction"), "muted", 10, "end"),
    ]
    for lane, works in enumerate(stretch.lanes):
        said = f"lane {lane}: {plural(stretch.instructions, 'instruction')} of {lines}" if works else ""
        parts.append(cell(LEFT + lane * LANE + 1, top, LANE - 2, height, fill if works else "rule", said))
    return parts
