"""What the warps of the first blocks do over time on a card: for a picture, and for Perfetto or Chrome's tracing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gemmery_emulator.pace.clocks import WarpSpan

COPY = "bulk copy"
MULTIPLIES, RUNS = "multiplies", "runs"


@dataclass(frozen=True)
class WarpTimeline:
    """What each warp does, from the start of the blocks that a multiprocessor begins with to their end."""

    kernel: str
    card: str
    clock: float  # clocks of a nanosecond
    clocks: float  # until the last of these blocks ends
    each: int  # warps of a block
    spans: tuple[WarpSpan, ...]
    lines: tuple[str, ...]  # of each instruction, where it stands in the source

    def rows(self) -> dict[int, list[WarpSpan]]:
        """The spans of each warp by its number, in time and without overlap; copies, which go on meanwhile, left out.

        A warp that waits for registers while it still issues does both: the span that began first comes first.
        """
        rows: dict[int, list[WarpSpan]] = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: (span.warp, span.begin, span.end)):
            if span.what == COPY:
                continue
            row = rows[span.warp]
            begin = max(span.begin, row[-1].end if row else 0.0)
            if span.end > begin:
                row.append(WarpSpan(span.warp, begin, span.end, span.what, span.index))
        return dict(rows)

    def totals(self) -> dict[str, float]:
        """Clocks of all warps by what they do."""
        sums: dict[str, float] = defaultdict(float)
        for row in self.rows().values():
            for span in row:
                sums[span.what] += span.end - span.begin
        return dict(sums)

    def line(self, span: WarpSpan) -> str:
        """Where a span's instruction stands in the source."""
        return self.lines[span.index] if 0 <= span.index < len(self.lines) else ""

    def trace(self) -> str:
        """The timeline as JSON of Chrome's trace event format, in microseconds; Perfetto opens it.

        A process is a block, a thread one of its warps; copies have a row of their own for each warp that starts them.
        """
        events: list[dict[str, object]] = []
        blocks = sorted({span.warp // self.each for span in self.spans})
        events += [_name_event("process_name", at, 0, f"block {at} of {self.kernel} on {self.card}") for at in blocks]
        for warp, row in self.rows().items():
            block, own = divmod(warp, self.each)
            events.append(_name_event("thread_name", block, own, f"warp {own}"))
            events += [self._event(span, block, own) for span in row]
        for track, row in enumerate(_apart([span for span in self.spans if span.what == COPY]), self.each):
            for span in row:
                block, own = divmod(span.warp, self.each)
                events.append(self._event(span, block, track))
                events[-1]["args"] = {"line": self.line(span), "warp": own}
            of = {span.warp // self.each for span in row}
            events += [_name_event("thread_name", at, track, "bulk copies") for at in sorted(of)]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, allow_nan=False)

    def _event(self, span: WarpSpan, process: int, thread: int) -> dict[str, object]:
        scale = 1e-3 / self.clock
        return {
            "name": span.what, "cat": "wait" if "wait" in span.what else "work", "ph": "X",
            "ts": span.begin * scale, "dur": (span.end - span.begin) * scale, "pid": process, "tid": thread,
            "args": {"line": self.line(span)},
        }  # fmt: skip


def _name_event(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _apart(spans: Sequence[WarpSpan]) -> list[list[WarpSpan]]:
    """Spans in as few rows as keep those of one row from overlapping."""
    rows: list[list[WarpSpan]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows
