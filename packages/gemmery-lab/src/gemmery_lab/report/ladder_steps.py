"""A step of the ladder, from a rung to the next: the counters, the time and the lines that moved, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from rich.console import Console, Group
from rich.text import Text

from gemmery.ladder.cuda import CUDA
from gemmery.ladder.diff import Difference, diff
from gemmery_emulator.pace.warp_timeline import WarpTimeline
from gemmery_emulator.pages import numerals, svg
from gemmery_emulator.pages.pictures.timeline import warps_picture
from gemmery_emulator.pages.writing import render
from gemmery_lab.report.sheet import Cell, Sheet, tabulate
from gemmery_lab.report.terminal import colored, laid_out, show_difference
from gemmery_lab.rung_counts import EmulatedLadder, EmulatedRung, PredictedRung, RungCounts

ROW, LEFT, RIGHT = 40, 110, 90  # height of a term in the picture, and room for names and figures beside its bars
SMALLEST = 0.01  # of the longer time: terms below it are left out
MOVED = 0.02  # by which a counter must differ to have moved


@dataclass(frozen=True)
class LadderStep:
    """Two rungs on the same card: both counted on a small product, both predicted on a large one where they can be."""

    old: EmulatedRung
    new: EmulatedRung
    before: PredictedRung | None
    after: PredictedRung | None
    difference: Difference

    @property
    def title(self) -> str:
        return f"From {self.old.rung} to {self.new.rung}"

    @property
    def times(self) -> tuple[PredictedRung, PredictedRung] | None:
        """Both predictions, if there are two."""
        before, after = self.before, self.after
        return (before, after) if before and after and before.prediction and after.prediction else None


def steps(ladder: EmulatedLadder) -> tuple[LadderStep, ...]:
    """Return every step of a ladder whose two rungs ran, at its largest size."""
    largest = max((run.size for run in ladder.rungs), default=0)
    ran = {run.rung: run for run in ladder.rungs if run.size == largest and not run.refused}
    parents = ((rung.parent or "", rung.name) for rung in CUDA)
    return tuple(step(ladder, old, new) for old, new in parents if old in ran and new in ran)


def step_pages(ladder: EmulatedLadder) -> dict[str, str]:
    """Return a page for every step, under the name to which the ladder's page links."""
    return {place(each.old.rung, each.new.rung): step_page(each) for each in steps(ladder)}


def place(old: str, new: str) -> str:
    """Where the page of a step lies, from the ladder's page."""
    return f"steps/{old}-{new}.html"


def step(ladder: EmulatedLadder, old: str, new: str) -> LadderStep:
    """Return the step between two rungs of a ladder that ran."""
    largest = max(run.size for run in ladder.rungs)
    ran = {run.rung: run for run in ladder.rungs if run.size == largest}
    times = {row.rung: row for row in ladder.predicted}
    return LadderStep(ran[old], ran[new], times.get(old), times.get(new), diff(old, new))


def summary(step: LadderStep) -> str:
    """The step in a sentence: its gain, what bounded the one and bounds the other, and the counter that moved most."""
    parts = []
    if times := step.times:
        before, after = (row.prediction.bound for row in times if row.prediction)
        rates = numerals.digits(times[1].rate() / times[0].rate() if times[0].rate() else 0.0)
        bounds = f"{before} bounded {step.old.rung}, {after} bounds {step.new.rung}"
        parts.append(f"Predicted {rates} times as fast; {bounds}")
    if moved := _moved(step):
        name, old, new = moved[0]
        parts.append(f"{name} go from {numerals.digits(old)} to {numerals.digits(new)}")
    return "; ".join(parts) + "." if parts else "No counter moved."


def _moved(step: LadderStep) -> list[tuple[str, float, float]]:
    """The counters that differ, for each operation of the product if the products do; the furthest first."""
    scale = step.old.operations / step.new.operations
    rows = []
    for each in fields(RungCounts):
        old, new = (float(getattr(run.counts, each.name)) for run in (step.old, step.new))
        new *= 1.0 if "_a_" in each.name else scale
        if abs(old - new) > MOVED * max(old, new):
            rows.append((each.name.replace("_a_", " per ").replace("_", " "), old, new))
    return sorted(rows, key=lambda row: -max(row[1], row[2], 1) / max(min(row[1], row[2]), 1))


def sheets(step: LadderStep) -> tuple[Sheet, ...]:
    """The counters that moved, and the predicted time with its terms."""
    old, new = step.old, step.new
    products = [f"{run.rung}: {run.m} × {run.n} × {run.k}, {run.dtype}." for run in (old, new)]
    if products[0].partition(":")[2] == products[1].partition(":")[2]:
        products = [f"Both: {old.m} × {old.n} × {old.k}, {old.dtype}."]
    else:
        products.append(f"Counts of {new.rung} are for as many operations as {old.rung} has.")
    counted = tabulate(
        "Counters that moved",
        [
            ("counter", lambda row: row[0]),
            (old.rung, lambda row: _number(row[1])),
            (new.rung, lambda row: _number(row[2])),
            ("×", lambda row: f"{numerals.digits(row[2] / row[1])}" if row[1] else ""),
        ],
        _moved(step),
        products,
    )
    return (counted, _times(step)) if step.times else (counted,)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else numerals.digits(value)


def _times(step: LadderStep) -> Sheet:
    """Microseconds of each term of both predictions."""
    both = step.times or ()
    card = "".join(row.prediction.card for row in both[:1] if row.prediction)
    return tabulate(
        f"Predicted on {card}, µs",
        [
            ("takes", lambda row: Cell(row[0], tone="best" if row[0] == "all" else "")),
            (step.old.rung, lambda row: numerals.digits(row[1] * 1e6)),
            (step.new.rung, lambda row: numerals.digits(row[2] * 1e6)),
        ],
        _terms(step),
        [
            *(f"{row.rung}: {row.m} × {row.n} × {row.k}, {row.dtype}." for row in both),
            "Each unit's time is that which it would take if nothing else took time: they overlap.",
        ],
    )


def _terms(step: LadderStep) -> list[tuple[str, float, float]]:
    """Seconds of both predictions, of all and of each term, the longest of the old first; [] without predictions."""
    before, after = (row.prediction if row else None for row in (step.before, step.after))
    if before is None or after is None:
        return []
    names = dict.fromkeys([*before.terms, *after.terms])
    rows = [(name, before.terms.get(name, 0.0), after.terms.get(name, 0.0)) for name in names]
    least = SMALLEST * max(before.seconds, after.seconds)
    longest = sorted((row for row in rows if max(row[1:]) > least), key=lambda row: -row[1])
    return [("all", before.seconds, after.seconds), *longest]


def picture(step: LadderStep) -> svg.Plot | None:
    """Two bars for each term of the predicted times, and two for the whole; None without predictions."""
    rows = _terms(step)
    if not rows:
        return None
    name, wide = f"{step.old.rung}-{step.new.rung}", (svg.WIDTH - LEFT - RIGHT) / max(rows[0][1:])
    parts = []
    for place, (term, *pair) in enumerate(rows):
        parts.append(svg.label(LEFT - 10, place * ROW + ROW / 2, term, "muted", 12, "end"))
        for top, seconds, shade in zip((4, 20), pair, ("soft", "accent"), strict=True):
            middle, end = place * ROW + top + 7, LEFT + seconds * wide
            parts.append(svg.cell(LEFT, middle - 7, seconds * wide, 14, shade))
            parts.append(svg.label(end + 6, middle, f"{numerals.digits(seconds * 1e6)} µs", size=10, anchor="start"))
    described = f"the predicted times of {step.old.rung} and {step.new.rung}, by what takes them"
    drawing = svg.svg(described, ROW * len(rows) + 4, parts)
    caption = f"Above, pale: {step.old.rung}. Below: {step.new.rung}. Shorter is faster; units overlap."
    return svg.Plot(name, "The time that moved", caption, drawing)


def show_step(step: LadderStep, console: Console) -> None:
    """Print a step: the sentence, the counters, the times, then the lines that changed."""
    console.print(Text(step.title, style="bold"))
    console.print(Text(summary(step)))
    for sheet in sheets(step):
        console.print(Group(*laid_out(sheet, console.width)))
    show_difference(step.difference, console)


def step_page(step: LadderStep, timelines: Sequence[WarpTimeline] = ()) -> str:
    """Return the same as one self-contained HTML page, with the picture, and one of each timeline."""
    plots = [
        replace(plot := warps_picture(each, f"warps-{place}"), title=f"{each.kernel}: {plot.title}")
        for place, each in enumerate(timelines, 1)
    ]
    first = picture(step)
    return render("step.html", __package__, title=step.title, summary=summary(step), sheets=sheets(step),
                  plots=[first, *plots] if first else plots, difference=step.difference,
                  lines=colored(step.difference))  # fmt: skip
