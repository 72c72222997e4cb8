"""Figures on logarithmic axes: curves against size and block, and the roofline."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from gemmery.bench.record import Machine, Measurement
from gemmery.report import words
from gemmery.report.sheet import is_square, side
from gemmery.report.svg import HALO, INK, MUTED, RIVAL, SERIES, Plot, axes, render, spread

LABEL = 15  # height of one line of labels
Colours = Mapping[str, str]


def curves(measurements: Sequence[Measurement], machine: Machine) -> Plot | None:
    """Rate against n, a line for each kernel, with the sizes at which three matrices fill each cache."""
    ran = [m for m in measurements if m.seconds and is_square(m)]
    if len({m.n for m in ran}) < 2:
        return None
    with axes(460) as on:
        _lines(on, ran, words.reached, colours(measurements))
        peaks = {words.place(m): words.reached(m, m.peak_gflops) for m in ran if m.peak_gflops}
        left, right = min(m.n for m in ran), max(m.n for m in ran)
        for index, (place, peak) in enumerate(sorted(peaks.items(), key=lambda item: item[1])):
            on.plot([left, right], [peak, peak], color=INK, linewidth=1.5)
            name = f"peak, {place}" if len(peaks) > 1 or ran[0].unit else "peak"
            on.annotate(name, (left, peak), (130 * index, 5), textcoords="offset points", bbox=HALO, zorder=5)
        on.set_ylim(top=1.5 * max([*peaks.values(), *(words.reached(m) for m in ran)]))
        _caches(on, machine, ran[0].dtype)
        on.set(xlabel="n", ylabel=words.rate(ran[0]))
        svg = render(on, "curves", f"{words.rate(ran[0])} against n for every kernel")
    caption = (
        "Rate against the size of the matrices. Both axes are logarithmic, so equal steps are equal factors. Dotted "
        "lines are the sizes at which A, B and C together just fit in a cache."
    )
    return Plot("curves", "Speed against size", caption, svg)


def seconds(measurements: Sequence[Measurement]) -> Plot | None:
    """Time against n: on logarithmic axes every algorithm of n**3 operations is a line of the same slope."""
    ran = [m for m in measurements if m.seconds and is_square(m)]
    if len({m.n for m in ran}) < 2:
        return None
    with axes(420) as on:
        _lines(on, ran, lambda m: m.seconds, colours(measurements))
        on.yaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"\.0+ ", " ", words.duration(value))))
        on.set(xlabel="n", ylabel="time of one product")
        svg = render(on, "seconds", "time against n for every kernel")
    caption = (
        "Time of one product; both axes are logarithmic. An algorithm of n³ operations is a straight line: twice the n "
        "takes eight times as long."
    )
    return Plot("seconds", "Time against size", caption, svg)


def vectors(case: str, measurements: Sequence[Measurement]) -> Plot | None:
    """Time of a row times a matrix against the matrix's columns, a line for each kernel of a tournament."""
    ran = [m for m in measurements if m.seconds and m.m == 1]
    if len({m.n for m in ran}) < 2 or len({(m.k, words.types(m)) for m in ran}) != 1:
        return None
    with axes(520) as on:
        _lines(on, ran, lambda m: m.seconds * 1e6, colours(measurements))
        on.set(xlabel=f"n: results of a sum of {ran[0].k} products", ylabel="µs")
        svg = render(on, f"vectors-{case}", f"time against n for every kernel of {case}")
    caption = "Time of one product; both axes are logarithmic. All kernels took turns at each n."
    return Plot(f"vectors-{re.sub(r'[^a-z0-9]+', '-', case.lower())}", case, caption, svg)


def blocks(measurements: Sequence[Measurement], machine: Machine) -> Plot | None:
    """Time against the side of a block, the caches marked, the best side named."""
    swept = sorted((m for m in measurements if m.seconds and "block" in m.config), key=lambda m: m.config["block"])
    if len(swept) < 2:
        return None
    best = min(swept, key=lambda m: m.seconds)
    sides = [m.config["block"] for m in swept]
    with axes(420) as on:
        on.set_xscale("log", base=2)
        on.plot(sides, [m.seconds * 1e3 for m in swept], "-o", color=SERIES[0])
        least, at = best.seconds * 1e3, best.config["block"]
        label = f"{at}: {words.digits(least)} ms"
        on.annotate(label, (at, least), (0, 10), textcoords="offset points", ha="center", bbox=HALO)
        for m in (m for m in measurements if m.seconds and "block" not in m.config):
            taken = m.seconds * 1e3
            on.axhline(taken, color=RIVAL, linestyle="--", linewidth=1.5)
            label = f"{words.kernel(m.kernel)}: {words.digits(taken)} ms"
            on.annotate(label, (sides[0], taken), (0, 5), textcoords="offset points", color=RIVAL)
        on.set_xlim(sides[0] / 1.2, sides[-1] * 1.2)
        on.set_ylim(0, 1.2 * max(m.seconds * 1e3 for m in measurements))
        _caches(on, machine, best.dtype)
        on.set_xticks(sides, [str(one) for one in sides])
        on.xaxis.set_minor_locator(NullLocator())
        on.grid(False, axis="x")
        on.set(xlabel="side of a block", ylabel="ms")
        svg = render(on, "blocks", "time against the side of a block")
    caption = (
        "A blocked product works on one block of A, one of B and one of C at a time. The dotted lines are the sides at "
        "which the three just fit in a cache."
    )
    return Plot("blocks", f"Block side at {words.shape(best)}, {words.types(best)}", caption, svg)


def roofline(measurements: Sequence[Measurement], suite: str, named: bool) -> Plot | None:
    """Rate against intensity under the two roofs, bandwidth times intensity and the peak; `named` labels kernels."""
    ran = [m for m in measurements if m.seconds and m.bytes and m.peak_gflops and m.bandwidth_gbs]
    if len({words.types(m) for m in ran}) != 1:
        return None  # each type has its own roof
    intensities = [m.flops / m.bytes for m in ran]
    scale = words.reached(ran[0], 1.0)  # a GPU's rates are shown in TFLOP/s
    roofs = {words.place(m): (scale * m.peak_gflops, m.bandwidth_gbs) for m in ran}
    ridges = [peak / bandwidth / scale for peak, bandwidth in roofs.values()]
    left, right = min([*intensities, *ridges]) / 16, max([*intensities, *ridges]) * 8
    with axes(460) as on:
        on.set_xscale("log", base=2)
        on.set_yscale("log")
        lowest, highest = min(words.reached(m) for m in ran), max(peak for peak, _ in roofs.values())
        on.set(xlim=(left, right), ylim=(lowest / 2.5, 3 * highest))
        on.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _plain(on)
        on.set(xlabel="operations per byte that must move", ylabel=words.rate(ran[0]))
        on.figure.tight_layout(pad=0.3)  # type: ignore[union-attr]
        for place, (peak, bandwidth) in sorted(roofs.items(), key=lambda item: item[1]):
            slopes(on, peak, bandwidth, scale, place if len(roofs) > 1 else "", peak < highest)
        _points(on, ran, _last(ran) if named else [], colours(measurements))
        svg = render(on, f"roofline-{suite}", "rate against arithmetic intensity under the roofs of this machine")
    caption = (
        "The slope is the measured memory bandwidth, the flat part the measured peak. Each byte counts once, as if "
        "caches kept everything; a kernel far below its roof moves bytes again and again."
    )
    return Plot(f"roofline-{suite}", "Roofline", caption, svg)


def slopes(on: Axes, peak: float, bandwidth: float, scale: float = 1.0, whose: str = "", below: bool = False) -> None:
    """The two roofs, bandwidth times intensity and the peak, named above their lines or below.

    A GFLOP/s is `scale` of the units that the y axis shows.
    """
    left, right = on.get_xlim()
    slope = scale * bandwidth
    ridge = peak / slope
    on.plot([left, ridge, right], [left * slope, peak, peak], color=INK, linewidth=1.5, zorder=3)
    suffix = f", {whose}" if whose else ""
    away, align = (-6, "top") if below else (5, "bottom")
    on.annotate(f"peak {words.digits(peak)}{suffix}", (ridge, peak), (6, away), textcoords="offset points", va=align)
    (x0, y0), (x1, y1) = on.transData.transform([(left, left * slope), (ridge, peak)])
    middle = left * (ridge / left) ** 0.25
    on.annotate(
        f"memory {words.digits(bandwidth)} GB/s{suffix}",
        (middle, middle * slope),
        (-0.6 * away, 0.6 * away),
        textcoords="offset points",
        ha="center",
        va=align,
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
    )


def _last(ran: Iterable[Measurement]) -> list[Measurement]:
    """Each kernel at the largest problem it ran."""
    found: dict[tuple[str, int], Measurement] = {}
    for m in sorted(ran, key=lambda m: m.flops):
        found[m.kernel, m.threads] = m
    return list(found.values())


def _points(on: Axes, ran: Sequence[Measurement], named: Sequence[Measurement], shades: Colours) -> None:
    """A point for each measurement; those of `named` are labelled."""
    for m in ran:
        on.plot(
            m.flops / m.bytes,
            words.reached(m),
            "o",
            color=shades[m.kernel],
            alpha=1 if m in named or not named else 0.45,
        )
    names = _names(named)
    for x in {m.flops / m.bytes for m in named}:
        column = [m for m in named if m.flops / m.bytes == x]
        _labels(on, [(names[m.kernel, m.threads], words.reached(m), shades[m.kernel]) for m in column], x)


def _lines(on: Axes, ran: Sequence[Measurement], value: Callable[[Measurement], float], shades: Colours) -> None:
    """A line for each kernel on logarithmic axes, named at its right end."""
    on.set_xscale("log", base=2)
    on.set_yscale("log")
    names = _names(ran)
    ends: dict[int, list[tuple[str, float, str]]] = {}
    for place, name in names.items():
        own = sorted((m for m in ran if (m.kernel, m.threads) == place), key=lambda m: m.n)
        colour = shades[place[0]]
        on.plot([m.n for m in own], [value(m) for m in own], _dashes(place[0]), marker="o", color=colour, zorder=4)
        ends.setdefault(own[-1].n, []).append((name, value(own[-1]), colour))
    sizes = sorted({m.n for m in ran})
    on.set_xlim(sizes[0] / 1.08, sizes[-1] * (sizes[-1] / sizes[0]) ** 0.3)
    for n, at in ends.items():
        _labels(on, at, n)
    marked = sizes if len(sizes) <= 12 else [n for n in sizes if n & (n - 1) == 0]
    on.set_xticks(marked, [str(n) for n in marked])
    on.xaxis.set_minor_locator(NullLocator())
    _plain(on)
    on.grid(False, axis="x")


def _plain(on: Axes) -> None:
    """Powers of ten on the y axis as plain numbers."""
    on.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    on.yaxis.set_minor_formatter(NullFormatter())


def _labels(on: Axes, ends: Sequence[tuple[str, float, str]], x: float) -> None:
    """Names next to points on a logarithmic y axis, moved apart where they would overlap."""
    on.figure.canvas.draw()
    at = [float(on.transData.transform((x, y))[1]) for _, y, _ in ends]
    scale = on.figure.dpi / 72
    for (name, y, colour), old, new in zip(ends, at, spread(at, LABEL * scale), strict=True):
        offset = (10, (new - old) / scale)
        on.annotate(
            name, (x, y), offset, textcoords="offset points", color=colour, va="center", size=12, bbox=HALO, zorder=6
        )


def _names(ran: Iterable[Measurement]) -> dict[tuple[str, int], str]:
    """A label for each kernel and number of threads; it names the threads where a kernel ran with several numbers."""
    places = tuple(dict.fromkeys((m.kernel, m.threads) for m in ran))
    kernels = [kernel for kernel, _ in places]
    return {
        (kernel, threads): words.kernel(kernel) + (f", {words.cores(threads)}" if kernels.count(kernel) > 1 else "")
        for kernel, threads in places
    }


def _dashes(kernel: str) -> str:
    return "--" if kernel in words.RIVALS else "-"


def colours(measurements: Iterable[Measurement]) -> Colours:
    """A colour for each kernel, the same in every figure of a suite; all rivals share one."""
    kernels = tuple(dict.fromkeys(m.kernel for m in measurements))
    ranked = [kernel for kernel in kernels if kernel not in words.RIVALS]
    return {kernel: SERIES[ranked.index(kernel) % len(SERIES)] if kernel in ranked else RIVAL for kernel in kernels}


def _caches(on: Axes, machine: Machine, dtype: str) -> None:
    """Dotted lines at the sides of which three squares fill a cache, where they are in view."""
    low, high = on.get_xlim()
    for name, held in words.caches(machine):
        place = side(held, dtype)
        if low < place < high:
            on.axvline(place, color=MUTED, linestyle=":", linewidth=1.5)
            on.annotate(
                f"{name} {words.size(held)}",
                (place, 1),
                (4, -4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=MUTED,
                va="top",
                size=11,
            )
