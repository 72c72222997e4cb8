"""Things over time: the barriers of a block, with stages and products, and the lanes of a warp around a branch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gemmery.banks import WARP
from gemmery_emulator.pace.warp_timeline import COPY, MULTIPLIES, RUNS, WarpTimeline
from gemmery_emulator.pages.numerals import digits, percent, plural
from gemmery_emulator.pages.svg import EM, LEAST, WIDTH, Plot, cell, key, label, line_of, svg, with_callers
from gemmery_emulator.trace import Divergence, Stretch
from gemmery_emulator.trace.pipeline import BarrierStep, Timeline

LEFT = 132  # of the picture: the names of the rows
HEIGHT, GAP = 22, 6
MOST = 96  # moments that are shown
READING = (
    "Time runs to the right in the order in which the emulator ran, not in nanoseconds: what waits for what is the "
    "kernel's, how long is not. Copies land here when a thread waits for them, as late as the rules allow; the numbers "
    "count the steps along k."
)
MEANINGS = (
    ("soft", "copies under way"),
    ("s7", "filled"),
    ("accent", "read by products"),
    ("rule", "waits"),
    ("rival", "hands a stage back"),
    ("s1", "copies a part of C out"),
)
LANES_LEFT, LANE = 150, 13  # of the picture: labels, and the width of a lane
TOP, LANES_GAP = 22, 3
LANES_READING = "Lanes run across, time runs down; a band is as high as the logarithm of its instructions."
CODE = 42  # characters of a source line that are shown

WAYS = {"together": "s7", "taken": "accent", "other": "s2"}


@dataclass(frozen=True)
class _Stretch:
    """A stretch of a row, from one moment to another."""

    first: int
    last: int
    fill: str
    text: str
    tooltip: str


def timeline_picture(timeline: Timeline, name: str = "barriers") -> Plot:
    """A row for each warpgroup and for each stage of the ring."""
    moments = sorted({event.step for event in timeline.events})[:MOST]
    place = {step: at for at, step in enumerate(moments)}
    events = [event for event in timeline.events if event.step in place]
    wide = (WIDTH - LEFT) / len(moments)
    rows: list[tuple[tuple[str, ...], list[_Stretch], list[tuple[int, str]]]] = []
    for who in sorted({event.who for event in events if event.who >= 0}):
        own = [event for event in events if event.who == who]
        ticks = [
            (place[event.step], "rival" if event.what == "arrives" else "s1")
            for event in own
            if event.what == "stores" or (event.what == "arrives" and event.barrier in timeline.empty)
        ]
        rows.append((_called(own, who), list(_of_warpgroup(own, place, len(moments))), ticks))
    rows += [
        ((f"stage {stage}",), list(_of_stage(events, timeline, stage, place, len(moments))), [])
        for stage in range(len(timeline.full))
    ]
    parts, top = [], 4.0
    for called, stretches, ticks in rows:
        group, *does = called
        parts.append(label(LEFT - 12, top + HEIGHT / 2 - 5 * len(does), group, "ink", 11, "end"))
        parts += [label(LEFT - 12, top + HEIGHT / 2 + 6, verbs, "muted", LEAST, "end") for verbs in does]
        parts.append(cell(LEFT, top + HEIGHT / 2 - 1, WIDTH - LEFT, 2, "rule"))
        parts += [_drawn(stretch, top, wide) for stretch in stretches]
        parts += [cell(LEFT + (at + 0.5) * wide - 1.5, top - 2, 3, HEIGHT + 4, fill) for at, fill in ticks]
        top += HEIGHT + GAP
    parts.append(label(LEFT, top + 6, "time: the emulator's order of steps →", "muted", 10, "start"))
    drawn = {stretch.fill for _, stretches, _ in rows for stretch in stretches} | {"rule"}
    drawn |= {fill for *_, ticks in rows for _, fill in ticks}
    parts.append(key(LEFT, top + 26, [meaning for meaning in MEANINGS if meaning[0] in drawn]))
    title = "The barriers of the first block over time"
    return Plot(name, title, _caption(timeline), svg(title, top + 40, parts))


def _caption(timeline: Timeline) -> str:
    counts = timeline.counts
    return (
        f"A ring of {plural(len(timeline.full), 'stage')}. In all the block brings {counts['bytes']:,} bytes with "
        f"{counts['copies']:,} tensor copies, and its barriers see {counts['arrivals']:,} arrivals and "
        f"{plural(counts['phases'], 'phase')}. Warpgroups wait {counts['waits']:,} times, {counts['slept']:,} of them "
        f"while a phase is under way, and start {plural(counts['products'], 'product')}."
    )


def _called(own: Sequence[BarrierStep], who: int) -> tuple[str, ...]:
    """The warpgroup, and what it does if that is known."""
    whats = {event.what for event in own}
    does = [verb for what, verb in (("copies", "copies"), ("multiplies", "multiplies")) if what in whats]
    return (f"warpgroup {who}", *([" and ".join(does)] if does else []))


def _of_warpgroup(own: Sequence[BarrierStep], place: dict[int, int], end: int) -> Iterator[_Stretch]:
    """When a warpgroup waits, when it starts copies, and when products are under way."""
    waits = running = -1
    groups = 0
    for event in own:
        at = place[event.step]
        if event.what == "waits" and waits < 0:
            waits = at
        elif event.what == "passes" and waits >= 0:
            yield _Stretch(waits, at, "rule", "waits", "waits for a phase to end")
            waits = -1
        elif event.what == "copies":
            yield _Stretch(at, at, "soft", "", f"asks for {event.amount:,} bytes")
        elif event.what == "multiplies":
            running, groups = at if running < 0 else running, groups + event.amount
        elif event.what == "retires" and running >= 0 and not event.amount:
            yield _Stretch(running, at, "accent", "", f"{plural(groups, 'product')} under way one after the other")
            running, groups = -1, 0
    if running >= 0:
        yield _Stretch(running, end - 1, "accent", "", f"{plural(groups, 'product')} under way one after the other")
    if waits >= 0:
        yield _Stretch(waits, end - 1, "rule", "waits", "waits for a phase to end")


def _of_stage(
    events: Sequence[BarrierStep], timeline: Timeline, stage: int, place: dict[int, int], end: int
) -> Iterator[_Stretch]:
    """When a stage is copied to, when it is filled, and when products read it."""
    full, empty = timeline.full[stage], timeline.empty[stage]
    fills, number, since, fill = 0, -1, -1, ""
    texts = {"soft": "copied to", "s7": "filled", "accent": "read"}
    for event in events:
        at, after = place[event.step], ""
        if event.what == "copies" and event.barrier == full and fill != "soft":
            after = "soft"
        elif event.what == "ends" and event.barrier == full:
            after = "s7"
        elif event.what == "passes" and event.barrier == full and fill == "s7":
            after = "accent"
        elif event.what == "ends" and event.barrier == empty and fill:
            after = "free"
        if not after:
            continue
        if fill in texts and (at > since or after == "free"):
            yield _Stretch(since, max(at - 1, since), fill, str(number), f"step {number} of k: {texts[fill]}")
        if after == "soft":
            number, fills = stage + fills * len(timeline.full), fills + 1
        since, fill = at, after
    if fill in texts:
        yield _Stretch(since, end - 1, fill, str(number), f"step {number} of k: {texts[fill]}")


def _drawn(stretch: _Stretch, top: float, wide: float) -> str:
    x, width = LEFT + stretch.first * wide, (stretch.last - stretch.first + 1) * wide
    parts = cell(x + 0.5, top, max(width - 1, 1), HEIGHT, stretch.fill, stretch.tooltip)
    if stretch.text and EM * LEAST * len(stretch.text) < width - 2:
        ink = "paper" if stretch.fill in ("accent", "s7") else "ink"
        parts += label(x + width / 2, top + HEIGHT / 2, stretch.text, ink, LEAST)
    return parts


def divergence_picture(branch: Divergence, source: Mapping[str, str], name: str = "divergence") -> Plot:
    """Lanes across, time down: a band for each stretch of instructions, filled where a lane is active.

    `source` gives the text of lines, for the busiest ones of the stretches.
    """
    parts = [label(LANES_LEFT - 12, 9, "lane", "muted", anchor="end")]
    parts += [label(LANES_LEFT + (lane + 0.5) * LANE, 9, str(lane), "muted", 10) for lane in (0, 8, 16, 24, 31)]
    top = float(TOP)
    for stretch in branch.stretches:
        # Grows with the logarithm of the instructions, so that a few and some hundred both stay legible.
        height = 24 + 7 * math.log2(max(stretch.instructions, 1))
        parts += _band(branch, stretch, top, height)
        code = source.get(str(stretch.busiest or stretch.first), "").strip()
        if code:
            text = code if len(code) <= CODE else f"{code[: CODE - 1]}…"
            parts.append(label(LANES_LEFT + WARP * LANE + 14, top + height / 2, text, "ink", 11, "start", mono=True))
        top += height + LANES_GAP
    meanings = ((WAYS["taken"], "lanes that branch"), (WAYS["other"], "lanes that do not"), (WAYS["together"], "both"))
    parts.append(key(LANES_LEFT, top + 12, (*meanings, ("rule", "idle"))))
    issued = sum(stretch.instructions for stretch in branch.stretches)
    worked = sum(stretch.instructions * sum(stretch.lanes) for stretch in branch.stretches)
    apart = sum(stretch.instructions for stretch in branch.stretches if _way(branch, stretch) != "together")
    branching, active = sum(branch.taken), sum(branch.active)
    caption = (
        f"{with_callers(branch)}: {branching} of {plural(active, 'lane')} branch, {active - branching} do not, and the "
        f"warp runs both paths one after the other. It issues {apart:,} of {plural(issued, 'instruction')} for some "
        f"of its lanes only; {percent(worked / (WARP * issued))} of the lanes' time is used."
    )
    described = f"lanes over time at the branch of {line_of(branch)}: {branching} of {active} lanes branch"
    return Plot(name, f"Lanes at the branch of {line_of(branch)}", caption, svg(described, top + 24, parts))


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
        label(LANES_LEFT - 12, middle - 7, lines, "ink", 11, "end"),
        label(LANES_LEFT - 12, middle + 7, plural(stretch.instructions, "instruction"), "muted", 10, "end"),
    ]
    for lane, works in enumerate(stretch.lanes):
        tooltip = f"lane {lane}: {plural(stretch.instructions, 'instruction')} of {lines}" if works else ""
        parts.append(cell(LANES_LEFT + lane * LANE + 1, top, LANE - 2, height, fill if works else "rule", tooltip))
    return parts


WARP_LEFT = 96  # of the picture: the names of the rows
WARP_HEIGHT, WARP_GAP = 13, 3
MOST_WARPS = 24  # warps that are rows_drawn
SHARE = 400  # pieces of a row: what takes most of a piece is drawn there
FILLS = {
    RUNS: "accent",
    MULTIPLIES: "s7",
    "waits for registers": "soft",
    "waits at a barrier": "rival",
    "waits at an mbarrier": "s2",
    "waits for products": "s1",
    "waits for its copies": "s3",
    "waits for its stores": "s4",
    "waits for its cluster": "rival",
}


def warps_picture(timeline: WarpTimeline, name: str = "warps-1") -> Plot:
    """A row for each warp that does something, from the start of the blocks to their end."""
    rows, wide = timeline.rows(), WIDTH - WARP_LEFT
    rows_drawn = list(rows)[:MOST_WARPS]
    parts, top, drawn = [], 4.0, dict[str, None]()
    for warp in rows_drawn:
        block, own = divmod(warp, timeline.each)
        parts.append(label(WARP_LEFT - 10, top + WARP_HEIGHT / 2, f"block {block}, warp {own}", "muted", 10, "end"))
        parts.append(cell(WARP_LEFT, top + WARP_HEIGHT / 2 - 1, wide, 2, "rule"))
        for first, last, what in _pieces(timeline, warp):
            drawn[what] = None
            begin, end = WARP_LEFT + wide * first / SHARE, WARP_LEFT + wide * last / SHARE
            tooltip = f"{what}, {digits(timeline.clocks * (last - first) / SHARE)} clocks"
            parts.append(cell(begin, top, max(end - begin, 0.5), WARP_HEIGHT, FILLS[what], tooltip))
        top += WARP_HEIGHT + WARP_GAP
    whole = timeline.clocks / timeline.clock
    parts.append(
        label(
            WARP_LEFT,
            top + 8,
            f"time: {digits(whole * 1e-3)} µs, {digits(timeline.clocks)} clocks →",
            "muted",
            10,
            "start",
        )
    )
    parts.append(key(WARP_LEFT, top + 28, [(FILLS[what], what) for what in drawn]))
    totals = timeline.totals()
    everything = sum(totals.values()) or 1.0
    listed = ", ".join(
        f"{what} {percent(each / everything)}" for what, each in sorted(totals.items(), key=lambda row: -row[1])
    )
    rest = f" {len(rows) - len(rows_drawn)} more warps are not drawn." if len(rows) > len(rows_drawn) else ""
    copies = sum(span.what == COPY for span in timeline.spans)
    caption = f"The warps of the blocks with which a multiprocessor of {timeline.card} begins, by predicted clocks. "
    caption += f"Of the time of all warps: {listed}.{rest}"
    caption += f" {copies:,} bulk copies go on meanwhile." if copies else ""
    title = "What each warp does over time"
    return Plot(name, title, caption, svg(title, top + 44, parts))


def _pieces(timeline: WarpTimeline, warp: int) -> Iterator[tuple[int, int, str]]:
    """Stretches of a row in which a warp does mostly one thing."""
    scale = SHARE / timeline.clocks
    most: list[dict[str, float]] = [{} for _ in range(SHARE)]
    for span in timeline.rows()[warp]:
        first, last = span.begin * scale, span.end * scale
        for piece in range(int(first), min(int(last) + 1, SHARE)):
            share = min(last, piece + 1) - max(first, piece)
            most[piece][span.what] = most[piece].get(span.what, 0.0) + share
    whats = [max(piece, key=lambda what: piece[what]) if sum(piece.values()) > 0.5 else "" for piece in most]
    for what, run in groupby(range(SHARE), whats.__getitem__):
        if what:
            first, *rest = run
            yield first, first + 1 + len(rest), what
