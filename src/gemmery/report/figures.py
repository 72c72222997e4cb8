"""The figures of a run: the ladder as bars, suites as speed-ups, and the curves of curves.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from gemmery.bench.record import Measurement, Run
from gemmery.experiments import FigureKind
from gemmery.ladder.rung import Rung
from gemmery.pages import numerals
from gemmery.pages.svg import HALO, INK, MUTED, RIVAL, SERIES, TOKENS, Plot, axes, legend, name_rows, render
from gemmery.report import words
from gemmery.report.curves import blocks, curves, roofline, seconds, sweep_plot, vectors
from gemmery.report.suite_tables import OWN, product, tournaments
from gemmery.report.tables import Records, Results, results
from gemmery.report.words import Group, fullest, rival, speedup

ROW = 52  # height of one rung in the bars


def figures(run: Run, rungs: Sequence[Rung] = ()) -> tuple[Plot, ...]:
    """Return every figure that a run has records for.

    >>> [plot.name for plot in figures(run, CPU)]  # doctest: +SKIP
    ['ladder', 'curves', 'roofline']
    """
    return drawn(results(run, rungs))


def drawn(run: Results) -> tuple[Plot, ...]:
    """Return the figures of a run that has been grouped."""
    plots = (plot for of in run.parts for kind in of.experiment.figures for plot in DRAWINGS[kind](_tried(of)))
    return tuple(plot for plot in plots if plot is not None)


def _tried(records: Records) -> Records:
    """Only the records that ran or were refused."""
    return replace(records, measurements=tuple(m for m in records.measurements if m.seconds or m.refused))


def _of_products(records: Records) -> tuple[Measurement, ...]:
    """The records of a suite without those of its tournaments."""
    cases = tournaments(records.measurements)
    return tuple(m for m in records.measurements if m.case not in cases)


def _tournaments(records: Records) -> list[Plot | None]:
    of = records.measurements
    return [vectors(case, [m for m in of if m.case == case]) for case in tournaments(of)]


DRAWINGS: dict[FigureKind, Callable[[Records], Sequence[Plot | None]]] = {
    FigureKind.BARS: lambda of: [bars(fullest(of.problems), of.rungs)],
    FigureKind.RATES: lambda of: [curves(of.measurements, of.machine)],
    FigureKind.TIMES: lambda of: [seconds(of.measurements)],
    FigureKind.BLOCKS: lambda of: [blocks(of.measurements, of.machine)],
    FigureKind.SWEEP: lambda of: [sweep_plot(of.measurements, of.machine, of.experiment)],
    FigureKind.RUNG_ROOFLINE: lambda of: [roofline(of.measurements, of.experiment.suite, labelled=True)],
    FigureKind.ROOFLINE: lambda of: [
        roofline([m for m in _of_products(of) if m.kernel == OWN], of.experiment.suite, labelled=False)
    ],
    FigureKind.TOURNAMENTS: _tournaments,
    FigureKind.SPEEDUPS: lambda of: [standing(of.experiment.suite, _of_products(of))],
}


def bars(group: Group, rungs: Sequence[Rung]) -> Plot | None:
    """One bar for each rung that ran one problem, with the peaks and the rivals as lines across them."""
    by_name = {rung.name: rung for rung in rungs}
    ran = [m for m in group.rungs if m.seconds]
    if not ran:
        return None
    lines = _limits(group)
    top = 1.01 * max([rate for rate, *_ in lines] + [words.reached(m) for m in group.all])
    rate = words.rate(group.first)
    with axes(ROW * len(ran) + 110) as on:
        _vertical(on, lines, len(ran), top)
        _in_columns(on, -0.68, (rate, "% peak", "× parent"), va="center", size=11, color=MUTED)
        for place, m in enumerate(ran):
            rung = by_name[m.kernel]
            gain = speedup(m, rung.parent, group)
            lost = gain is not None and gain[0] < 1 - gain[1]
            on.barh(
                place - 0.12, words.reached(m), height=0.46, color=TOKENS["soft" if lost else "accent"], linewidth=0
            )
            step = numerals.times(gain[0] if gain else None, gain[1] if gain else 0.0, ranged=False)
            texts = numerals.digits(words.reached(m)), numerals.percent(words.share(m)), step
            _in_columns(on, place - 0.12, texts, va="center_baseline")
            on.text(0, place + 0.3, rung.idea, size=11, color=MUTED, va="center", bbox=HALO, zorder=5)
        on.set(xlim=(0, top), ylim=(len(ran) - 0.45, HEADROOM))
        name_rows(on, [place - 0.12 for place in range(len(ran))], [m.kernel for m in ran], code_size=12)
        on.set_xlabel(rate)
        svg = render(on, "ladder", f"{rate} of every rung at {words.shape(group.first)}")
    title = f"The ladder at {words.shape(group.first)}, {words.types(group.first)}"
    caption = (
        f"{rate}: longer is faster. × parent is the speed-up over the rung's parent; a pale bar is slower than its "
        f"parent. The lines are the measured peak and {words.versioned(rival(group), group.rivals)} in the same run."
    )
    if parted := [m.kernel for m in ran if m.kernel.startswith(words.IN_PARTS)]:
        caption += f" On another unit, by products of parts: {', '.join(parted)}."
    absent = [m.kernel for m in group.rungs if not m.seconds]
    caption += f" Not run: {', '.join(absent)}." if absent else ""
    return Plot("ladder", title, caption, svg)


COLUMNS = (1.1, 1.2, 1.32)  # right edges of the columns of figures, in widths of the axes
HEADROOM = -1.25


def _in_columns(on: Axes, y: float, texts: Sequence[str], **style: Any) -> None:
    """The figures of a rung right of its bar, or their headings."""
    for column, text in zip(COLUMNS, texts, strict=True):
        on.text(column, y, text, transform=on.get_yaxis_transform(), ha="right", **style)


def _limits(group: Group) -> list[tuple[float, str, str, str]]:
    """Rate, words, colour and dashes of each line across the bars."""
    peaks = {words.place(m): words.reached(m, m.peak_gflops) for m in group.all if m.peak_gflops}
    is_named = len(peaks) > 1 or group.first.unit
    lines = [(rate, f"peak, {place}" if is_named else "peak", INK, "-") for place, rate in sorted(peaks.items())]
    rivals = [m for m in group.rivals if m.seconds]
    several = len({m.threads for m in rivals}) > 1
    for m in rivals:
        name = words.versioned(m.kernel, [m]) + (f", {words.cores(m.threads)}" if several else "")
        lines.append((words.reached(m), name, RIVAL, "--"))
    return lines


def _vertical(on: Axes, lines: Sequence[tuple[float, str, str, str]], rows: int, top: float) -> None:
    """Lines from their labels down past the last bar; of two close lines the right one has the higher label."""
    level, last, levels = 0, math.inf, []
    ordered = sorted(lines, reverse=True)
    for rate, *_ in ordered:
        level = level + 1 if last - rate < 0.22 * top else 0
        last = rate
        levels.append(level)
    for (rate, name, colour, dashes), level in zip(ordered, levels, strict=True):
        height = HEADROOM + 0.12 + 0.27 * level
        spans = [(-0.36, height - 0.1), *((row - 0.42, row + 0.14) for row in range(rows))]  # not across the ideas
        for span in spans:
            on.plot([rate, rate], span, color=colour, linestyle=dashes, linewidth=1.5, zorder=3)
        label = f"{name}: {numerals.digits(rate)}"
        on.text(rate - 0.008 * top, height, label, color=colour, ha="right", va="center", size=11)


def standing(suite: str, measurements: Sequence[Measurement]) -> Plot | None:
    """Speed-up of the product over each rival, one row for each problem; a bar of spread at each point."""
    own = [m for m in measurements if m.kernel == OWN and m.versus]
    if not own:
        return None
    rivals = tuple(dict.fromkeys(rival for m in own for rival in m.versus))
    several = len({m.threads for m in own}) > 1
    with axes(26 * len(own) + 84) as on:
        on.set_xscale("log", base=2)
        for index, rival in enumerate(rivals):
            points = [(m.versus[rival], at, m.spread.get(rival, 0.0)) for at, m in enumerate(own) if rival in m.versus]
            x, y, margin = zip(*points, strict=True)
            shade, name = SERIES[index % len(SERIES)], words.versioned(rival, measurements)
            on.errorbar(x, y, xerr=margin, fmt="o", color=shade, linewidth=1.5, label=name)
        on.axvline(1, color=INK, linewidth=1.5)
        low, high = on.get_xlim()
        on.set(xlim=(min(low, 0.8), max(high, 1.25)), ylim=(len(own) - 0.4, -0.6))
        names = [product(m) + (f", {words.place(m)}" if several else "") for m in own]
        name_rows(on, range(len(own)), names)
        on.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        on.xaxis.set_minor_formatter(NullFormatter())
        legend(on)
        on.set_xlabel("times faster than the rival")
        svg = render(on, f"standing-{suite}", "speed-up over each rival on every problem")
    caption = (
        "Right of the line gemmery is faster. A point is the median of ratios taken pair by pair, its bar their spread."
    )
    return Plot(f"standing-{suite}", suite.replace("_", " "), caption, svg)
