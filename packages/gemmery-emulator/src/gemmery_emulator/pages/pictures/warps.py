"""The clocks of the warps of a multiprocessor: who runs, who multiplies, and who waits for what."""

from __future__ import annotations

from collections.abc import Iterator

from gemmery_emulator.pace.warp_timeline import COPY, MULTIPLIES, RUNS, WarpTimeline
from gemmery_emulator.pages.numerals import digits, percent
from gemmery_emulator.pages.svg import WIDTH, Plot, cell, key, label, svg

LEFT = 96  # of the picture: the names of the rows
HEIGHT, GAP = 13, 3
MOST = 24  # warps that are rows_drawn
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
    rows, wide = timeline.rows(), WIDTH - LEFT
    rows_drawn = list(rows)[:MOST]
    parts, top, drawn = [], 4.0, dict[str, None]()
    for warp in rows_drawn:
        block, own = divmod(warp, timeline.each)
        parts.append(label(LEFT - 10, top + HEIGHT / 2, f"block {block}, warp {own}", "muted", 10, "end"))
        parts.append(cell(LEFT, top + HEIGHT / 2 - 1, wide, 2, "rule"))
        for first, last, what in _pieces(timeline, warp):
            drawn[what] = None
            begin, end = LEFT + wide * first / SHARE, LEFT + wide * last / SHARE
            tooltip = f"{what}, {digits(timeline.clocks * (last - first) / SHARE)} clocks"
            parts.append(cell(begin, top, max(end - begin, 0.5), HEIGHT, FILLS[what], tooltip))
        top += HEIGHT + GAP
    whole = timeline.clocks / timeline.clock
    parts.append(
        label(
            LEFT, top + 8, f"time: {digits(whole * 1e-3)} µs, {digits(timeline.clocks)} clocks →", "muted", 10, "start"
        )
    )
    parts.append(key(LEFT, top + 28, [(FILLS[what], what) for what in drawn]))
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
    first = 0
    for at in range(1, SHARE + 1):
        if at == SHARE or whats[at] != whats[first]:
            if whats[first]:
                yield first, at, whats[first]
            first = at
