"""Figures on logarithmic axes: curves against a size or another swept quantity, and the roofline."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from gemmery.cuda.roofline import Roofline
from gemmery_emulator.pages import numerals, svg
from gemmery_lab.experiments import Axis, Experiment
from gemmery_lab.measure.record import MachineRecord, Measurement
from gemmery_lab.report import words
from gemmery_lab.report.tables import along, marks, side
from gemmery_lab.report.words import is_square

LABEL = 15  # height of one line of labels
REASON = 36  # characters per line of a reason
DURATION = FuncFormatter(lambda value, _: re.sub(r"\.0+ ", " ", numerals.duration(value)))
Colors = Mapping[str, str]


class Curve(NamedTuple):
    """A curve: its name, which stands at its right end, and its points; x is None for a level line."""

    name: str
    color: str
    dashes: str
    points: Sequence[tuple[float | None, float]]


def plotted(on: Axes, name: str, title: str, caption: str, label: str) -> svg.Plot:
    """Return what stands on the axes as a figure; `label` says what it shows to who cannot see it."""
    return svg.Plot(name, title, caption, svg.render(on, name, label))


CurveEnd = tuple[str, tuple[float, float], str]  # the name, place and color of the end of a line


def curves(measurements: Sequence[Measurement], machine: MachineRecord) -> svg.Plot | None:
    """Rate against n, a line for each kernel, with the sizes at which three matrices fill each cache."""
    ran = [m for m in measurements if m.seconds and is_square(m)]
    if len({m.n for m in ran}) < 2:
        return None
    with svg.axes(460) as on:
        _kernels(on, ran, words.reached, colors(measurements))
        peaks = {words.place(m): words.reached(m, m.peak_gflops) for m in ran if m.peak_gflops}
        left, right = min(m.n for m in ran), max(m.n for m in ran)
        for index, (place, peak) in enumerate(sorted(peaks.items(), key=lambda item: item[1])):
            on.plot([left, right], [peak, peak], color=svg.INK, linewidth=1.5)
            name = f"peak, {place}" if len(peaks) > 1 or ran[0].unit else "peak"
            svg.annotate(on, name, (left, peak), (130 * index, 5), zorder=5)
        on.set_ylim(top=1.5 * max([*peaks.values(), *(words.reached(m) for m in ran)]))
        marked = _caches(on, machine, ran[0].dtype)
        on.set(xlabel="n", ylabel=words.rate(ran[0]))
        caption = words.NOTES["rates"] + words.NOTES["rates_in_caches"] * marked
        label = f"{words.rate(ran[0])} against n for every kernel"
        return plotted(on, "curves", "Speed against size", caption, label)


def seconds(measurements: Sequence[Measurement]) -> svg.Plot | None:
    """Time against n: on logarithmic axes every algorithm of n**3 operations is a line of the same slope."""
    ran = [m for m in measurements if m.seconds and is_square(m)]
    if len({m.n for m in ran}) < 2:
        return None
    with svg.axes(420) as on:
        _kernels(on, ran, lambda m: m.seconds, colors(measurements))
        on.yaxis.set_major_formatter(DURATION)
        on.set(xlabel="n", ylabel="time of one product")
        return plotted(on, "seconds", "Time against size", words.NOTES["times"], "time against n for every kernel")


def vectors(case: str, measurements: Sequence[Measurement]) -> svg.Plot | None:
    """Time of a row times a matrix against the matrix's columns, a line for each kernel of a tournament."""
    ran = [m for m in measurements if m.seconds and m.m == 1]
    if len({m.n for m in ran}) < 2 or len({(m.k, words.types(m)) for m in ran}) != 1:
        return None
    with svg.axes(520) as on:
        _kernels(on, ran, lambda m: m.seconds * 1e6, colors(measurements))
        on.set(xlabel=f"n: results of a sum of {ran[0].k} products", ylabel="µs")
        caption = "Time of one product; both axes are logarithmic. All kernels took turns at each n."
        drawing = svg.render(on, f"vectors-{case}", f"time against n for every kernel of {case}")
        return svg.Plot(f"vectors-{re.sub(r'[^a-z0-9]+', '-', case.lower())}", case, caption, drawing)


def blocks(measurements: Sequence[Measurement], machine: MachineRecord) -> svg.Plot | None:
    """Time against the side of a block, the caches marked, the best side named."""
    swept = sorted((m for m in measurements if m.seconds and "block" in m.config), key=lambda m: m.config["block"])
    if len(swept) < 2:
        return None
    best = min(swept, key=lambda m: m.seconds)
    sides = [m.config["block"] for m in swept]
    with svg.axes(420) as on:
        on.set_xscale("log", base=2)
        on.plot(sides, [m.seconds * 1e3 for m in swept], "-o", color=svg.SERIES[0])
        least, at = best.seconds * 1e3, best.config["block"]
        svg.annotate(on, f"{at}: {numerals.digits(least)} ms", (at, least), (0, 10), ha="center")
        for m in (m for m in measurements if m.seconds and "block" not in m.config):
            level = m.seconds * 1e3
            on.axhline(level, color=svg.RIVAL, linestyle="--", linewidth=1.5)
            label = f"{words.kernel(m.kernel)}: {numerals.digits(level)} ms"
            svg.annotate(on, label, (sides[0], level), (0, 5), color=svg.RIVAL, bbox=None)
        on.set_xlim(sides[0] / 1.2, sides[-1] * 1.2)
        on.set_ylim(0, 1.2 * max(m.seconds * 1e3 for m in measurements))
        marked = _caches(on, machine, best.dtype)
        on.set_xticks(sides, [str(side) for side in sides])
        on.xaxis.set_minor_locator(NullLocator())
        on.grid(False, axis="x")
        on.set(xlabel="side of a block", ylabel="ms")
        caption = words.NOTES["blocks"] + words.NOTES["blocks_in_caches"] * marked
        title = f"Block side at {words.shape(best)}, {words.types(best)}"
        return plotted(on, "blocks", title, caption, "time against the side of a block")


def sweep_plot(measurements: Sequence[Measurement], machine: MachineRecord, experiment: Experiment) -> svg.Plot | None:
    """Time against the varied quantity: a line for each rung and config, and one for cuBLAS."""
    axis, ran = experiment.axis, [m for m in measurements if m.seconds]
    values = sorted({value for m in measurements if (value := axis.of(m)) is not None})
    if len(values) < 2 or not ran:
        return None
    variants = along(measurements, axis)
    shades = dict(zip(variants, _shades(same[0].kernel for same in variants.values()), strict=True))
    points = {name: [(axis.of(m), m.seconds) for m in same if m.seconds] for name, same in variants.items()}
    lines = [Curve(name, shades[name], _dashes(same[0].kernel), points[name]) for name, same in variants.items()]
    with svg.axes(460) as on:
        svg.logarithmic(on, DURATION)
        on.set_xlim(values[0] / 1.15, values[-1] * (values[-1] / values[0]) ** 0.42)
        _ticks(on, values, 8)
        on.set(xlabel=axis.label, ylabel="time of one product")
        on.set_ylim(min(m.seconds for m in ran) / 1.6, 2.6 * max(m.seconds for m in ran))
        on.grid(False, axis="x")
        on.figure.tight_layout(pad=0.3)  # type: ignore[union-attr]
        _name(on, _draw(on, lines), 11)
        _mark(on, marks(measurements, axis, machine), 0, (-5, 6), ha="right", va="bottom", bbox=svg.HALO)
        _refusals(on, variants, axis, shades)
        shape = "" if axis.side else f"{words.shape(ran[0])}, "
        title = f"{experiment.title}, {shape}{words.types(ran[0])}"
        return plotted(on, experiment.suite, title, words.NOTES["sweep"], f"time against {axis.label}")


def roofline(measurements: Sequence[Measurement], suite: str, labeled: bool) -> svg.Plot | None:
    """Rate against intensity under the two roofs, bandwidth times intensity and the peak; kernels are `labeled`."""
    ran = [m for m in measurements if m.seconds and m.bytes and m.peak_gflops and m.bandwidth_gbs]
    if len({words.types(m) for m in ran}) != 1:
        return None  # each type has its own roof
    intensities = [m.flops / m.bytes for m in ran]
    scale = words.reached(ran[0], 1.0)  # a GPU's rates are shown in TFLOP/s
    roofs = {words.place(m): (scale * m.peak_gflops, m.bandwidth_gbs) for m in ran}
    ridges = [peak / bandwidth / scale for peak, bandwidth in roofs.values()]
    left, right = min([*intensities, *ridges]) / 16, max([*intensities, *ridges]) * 8
    with svg.axes(460) as on:
        svg.logarithmic(on)
        lowest, highest = min(words.reached(m) for m in ran), max(peak for peak, _ in roofs.values())
        on.set(xlim=(left, right), ylim=(lowest / 2.5, 3 * highest))
        on.xaxis.set_major_formatter(svg.NUMBER)
        on.set(xlabel="operations per byte that must move", ylabel=words.rate(ran[0]))
        on.figure.tight_layout(pad=0.3)  # type: ignore[union-attr]
        alike = len({bandwidth for _, bandwidth in roofs.values()}) == 1  # named once, with the highest peak
        for place, (peak, bandwidth) in sorted(roofs.items(), key=lambda item: item[1]):
            slopes(on, peak, bandwidth, scale, place if len(roofs) > 1 else "", peak < highest, alike)
        last = {(m.kernel, m.threads): m for m in sorted(ran, key=lambda m: m.flops)}  # the largest that each ran
        _points(on, ran, list(last.values()) if labeled else [], colors(measurements))
        above = any(words.reached(m) > 1.1 * scale * m.bandwidth_gbs * m.flops / m.bytes for m in ran)
        cached = " Matrices of a kernel above the slope stay in a cache, which is faster than memory." * above
        label = "rate against arithmetic intensity under the roofs of this machine"
        return plotted(on, f"roofline-{suite}", "Roofline", words.NOTES["rooflines"] + cached, label)


def roofline_plot(rung: str, device: str, loads: Roofline, once: Roofline) -> svg.Plot | None:
    """The roofline of one inspected rung: two points under the roofs of its device; None without a peak."""
    points = {"as it loads": loads, "each element once": once}
    peak, bandwidth = loads.peak, loads.bandwidth
    if not peak or not bandwidth or not all(point.intensity for point in points.values()):
        return None
    intensities = [peak / bandwidth, *(point.intensity for point in points.values())]
    left, right = min(intensities) / 6, max(intensities) * 6
    with svg.axes(300) as on:
        svg.logarithmic(on, FuncFormatter(lambda value, _: f"{value:,.0f}"))
        on.xaxis.set_major_formatter(svg.NUMBER)
        on.set(xlim=(left, right), ylim=(0.7 * bandwidth * left, 2.5 * peak))
        slopes(on, peak, bandwidth)
        for (name, point), color in zip(points.items(), svg.SERIES[:2], strict=True):
            x, y = point.intensity, point.attainable
            on.plot([x, x], [on.get_ylim()[0], y], ":", color=color, linewidth=1.5)
            on.plot(x, y, "o", color=color, zorder=5)
            away, align = (-8, "right") if x > (left * right) ** 0.5 else (8, "left")
            svg.annotate(on, name, (x, y), (away, -16), ha=align, color=color, zorder=6)
        on.set(xlabel="operations a byte", ylabel="GFLOP/s")
        label = f"the roofline of {rung} on {device}"
        return plotted(on, "roofline", "Roofline", words.NOTES["one_roofline"], label)


def slopes(
    on: Axes, peak: float, bandwidth: float, scale: float = 1, whose: str = "", below: bool = False, alike: bool = False
) -> None:
    """The two roofs, bandwidth times intensity and the peak, named above their lines or below.

    A GFLOP/s is `scale` of the units that the y axis shows. With bandwidths `alike` only the line above names it.
    """
    left, right = on.get_xlim()
    slope = scale * bandwidth
    ridge = peak / slope
    on.plot([left, ridge, right], [left * slope, peak, peak], color=svg.INK, linewidth=1.5, zorder=3)
    suffix = f", {whose}" if whose else ""
    away, align = (-6, "top") if below else (5, "bottom")
    svg.annotate(on, f"peak {numerals.digits(peak)}{suffix}", (ridge, peak), (6, away), va=align, bbox=None)
    if alike and below:
        return
    (x0, y0), (x1, y1) = on.transData.transform([(left, left * slope), (ridge, peak)])
    middle, name = left * (ridge / left) ** 0.25, f"memory {numerals.digits(bandwidth)} GB/s{'' if alike else suffix}"
    style = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor", "bbox": None}
    at, offset = (middle, middle * slope), (-0.6 * away, 0.6 * away)
    svg.annotate(on, name, at, offset, ha="center", va=align, **style)


def _points(on: Axes, ran: Sequence[Measurement], labeled: Sequence[Measurement], shades: Colors) -> None:
    for m in ran:
        alpha = 1 if m in labeled or not labeled else 0.45
        on.plot(m.flops / m.bytes, words.reached(m), "o", color=shades[m.kernel], alpha=alpha)
    names = _names(labeled)
    columns: dict[int, list[CurveEnd]] = {}  # near each other
    for m in labeled:
        end = names[m.kernel, m.threads], (m.flops / m.bytes, words.reached(m)), shades[m.kernel]
        columns.setdefault(round(math.log2(m.flops / m.bytes)), []).append(end)
    for column in columns.values():
        _name(on, column, 12)


def _kernels(on: Axes, ran: Sequence[Measurement], value: Callable[[Measurement], float], shades: Colors) -> None:
    """A line for each kernel against n, on logarithmic axes."""
    svg.logarithmic(on)
    lines = []
    for (kernel, threads), name in _names(ran).items():
        own = sorted((m for m in ran if (m.kernel, m.threads) == (kernel, threads)), key=lambda m: m.n)
        lines.append(Curve(name, shades[kernel], _dashes(kernel), [(m.n, value(m)) for m in own]))
    ends = _draw(on, lines)
    sizes = sorted({m.n for m in ran})
    on.set_xlim(sizes[0] / 1.08, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.3)
    for n in dict.fromkeys(at[0] for _, at, _ in ends):
        _name(on, [end for end in ends if end[1][0] == n], 12)
    _ticks(on, sizes, 12)
    on.grid(False, axis="x")


def _draw(on: Axes, lines: Sequence[Curve]) -> list[CurveEnd]:
    """The lines; their ends, where their names belong."""
    left, right = on.get_xlim()
    ends = []
    for line in lines:
        if not line.points:
            continue
        (first, level), (last, end) = line.points[0], line.points[-1]
        if first is None or last is None:
            on.axhline(level, color=line.color, linestyle="--", linewidth=1.5)
            ends.append((line.name, (left * (right / left) ** 0.8, level), line.color))
        else:
            x, y = zip(*line.points, strict=True)
            on.plot(x, y, line.dashes, marker="o", color=line.color, zorder=4)
            ends.append((line.name, (last, end), line.color))
    return ends


def _name(on: Axes, ends: Sequence[CurveEnd], size: int) -> None:
    """Names next to points on a logarithmic y axis, moved apart where they would overlap, below the axes' top."""
    on.get_ylim()  # Matplotlib updates the limits of both axes when it is asked for one
    places = [float(on.transData.transform(at)[1]) for _, at, _ in ends]
    scale = on.figure.dpi / 72
    gap, lowered = LABEL * scale, list(places)
    for rank, index in enumerate(sorted(range(len(places)), key=places.__getitem__, reverse=True)):
        lowered[index] = min(places[index], on.bbox.y1 - rank * gap)
    for (name, at, color), old, new in zip(ends, places, svg.spread(lowered, gap), strict=True):
        svg.annotate(on, name, at, (10, (new - old) / scale), color=color, va="center", size=size, zorder=6)


def _ticks(on: Axes, values: Sequence[int], most: int) -> None:
    """Ticks at the values, of many only at the powers of two."""
    marked = values if len(values) <= most else [value for value in values if value & (value - 1) == 0]
    on.set_xticks(marked, [str(value) for value in marked])
    on.xaxis.set_minor_locator(NullLocator())


def _names(ran: Iterable[Measurement]) -> dict[tuple[str, int], str]:
    """A label for each kernel and number of threads; it names the threads where a kernel ran with several numbers."""
    places = dict.fromkeys((m.kernel, m.threads) for m in ran)
    kernels = [kernel for kernel, _ in places]
    several = {at: f", {words.cores(at[1])}" if kernels.count(at[0]) > 1 else "" for at in places}
    return {at: words.kernel(at[0]) + threads for at, threads in several.items()}


def _dashes(kernel: str) -> str:
    return "--" if kernel in words.RIVALS else "-"


def _shades(kernels: Iterable[str]) -> list[str]:
    """A color for each line; all rivals share one."""
    own = itertools.cycle(svg.SERIES)
    return [svg.RIVAL if kernel in words.RIVALS else next(own) for kernel in kernels]


def colors(measurements: Iterable[Measurement]) -> Colors:
    """A color for each kernel, the same in every figure of a suite."""
    kernels = tuple(dict.fromkeys(m.kernel for m in measurements))
    return dict(zip(kernels, _shades(kernels), strict=True))


def _caches(on: Axes, machine: MachineRecord, dtype: str) -> bool:
    """Dotted lines at the sides of which three squares fill a cache; False where none is in view."""
    places = [(side(size, dtype), f"{name} {numerals.size(size)}") for name, size in words.caches(machine)]
    return _mark(on, places, 1, (4, -4), va="top", bbox=None)


def _mark(
    on: Axes, places: Sequence[tuple[float, str]], height: float, offset: tuple[float, float], **style: Any
) -> bool:
    """Dotted vertical lines with their names at a height of the axes, where they are in view; False if none is."""
    low, high = on.get_xlim()
    in_view = [(place, name) for place, name in places if low < place < high]
    for place, name in in_view:
        on.axvline(place, color=svg.MUTED, linestyle=":", linewidth=1.5)
        within = {"xycoords": ("data", "axes fraction"), "color": svg.MUTED, "size": 11}
        svg.annotate(on, name, (place, height), offset, **within, **style)
    return bool(in_view)


def _refusals(on: Axes, variants: Mapping[str, Sequence[Measurement]], axis: Axis, shades: Colors) -> None:
    """A cross at the top for each refusal; the first reason of a line to the right of its last cross."""
    level, across = 0.95, on.get_xaxis_transform()
    for name, same in variants.items():
        refused = [m for m in same if m.refused and axis.of(m) is not None]
        for m in refused:
            style: Any = {"color": shades[name], "transform": across, "zorder": 6}
            on.plot([axis.of(m) or 0], [level], "x", markersize=9, markeredgewidth=2, **style)
        if refused:
            why, last = "\n".join(wrap(f"refused: {refused[0].refused}", REASON)[:3]), axis.of(refused[-1]) or 0
            style = {"xycoords": across, "color": svg.INK, "va": "center", "size": 10, "zorder": 5}
            svg.annotate(on, why, (last, level), (10, 0), **style)
            level -= 0.11
