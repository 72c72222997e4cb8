"""Figures of roofs: the four of every rung on the emulator, and the roofline of one inspected kernel."""

from __future__ import annotations

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gemmery.cuda.roofline import Roofline
from gemmery.ladder.rung_counts import EmulatedLadder, EmulatedRung
from gemmery.report import words
from gemmery.report.curves import slopes
from gemmery.report.svg import HALO, INK, RIVAL, SERIES, TOKENS, Plot, axes, render

ROW = 26  # height of a rung
COLOURS = dict(zip(("compute", "memory", "shared", "issue"), (RIVAL, *SERIES[1:4]), strict=True))
ROOFS = (
    "Each dot is the least time under one limit of the device; the bar reaches to the longest, the roof. Shorter is "
    "better. The axis is logarithmic."
)
POINTS = (
    "Both axes are logarithmic. As it loads counts every load of A and B as one from memory; each element once is what "
    "perfect caches would leave. Caches keep a kernel between the two."
)


def roofs(ladder: EmulatedLadder) -> tuple[Plot, ...]:
    """A figure for each size: every rung that ran with its four roofs."""
    sizes = dict.fromkeys(run.size for run in ladder.rungs)
    ran = {size: [run for run in ladder.rungs if run.size == size and not run.refused] for size in sizes}
    return tuple(_roofs(size, rungs) for size, rungs in ran.items() if rungs)


def _roofs(size: int, rungs: list[EmulatedRung]) -> Plot:
    times = [time * 1e6 for run in rungs for time in run.roofs.values() if time]
    with axes(ROW * len(rungs) + 90) as on:
        on.set_xscale("log")
        low, high = min(times) / 1.5, max(times) * 1.6
        for place, run in enumerate(rungs):
            top = run.roof_seconds * 1e6
            on.barh(place, top - low, left=low, height=0.5, color=TOKENS["soft"], linewidth=0)
            on.annotate(
                words.digits(top), (top, place), (9, 0), textcoords="offset points", va="center", size=11, bbox=HALO
            )
        for name, colour in COLOURS.items():
            points = [(run.roofs[name] * 1e6, place) for place, run in enumerate(rungs) if run.roofs[name]]
            if points:
                x, y = zip(*points, strict=True)
                on.plot(x, y, "o", color=colour, label=name, zorder=4)
        on.set(xlim=(low, high), ylim=(len(rungs) - 0.4, -0.6))
        on.set_yticks(range(len(rungs)), [_label(run, rungs[0]) for run in rungs])
        for tick in on.get_yticklabels():
            tick.set(family="DejaVu Sans Mono", size=11, color=INK)
        on.xaxis.set_major_locator(LogLocator(10))
        on.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        on.xaxis.set_minor_formatter(NullFormatter())
        on.grid(False, axis="y")
        on.spines[["left", "bottom"]].set_visible(False)
        on.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderpad=0, labelcolor=INK)
        on.set_xlabel("µs")
        svg = render(on, f"roofs-{size}", f"the four roofs of every rung at n = {size}")
    return Plot(f"roofs-{size}", f"The roofs of every rung, n = {size}", ROOFS, svg)


def _label(run: EmulatedRung, first: EmulatedRung) -> str:
    vector = ", vector" if 1 in (run.m, run.n) else ""
    dtype = f", {run.dtype}" if run.dtype != first.dtype else ""
    return f"{run.rung}{dtype}{vector}"


def roofline_plot(rung: str, device: str, loads: Roofline, once: Roofline) -> Plot | None:
    """The roofline of an inspected rung: two points under the roofs of its device; None without a peak."""
    points = {"as it loads": loads, "each element once": once}
    peak, bandwidth = loads.peak, loads.bandwidth
    if not peak or not bandwidth or not all(point.intensity for point in points.values()):
        return None
    ridge = peak / bandwidth
    intensities = [point.intensity for point in points.values()]
    with axes(300) as on:
        on.set_xscale("log", base=2)
        on.set_yscale("log")
        left, right = min([*intensities, ridge]) / 6, max([*intensities, ridge]) * 6
        on.set(xlim=(left, right), ylim=(0.7 * bandwidth * left, 2.5 * peak))
        slopes(on, peak, bandwidth)
        for (name, point), colour in zip(points.items(), (SERIES[0], SERIES[1]), strict=True):
            on.plot(
                [point.intensity, point.intensity],
                [on.get_ylim()[0], point.attainable],
                ":",
                color=colour,
                linewidth=1.5,
            )
            on.plot(point.intensity, point.attainable, "o", color=colour, zorder=5)
            side = "right" if point.intensity > (left * right) ** 0.5 else "left"
            on.annotate(
                name,
                (point.intensity, point.attainable),
                (-8 if side == "right" else 8, -16),
                textcoords="offset points",
                ha=side,
                color=colour,
                bbox=HALO,
                zorder=6,
            )
        on.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        on.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        on.yaxis.set_minor_formatter(NullFormatter())
        on.set(xlabel="operations a byte", ylabel="GFLOP/s")
        svg = render(on, "roofline", f"the roofline of {rung} on {device}")
    return Plot("roofline", "Roofline", POINTS, svg)
