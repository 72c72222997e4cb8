"""The figure of a sweep on a GPU: time against the varied quantity, with limits and refusals marked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from gemmery.bench.record import Machine, Measurement
from gemmery.experiments import Axis, Experiment
from gemmery.report import words
from gemmery.report.curves import LABEL
from gemmery.report.svg import HALO, INK, MUTED, RIVAL, SERIES, Plot, axes, render, spread
from gemmery.report.sweeps import Lines, lines, marks

HEIGHT = 460
REASON = 36  # characters per line of a reason


def sweep_plot(measurements: Sequence[Measurement], machine: Machine, experiment: Experiment) -> Plot | None:
    """Time against the varied quantity: a line for each rung and config, and one for cuBLAS."""
    axis = experiment.axis
    ran = [m for m in measurements if m.seconds]
    values = sorted({value for m in measurements if (value := axis.of(m)) is not None})
    if len(values) < 2 or not ran:
        return None
    with axes(HEIGHT) as on:
        on.set_xscale("log", base=2)
        on.set_yscale("log")
        on.set_xlim(values[0] / 1.15, values[-1] * (values[-1] / values[0]) ** 0.42)
        on.set_xticks(_ticks(values), [f"{value}" for value in _ticks(values)])
        on.xaxis.set_minor_locator(NullLocator())
        on.yaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"\.0+ ", " ", words.duration(value))))
        on.yaxis.set_minor_formatter(NullFormatter())
        on.set(xlabel=axis.label, ylabel="time of one product")
        on.set_ylim(min(m.seconds for m in ran) / 1.6, 2.6 * max(m.seconds for m in ran))
        on.grid(False, axis="x")
        on.figure.tight_layout(pad=0.3)  # type: ignore[union-attr]
        along = lines(measurements, axis)
        shades = _shades(along)
        _draw(on, along, axis, shades)
        _limits(on, marks(measurements, axis, machine))
        _refusals(on, along, axis, shades)
        svg = render(on, experiment.suite, f"time against {axis.label}")
    caption = (
        "Both axes are logarithmic; lower is faster. The dashed line is the vendor's library in the same run, a dotted "
        "line a limit of the device. A cross marks a refused config, with the reason."
    )
    one = ran[0]
    shape = words.types(one) if axis.side else f"{words.shape(one)}, {words.types(one)}"
    return Plot(experiment.suite, f"{experiment.title}, {shape}", caption, svg)


def _ticks(values: Sequence[int]) -> list[int]:
    """The powers of two among many values, else all values."""
    return [value for value in values if value & (value - 1) == 0] if len(values) > 8 else list(values)


def _shades(along: Lines) -> dict[str, str]:
    rivals = {name for name, same in along.items() if same[0].kernel in words.RIVALS}
    ranked = [name for name in along if name not in rivals]
    return {name: RIVAL if name in rivals else SERIES[ranked.index(name) % len(SERIES)] for name in along}


def _draw(on: Axes, along: Lines, axis: Axis, shades: dict[str, str]) -> None:
    """The lines, named at their right ends; a rival without the varied key is a level line."""
    left, right = on.get_xlim()
    ends = []
    for name, same in along.items():
        points = [(axis.of(m), m.seconds) for m in same if m.seconds]
        if not points:
            continue
        rival = same[0].kernel in words.RIVALS
        if points[0][0] is None:
            on.axhline(points[0][1], color=RIVAL, linestyle="--", linewidth=1.5)
            at = (left * (right / left) ** 0.8, points[0][1])
        else:
            x, y = zip(*points, strict=True)
            on.plot(x, y, "--" if rival else "-", marker="o", color=shades[name], zorder=4)
            at = (x[-1], y[-1])
        ends.append((name, at, shades[name]))
    on.figure.canvas.draw()
    places = [float(on.transData.transform(at)[1]) for _, at, _ in ends]
    scale = on.figure.dpi / 72
    for (name, at, colour), old, new in zip(ends, places, spread(places, LABEL * scale), strict=True):
        offset = (10, (new - old) / scale)
        on.annotate(
            name, at, offset, textcoords="offset points", color=colour, va="center", size=11, bbox=HALO, zorder=6
        )


def _limits(on: Axes, found: Sequence[tuple[float, str]]) -> None:
    low, high = on.get_xlim()
    for place, name in found:
        if low < place < high:
            on.axvline(place, color=MUTED, linestyle=":", linewidth=1.5)
            on.annotate(
                name,
                (place, 0),
                (-5, 6),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=MUTED,
                ha="right",
                va="bottom",
                size=11,
                bbox=HALO,
            )


def _refusals(on: Axes, along: Lines, axis: Axis, shades: dict[str, str]) -> None:
    """A cross at the top for each refusal; the first reason of a line to the right of its last cross."""
    level = 0
    for name, same in along.items():
        refused = [m for m in same if m.refused and axis.of(m) is not None]
        for m in refused:
            on.plot(
                [axis.of(m) or 0],
                [0.95 - 0.11 * level],
                "x",
                color=shades[name],
                markersize=9,
                markeredgewidth=2,
                transform=on.get_xaxis_transform(),
                zorder=6,
            )
        if refused:
            on.annotate(
                "\n".join(wrap(f"refused: {refused[0].refused}", REASON)[:3]),
                (axis.of(refused[-1]) or 0, 0.95 - 0.11 * level),
                (10, 0),
                xycoords=on.get_xaxis_transform(),
                textcoords="offset points",
                color=INK,
                va="center",
                size=10,
                bbox=HALO,
                zorder=5,
            )
            level += 1
