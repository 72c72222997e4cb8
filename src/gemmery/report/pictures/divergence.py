"""The lanes of a warp over time, around a branch at which they diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gemmery.banks import WARP
from gemmery.emulator.trace import Divergence, Stretch
from gemmery.report import words
from gemmery.report.pictures.drawing import cell, label, legend, line_of, svg, with_callers
from gemmery.report.svg import Plot
from gemmery.report.words import plural

LEFT, LANE = 150, 13  # of the picture: labels, and the width of a lane
TOP, GAP = 22, 3
READING = "Lanes run across, time runs down; a band is as high as the logarithm of its instructions."
CODE = 42  # characters of a source line that are shown

WAYS = {"together": "s7", "taken": "accent", "other": "s2"}


def divergence_picture(branch: Divergence, source: Mapping[str, str], name: str = "divergence") -> Plot:
    """Lanes across, time down: a band for each stretch of instructions, filled where a lane is active.

    `source` gives the text of lines, for the busiest ones of the stretches.
    """
    parts = [label(LEFT - 12, 9, "lane", "muted", anchor="end")]
    parts += [label(LEFT + (lane + 0.5) * LANE, 9, str(lane), "muted", 10) for lane in (0, 8, 16, 24, 31)]
    top = float(TOP)
    for stretch in branch.stretches:
        height = _height(stretch.instructions)
        parts += _band(branch, stretch, top, height)
        code = source.get(str(stretch.busiest or stretch.first), "").strip()
        if code:
            text = code if len(code) <= CODE else f"{code[: CODE - 1]}…"
            parts.append(label(LEFT + WARP * LANE + 14, top + height / 2, text, "ink", 11, "start", mono=True))
        top += height + GAP
    meanings = ((WAYS["taken"], "lanes that branch"), (WAYS["other"], "lanes that do not"), (WAYS["together"], "both"))
    parts.append(legend(LEFT, top + 12, (*meanings, ("rule", "idle"))))
    issued = sum(stretch.instructions for stretch in branch.stretches)
    worked = sum(stretch.instructions * sum(stretch.lanes) for stretch in branch.stretches)
    apart = sum(stretch.instructions for stretch in branch.stretches if _way(branch, stretch) != "together")
    branching, active = sum(branch.taken), sum(branch.active)
    caption = (
        f"{with_callers(branch)}: {branching} of {plural(active, 'lane')} branch, {active - branching} do not, and the "
        f"warp runs both paths one after the other. It issues {apart:,} of {plural(issued, 'instruction')} for some "
        f"of its lanes only; {words.percent(worked / (WARP * issued))} of the lanes' time is used."
    )
    described = f"lanes over time at the branch of {line_of(branch)}: {branching} of {active} lanes branch"
    return Plot(name, f"Lanes at the branch of {line_of(branch)}", caption, svg(described, top + 24, parts))


def _height(instructions: int) -> float:
    """Grows with the logarithm of the instructions, so that a few and some hundred both stay legible."""
    return 24 + 7 * math.log2(max(instructions, 1))


def _way(branch: Divergence, stretch: Stretch) -> str:
    """The path that a stretch belongs to: that of the lanes that branch, that of the others, or both."""
    lanes = zip(branch.active, branch.taken, stretch.lanes, strict=True)
    sides = {branches for active, branches, works in lanes if works and active}
    if len(sides) != 1:
        return "together"
    return "taken" if sides.pop() else "other"


def _band(branch: Divergence, stretch: Stretch, top: float, height: float) -> list[str]:
    """A stretch: its lines, its length, and its lanes."""
    alone = stretch.first == stretch.last
    lines = str(stretch.first) if alone else f"{stretch.first}–{stretch.last.number}"
    if stretch.first.file == branch.line.file:
        lines = f"line {stretch.first.number}" if alone else f"lines {stretch.first.number}–{stretch.last.number}"
    middle, fill = top + height / 2, WAYS[_way(branch, stretch)]
    parts = [
        label(LEFT - 12, middle - 7, lines, "ink", 11, "end"),
        label(LEFT - 12, middle + 7, plural(stretch.instructions, "instruction"), "muted", 10, "end"),
    ]
    for lane, works in enumerate(stretch.lanes):
        tooltip = f"lane {lane}: {plural(stretch.instructions, 'instruction')} of {lines}" if works else ""
        parts.append(cell(LEFT + lane * LANE + 1, top, LANE - 2, height, fill if works else "rule", tooltip))
    return parts
