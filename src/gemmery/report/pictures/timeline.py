"""The barriers of a block over time: who waits, which stages of the ring are filled and read, which products run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemmery.emulator.trace.pipeline import BarrierStep, Timeline
from gemmery.report.pictures.drawing import EM, LEAST, cell, label, legend, svg
from gemmery.report.svg import WIDTH, Plot
from gemmery.report.words import plural

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
    parts.append(legend(LEFT, top + 26, [meaning for meaning in MEANINGS if meaning[0] in drawn]))
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
