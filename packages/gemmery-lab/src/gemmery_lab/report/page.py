"""A run, or the ladder on the emulator, as one self-contained HTML page: no script, font or image from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gemmery.ladder.cuda import CUDA
from gemmery.ladder.diff import pseudocode
from gemmery.ladder.rung import Rung
from gemmery_emulator.pages import numerals, svg, writing
from gemmery_emulator.pages.pictures import pictures
from gemmery_lab.measure.record import Measurement, Run
from gemmery_lab.report import emulated_tables, words
from gemmery_lab.report.curves import blocks, curves, plotted, roofline, seconds, sweep_plot, vectors
from gemmery_lab.report.emulated_tables import by_size
from gemmery_lab.report.ladder_steps import place, steps
from gemmery_lab.report.suite_tables import OWN, product, tournaments
from gemmery_lab.report.tables import Records, results, sheets, tree
from gemmery_lab.report.words import Group, doubts, fullest, gain, gains, label, largest, over_fastest, rival, speedup
from gemmery_lab.rung_counts import EmulatedLadder, EmulatedRung

BAR_ROW = 52  # height of one rung in the bars


def figures(run: Run, rungs: Sequence[Rung] = ()) -> tuple[svg.Plot, ...]:
    """Return every figure that a run has records for."""
    parts = results(run, rungs).parts
    tried = (replace(of, measurements=tuple(m for m in of.measurements if m.seconds or m.refused)) for of in parts)
    plots = (plot for of in tried for kind in of.experiment.figures for plot in DRAWINGS[kind](of))
    return tuple(plot for plot in plots if plot is not None)


def _of_products(records: Records) -> tuple[Measurement, ...]:
    """The records of a suite without those of its tournaments."""
    cases = tournaments(records.measurements)
    return tuple(m for m in records.measurements if m.case not in cases)


DRAWINGS: dict[str, Callable[[Records], Sequence[svg.Plot | None]]] = {
    "bars": lambda of: [bars(fullest(of.problems), of.rungs)],
    "rates": lambda of: [curves(of.measurements, of.machine)],
    "times": lambda of: [seconds(of.measurements)],
    "blocks": lambda of: [blocks(of.measurements, of.machine)],
    "sweep": lambda of: [sweep_plot(of.measurements, of.machine, of.experiment)],
    "rung_roofline": lambda of: [roofline(of.measurements, of.experiment.suite, labeled=True)],
    "roofline": lambda of: [
        roofline([m for m in _of_products(of) if m.kernel == OWN], of.experiment.suite, labeled=False)
    ],
    "tournaments": lambda of: [
        vectors(case, [m for m in of.measurements if m.case == case]) for case in tournaments(of.measurements)
    ],
    "speedups": lambda of: [standing(of.experiment.suite, _of_products(of))],
}


def bars(group: Group, rungs: Sequence[Rung]) -> svg.Plot | None:
    """One bar for each rung that ran one problem, with the peaks and the rivals as lines across them."""
    by_name = {rung.name: rung for rung in rungs}
    ran = [m for m in group.rungs if m.seconds]
    if not ran:
        return None
    lines = _limits(group)
    top = 1.01 * max([rate for rate, *_ in lines] + [words.reached(m) for m in group.all])
    rate = words.rate(group.first)
    steps = list[str]()
    with svg.axes(BAR_ROW * len(ran) + 110) as on:
        _vertical(on, lines, len(ran), top)
        _in_columns(on, -0.68, (rate, "% peak", "× parent"), va="center", size=11, color=svg.MUTED)
        for place, m in enumerate(ran):
            rung = by_name[m.kernel]
            ratio, spread = speedup(m, rung.parent, group) or (None, 0.0)
            shade = svg.TOKENS["soft" if ratio is not None and ratio < 1 - spread else "accent"]
            on.barh(place - 0.12, words.reached(m), height=0.46, color=shade, linewidth=0)
            steps.append(numerals.times(ratio, spread, ranged=False))
            texts = numerals.digits(words.reached(m)), numerals.percent(words.share(m)), steps[-1]
            _in_columns(on, place - 0.12, texts, va="center_baseline")
            on.text(0, place + 0.3, rung.idea, size=11, color=svg.MUTED, va="center", bbox=svg.HALO, zorder=5)
        on.set(xlim=(0, top), ylim=(len(ran) - 0.45, HEADROOM))
        svg.name_rows(on, [place - 0.12 for place in range(len(ran))], [m.kernel for m in ran], code_size=12)
        on.set_xlabel(rate)
        drawing = svg.render(on, "ladder", f"{rate} of every rung at {words.shape(group.first)}")
    title = f"The ladder at {words.shape(group.first)}, {words.types(group.first)}"
    caption = (
        f"{rate}: longer is faster. × parent is the speed-up over the rung's parent; a pale bar is slower than its "
        f"parent. The lines are the measured peak and {words.versioned(rival(group), group.rivals)} in the same run."
    )
    caption += " ~ marks a tie: a difference smaller than its spread." * any(step.startswith("~") for step in steps)
    if parted := [m.kernel for m in ran if m.kernel.startswith(words.IN_PARTS)]:
        caption += f" On another unit, by products of parts: {', '.join(parted)}."
    parents = dict.fromkeys(by_name[m.kernel].parent for m in ran)
    unmeasured = [name for name in parents if name and name not in {m.kernel for m in group.rungs}]
    caption += f" Parents without a measurement: {', '.join(unmeasured)}." if unmeasured else ""
    absent = [m.kernel for m in group.rungs if not m.seconds]
    caption += f" Not run: {', '.join(absent)}." if absent else ""
    return svg.Plot("ladder", title, caption, drawing)


COLUMNS = (1.1, 1.2, 1.32)  # right edges of the columns of figures, in widths of the axes
HEADROOM = -1.25


def _in_columns(on: Axes, y: float, texts: Sequence[str], columns: Sequence[float] = COLUMNS, **style: Any) -> None:
    """The figures of a rung right of its bar, or their headings."""
    for column, text in zip(columns, texts, strict=True):
        on.text(column, y, text, transform=on.get_yaxis_transform(), ha="right", **style)


def _limits(group: Group) -> list[tuple[float, str, str, str]]:
    """Rate, words, color and dashes of each line across the bars."""
    peaks = {words.place(m): words.reached(m, m.peak_gflops) for m in group.all if m.peak_gflops}
    is_named = len(peaks) > 1 or group.first.unit
    lines = [(rate, f"peak, {place}" if is_named else "peak", svg.INK, "-") for place, rate in sorted(peaks.items())]
    rivals = [m for m in group.rivals if m.seconds]
    several = len({m.threads for m in rivals}) > 1
    for m in rivals:
        name = words.versioned(m.kernel, [m]) + (f", {words.cores(m.threads)}" if several else "")
        lines.append((words.reached(m), name, svg.RIVAL, "--"))
    return lines


def _vertical(on: Axes, lines: Sequence[tuple[float, str, str, str]], rows: int, top: float) -> None:
    """Lines from their labels down past the last bar; of two close lines the right one has the higher label."""
    level, last = 0, math.inf
    for rate, name, color, dashes in sorted(lines, reverse=True):
        level = level + 1 if last - rate < 0.22 * top else 0
        last, height = rate, HEADROOM + 0.12 + 0.27 * level
        spans = [(-0.36, height - 0.1), *((row - 0.42, row + 0.14) for row in range(rows))]  # not across the ideas
        for span in spans:
            on.plot([rate, rate], span, color=color, linestyle=dashes, linewidth=1.5, zorder=3)
        label = f"{name}: {numerals.digits(rate)}"
        on.text(rate - 0.008 * top, height, label, color=color, ha="right", va="center", size=11)


def standing(suite: str, measurements: Sequence[Measurement]) -> svg.Plot | None:
    """Speed-up of the product over each rival, one row for each problem; a bar of spread at each point."""
    own = [m for m in measurements if m.kernel == OWN and m.versus]
    if not own:
        return None
    rivals = tuple(dict.fromkeys(rival for m in own for rival in m.versus))
    several = len({m.threads for m in own}) > 1
    with svg.axes(26 * len(own) + 84) as on:
        on.set_xscale("log", base=2)
        for index, rival in enumerate(rivals):
            points = [(m.versus[rival], at, m.spread.get(rival, 0.0)) for at, m in enumerate(own) if rival in m.versus]
            x, y, margin = zip(*points, strict=True)
            shade, name = svg.SERIES[index % len(svg.SERIES)], words.versioned(rival, measurements)
            on.errorbar(x, y, xerr=margin, fmt="o", color=shade, linewidth=1.5, label=name)
        on.axvline(1, color=svg.INK, linewidth=1.5)
        low, high = on.get_xlim()
        on.set(xlim=(min(low, 0.8), max(high, 1.25)), ylim=(len(own) - 0.4, -0.6))
        names = [product(m) + (f", {words.place(m)}" if several else "") for m in own]
        svg.name_rows(on, range(len(own)), names)
        on.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        on.xaxis.set_minor_formatter(NullFormatter())
        svg.legend(on)
        on.set_xlabel("times faster than the rival")
        label = "speed-up over each rival on every problem"
        return plotted(on, f"standing-{suite}", suite.replace("_", " "), words.NOTES["speedups"], label)


def page(run: Run, rungs: Sequence[Rung] = ()) -> str:
    """Return the page of a run."""
    of = results(run, rungs)
    problems, climbed = of.problems, of.climbed
    over, fastest = (gains(climbed, problems), largest(problems)) if problems else ({}, None)
    return writing.render(
        "run.html",
        __package__,
        title=f"{words.title(run)} on {words.processor(run.machine)[0]}",
        run=run,
        words=words,
        numerals=numerals,
        fastest=fastest,
        tiles=_tiles(fastest) if fastest and not doubts(run) else (),
        plots=figures(run, rungs),
        branches=tree(climbed) if len(climbed) > 1 else (),
        gains={rung.name: f"{over[rung.name]} {rung.parent}" for rung in climbed if over.get(rung.name)},
        gains_at=words.shape(fullest(problems).first) if problems else "",
        sheets=sheets(run, rungs),
        lessons=[(rung, _measured(rung, problems), pseudocode(rung.source, rung.name)) for rung in climbed],
    )


def _tiles(group: Group) -> list[tuple[str, str]]:
    """The key figures of a problem of the ladder."""
    ran = [m for m in group.rungs if m.seconds]
    if not ran:
        return []
    best = max(ran, key=lambda m: m.gflops)
    tiles = [(numerals.digits(words.reached(best)), f"{words.rate(best)} by {best.kernel}")]
    if part := words.share(best):
        peak = numerals.digits(words.reached(best, best.peak_gflops))
        tiles.append((numerals.percent(part), f"of the measured peak, {peak}"))
    if over := over_fastest(best, group):
        tiles.append((numerals.times(*over[1]), f"the speed of {label(over[0], group)}"))
    if best is not ran[0]:
        tiles.append((numerals.times(ran[0].seconds / best.seconds), f"the speed of {ran[0].kernel}"))
    return tiles


def _measured(rung: Rung, problems: Sequence[Group]) -> str:
    """A rung's gain over its parent at every size, or its times if it has none, and its config."""
    own = [(group, m) for group in problems for m in group.rungs if m.kernel == rung.name]
    if rung.parent:
        results = [f"{over} at {words.shape(m)}" for group, m in own if (over := gain(m, rung.parent, group))]
    else:
        results = [f"{numerals.duration(m.seconds)} at {words.shape(m)}" for _, m in own if m.seconds]
    configs = {f"{key} {value}" for _, m in own for key, value in rung.explicit(m.config).items()}
    against = f"Against {rung.parent}: " if rung.parent else ""
    reached = f"{against}{', '.join(results)}." if results else ""
    return reached + (f" With {', '.join(sorted(configs))}." if configs else "")


ROW = 26  # height of a rung
COLORS = dict(zip(("compute", "memory", "shared", "issue"), (svg.RIVAL, *svg.SERIES[1:4]), strict=True))


def emulated_page(ladder: EmulatedLadder) -> str:
    """Return the page of a ladder, or of a sweep, whose rungs have names of their own."""
    ran = {rung.rung for rung in ladder.rungs}
    rungs = tuple(rung for rung in CUDA if rung.name in ran)
    title = "The ladder" if rungs else "The sweep"
    lessons, explained = list[tuple[Rung, str, svg.Plot | None]](), set[str]()
    for rung in rungs:  # each with its claims, and a picture of its costliest access to memory
        counters = {name.replace("_a_", " per ").replace("_", " "): value for name, value in rung.expect.items()}
        claims = ", ".join(f"{name} {value:g}" for name, value in counters.items())
        note = f"Expected where all tiles are whole: {claims}." if claims else ""
        lessons.append((rung, note, _picture(ladder, rung.name, explained)))
    return writing.render(
        "emulated.html",
        __package__,
        title=f"{title} on the emulator, as {ladder.device.name}",
        heading=f"{title}, emulated",
        ladder=ladder,
        tables=emulated_tables,
        branches=tree(rungs),
        gains=emulated_tables.gains(ladder),
        climb=predicted_bars(ladder),
        roofs=roofs(ladder),
        lessons=lessons,
        steps={each.new.rung: (each.old.rung, place(each.old.rung, each.new.rung)) for each in steps(ladder)},
    )


def _picture(ladder: EmulatedLadder, name: str, explained: set[str]) -> svg.Plot | None:
    """The picture of a rung, of shared memory or else of global memory; `explained` kinds are not explained again."""
    run = next((run for run in ladder.rungs if run.rung == name and not run.refused), None)
    if run is None:
        return None
    plots = {plot.name: plot for plot in pictures(run.chosen, run.source, f"{name}-", frozenset(explained))}
    kind = next((kind for kind in ("banks", "sectors") if f"{name}-{kind}-1" in plots), "")
    explained |= {kind}
    return plots.get(f"{name}-{kind}-1")


def predicted_bars(ladder: EmulatedLadder) -> svg.Plot | None:
    """One bar for each rung that multiplies squares, with its predicted rate; dots are records of the card."""
    rows = [row for row in ladder.predicted if row.prediction and row.m == row.n == row.k]
    rows = [row for row in rows if row.n == max(row.n for row in rows)]
    if len(rows) < 2:
        return None
    rates = [row.rate() / 1e12 for row in rows]
    n, name = rows[0].n, ladder.device.name
    with svg.axes(ROW * len(rows) + 70) as on:
        on.set_xscale("log")
        low, high = min(rates) / 1.6, max(rates) * 1.4
        for place, (row, rate) in enumerate(zip(rows, rates, strict=True)):
            shade = svg.TOKENS["soft" if 0 < emulated_tables.predicted_gain(ladder, row) < 1 else "accent"]
            on.barh(place, rate - low, left=low, height=0.6, color=shade, linewidth=0)
            if row.measured:
                on.plot(row.rate(row.measured) / 1e12, place, "o", color=svg.RIVAL, zorder=5)
            texts = numerals.digits(rate), row.prediction.bound if row.prediction else ""
            _in_columns(on, place, texts, COLUMNS[::2], va="center_baseline")
        _in_columns(on, -1, ("TFLOP/s", "bound by"), COLUMNS[::2], size=11, color=svg.MUTED)
        on.set(xlim=(low, high), ylim=(len(rows) - 0.4, -1.4))
        on.xaxis.set_major_formatter(svg.NUMBER)
        on.grid(False, axis="y")
        svg.name_rows(on, range(len(rows)), [f"{row.rung}, {row.dtype}" for row in rows])
        on.set_xlabel("TFLOP/s, logarithmic")
        caption = "Longer is faster; a pale bar is slower than its parent. No time was measured here."
        caption += f" The dots are stored measurements on {name}." * any(row.measured for row in rows)
        label = f"predicted TFLOP/s of every rung at n = {n} on {name}"
        return plotted(on, "predicted", f"The ladder at n = {n}, predicted for {name}", caption, label)


def roofs(ladder: EmulatedLadder) -> tuple[svg.Plot, ...]:
    """A figure for each size: every rung that ran with its four roofs."""
    sizes = [[run for run in runs if not run.refused] for runs in by_size(ladder)]
    return tuple(_roofs(runs[0].size, runs) for runs in sizes if runs)


def _roofs(size: int, rungs: list[EmulatedRung]) -> svg.Plot:
    times = [time * 1e6 for run in rungs for time in run.roofs.values() if time]
    with svg.axes(ROW * len(rungs) + 90) as on:
        on.set_xscale("log")
        low, high = min(times) / 1.5, max(times) * 1.6
        for place, run in enumerate(rungs):
            top = run.roof_seconds * 1e6
            on.barh(place, top - low, left=low, height=0.5, color=svg.TOKENS["soft"], linewidth=0)
            svg.annotate(on, numerals.digits(top), (top, place), (9, 0), va="center", size=11)
        for name, color in COLORS.items():
            points = [(run.roofs[name] * 1e6, place) for place, run in enumerate(rungs) if run.roofs[name]]
            if points:
                x, y = zip(*points, strict=True)
                on.plot(x, y, "o", color=color, label=name, zorder=4)
        on.set(xlim=(low, high), ylim=(len(rungs) - 0.4, -0.6))
        types = [f", {run.dtype}" if run.dtype != rungs[0].dtype else "" for run in rungs]
        vectors = [", vector" if 1 in (run.m, run.n) else "" for run in rungs]
        names = [run.rung + dtype + vector for run, dtype, vector in zip(rungs, types, vectors, strict=True)]
        svg.name_rows(on, range(len(rungs)), names, code_size=11)
        on.xaxis.set_major_locator(LogLocator(10))
        on.xaxis.set_major_formatter(svg.NUMBER)
        on.xaxis.set_minor_formatter(NullFormatter())
        svg.legend(on)
        on.set_xlabel("µs")
        title, label = f"The roofs of every rung, n = {size}", f"the four roofs of every rung at n = {size}"
        return plotted(on, f"roofs-{size}", title, words.NOTES["four_roofs"], label)
