"""The ladder on the emulator as one self-contained HTML page, with all counters and a picture for each rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.ticker import LogLocator, NullFormatter

from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery.pages import numerals, rendering
from gemmery.pages.pictures import pictures
from gemmery.pages.svg import NUMBER, RIVAL, SERIES, TOKENS, Plot, annotate, axes, legend, name_rows, render
from gemmery.report.emulated_tables import (
    COUNTED,
    ROOF,
    by_size,
    complaints,
    described,
    emulated_sheets,
    over_parent,
    overviews,
    peaks,
    predicted_sheets,
    verdict,
)
from gemmery.report.ladder_tables import tree
from gemmery.rung_counts import EmulatedLadder, EmulatedRung

ROW = 26  # height of a rung
INTRODUCTION = (
    "Each rung multiplied two small matrices here. Its result was checked, and what it did was counted; no time was "
    "measured. Read the first table from top to bottom: what falls from a rung to the next is what the rung saves. "
    '"Rung by rung" says what each changes, and draws its costliest access to memory.'
)
COLOURS = dict(zip(("compute", "memory", "shared", "issue"), (RIVAL, *SERIES[1:4]), strict=True))


def emulated_page(ladder: EmulatedLadder) -> str:
    """Return the page of a ladder, or of a sweep, whose rungs have names of their own."""
    ran = {rung.rung for rung in ladder.rungs}
    rungs = tuple(rung for rung in CUDA if rung.name in ran)
    title = "The ladder" if rungs else "The sweep"
    return rendering.render(
        "emulated.html",
        __package__,
        title=f"{title} on the emulator, as {ladder.device.name}",
        heading=f"{title}, emulated",
        where=f"{described(ladder.device)}, on the emulator · {ladder.started[:16].replace('T', ' ')} UTC",
        verdict=verdict(ladder),
        introduction=INTRODUCTION if rungs else "",
        complaints=complaints(ladder),
        overviews=(*overviews(ladder), *predicted_sheets(ladder)),
        meaning=(COUNTED, ROOF, peaks(ladder.device)),
        branches=tree(rungs),
        gains={run.rung: over_parent(ladder, run) for run in by_size(ladder)[-1]} if ladder.rungs else {},
        roofs=roofs(ladder),
        lessons=list(_lessons(ladder, rungs)),
        sheets=emulated_sheets(ladder),
    )


def _lessons(ladder: EmulatedLadder, rungs: Sequence[Rung]) -> Iterator[tuple[Rung, str, Plot | None]]:
    """Each rung with its claims, and a picture of its costliest access to shared memory, or else to global memory."""
    explained: set[str] = set()
    for rung in rungs:
        counters = {name.replace("_a_", " per ").replace("_", " "): value for name, value in rung.expect.items()}
        claims = ", ".join(f"{name} {value:g}" for name, value in counters.items())
        note = f"Expected where all tiles are whole: {claims}." if claims else ""
        yield rung, note, _picture(ladder, rung.name, explained)


def _picture(ladder: EmulatedLadder, name: str, explained: set[str]) -> Plot | None:
    """The picture of a rung; the kinds of pictures on the page so far are `explained`, and are not again."""
    run = next((run for run in ladder.rungs if run.rung == name and not run.refused), None)
    if run is None:
        return None
    plots = {plot.name: plot for plot in pictures(run.chosen, run.source, f"{name}-", frozenset(explained))}
    for kind in ("banks", "sectors"):
        if plot := plots.get(f"{name}-{kind}-1"):
            explained.add(kind)
            return plot
    return None


def roofs(ladder: EmulatedLadder) -> tuple[Plot, ...]:
    """A figure for each size: every rung that ran with its four roofs."""
    sizes = [[run for run in runs if not run.refused] for runs in by_size(ladder)]
    return tuple(_roofs(runs[0].size, runs) for runs in sizes if runs)


def _roofs(size: int, rungs: list[EmulatedRung]) -> Plot:
    times = [time * 1e6 for run in rungs for time in run.roofs.values() if time]
    with axes(ROW * len(rungs) + 90) as on:
        on.set_xscale("log")
        low, high = min(times) / 1.5, max(times) * 1.6
        for place, run in enumerate(rungs):
            top = run.roof_seconds * 1e6
            on.barh(place, top - low, left=low, height=0.5, color=TOKENS["soft"], linewidth=0)
            annotate(on, numerals.digits(top), (top, place), (9, 0), va="center", size=11)
        for name, colour in COLOURS.items():
            points = [(run.roofs[name] * 1e6, place) for place, run in enumerate(rungs) if run.roofs[name]]
            if points:
                x, y = zip(*points, strict=True)
                on.plot(x, y, "o", color=colour, label=name, zorder=4)
        on.set(xlim=(low, high), ylim=(len(rungs) - 0.4, -0.6))
        name_rows(on, range(len(rungs)), [_label(run, rungs[0]) for run in rungs], code_size=11)
        on.xaxis.set_major_locator(LogLocator(10))
        on.xaxis.set_major_formatter(NUMBER)
        on.xaxis.set_minor_formatter(NullFormatter())
        legend(on)
        on.set_xlabel("µs")
        svg = render(on, f"roofs-{size}", f"the four roofs of every rung at n = {size}")
    caption = (
        "Each dot is the time under one limit of the device, without caches, with which it may take less; the bar "
        "reaches to the longest, the roof. Shorter is better. The axis is logarithmic."
    )
    return Plot(f"roofs-{size}", f"The roofs of every rung, n = {size}", caption, svg)


def _label(run: EmulatedRung, first: EmulatedRung) -> str:
    vector = ", vector" if 1 in (run.m, run.n) else ""
    dtype = f", {run.dtype}" if run.dtype != first.dtype else ""
    return f"{run.rung}{dtype}{vector}"
