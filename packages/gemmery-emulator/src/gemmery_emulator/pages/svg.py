"""Figures as SVG that takes its colors from the page around it, for a light and a dark background alike.

Curves are Matplotlib's; pictures are cells and labels in user units. They share the palette, and phrases of captions.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from gemmery_emulator.ptx import Line, calling
from gemmery_emulator.trace import Divergence, WarpAccess

# name -> (on a light background, on a dark one). The series are distinct without red or without green.
PALETTE = {
    "paper": ("#ffffff", "#15171c"),
    "ink": ("#1b1d22", "#e7e9ee"),
    "muted": ("#646a75", "#9aa2af"),
    "rule": ("#e2e5ea", "#2c313a"),
    "accent": ("#2f5bd0", "#7fa2ff"),
    "soft": ("#bccbf3", "#34477c"),
    "rival": ("#c2410c", "#ff9a62"),
    "s0": ("#2f5bd0", "#7fa2ff"),
    "s1": ("#0f8a76", "#3fd0b6"),
    "s2": ("#a8327f", "#f08ccb"),
    "s3": ("#8a6d00", "#e3c14b"),
    "s4": ("#6a48c6", "#b49cff"),
    "s5": ("#3d7d1c", "#94d36a"),
    "s6": ("#b3261e", "#ff8a80"),
    "s7": ("#43667f", "#93bdd8"),
    "s8": ("#7a4b2a", "#d8a883"),
    "s9": ("#006d85", "#5cc8e0"),
    "s10": ("#545a66", "#b4bac6"),
}
# Matplotlib writes colors as numbers: each name is drawn as a unique number, which is replaced by the name afterwards.
TOKENS = {name: f"#0000{index + 1:02x}" for index, name in enumerate(PALETTE)}
NAMES = {token: name for name, token in TOKENS.items()}
INK, MUTED, RIVAL = TOKENS["ink"], TOKENS["muted"], TOKENS["rival"]
HALO = {"facecolor": TOKENS["paper"], "edgecolor": "none", "pad": 1}  # text stays legible where a line crosses it
SERIES = tuple(token for name, token in TOKENS.items() if re.fullmatch(r"s\d+", name))

SANS = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
WIDTH = 864  # user units of a figure; a page shows one at about one unit a pixel

STYLE: Any = {  # rc_context wants the keys as literal types
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "text.color": TOKENS["ink"],
    "axes.labelcolor": TOKENS["muted"],
    "axes.edgecolor": TOKENS["rule"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": False,
    "grid.color": TOKENS["rule"],
    "grid.linewidth": 1,
    "xtick.color": TOKENS["muted"],
    "ytick.color": TOKENS["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
}


@dataclass(frozen=True)
class Plot:
    """A figure: `name` is safe in file names, `caption` explains it, `svg` is the element without its variables."""

    name: str
    title: str
    caption: str
    svg: str


@contextmanager
def axes(height: int) -> Iterator[Axes]:
    """Axes of a figure of WIDTH x `height` user units in the common style; call `render` on them inside."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        FigureCanvasAgg(figure)
        yield figure.add_subplot()


def annotate(on: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write a text at an offset in points from a place, legible where a line crosses it."""
    on.annotate(text, at, offset, textcoords="offset points", **{"bbox": HALO, **style})


NUMBER = FuncFormatter(lambda value, _: f"{value:g}")


def logarithmic(on: Axes, numbers: FuncFormatter = NUMBER) -> None:
    """Make both axes logarithmic, with powers of ten on the y axis as such numbers."""
    on.set_xscale("log", base=2)
    on.set_yscale("log")
    on.yaxis.set_major_formatter(numbers)
    on.yaxis.set_minor_formatter(NullFormatter())


def name_rows(on: Axes, places: Sequence[float], names: Sequence[str], code_size: int = 0) -> None:
    """Name the rows of a figure without a frame; names of kernels are code of a size."""
    on.set_yticks(places, names)
    on.spines[["left", "bottom"]].set_visible(False)
    if code_size:
        on.grid(False, axis="y")
        for tick in on.get_yticklabels():
            tick.set(family="DejaVu Sans Mono", size=code_size, color=INK)


def legend(on: Axes) -> None:
    """Name the series above the axes."""
    on.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderpad=0, labelcolor=INK)


def render(on: Axes, name: str, label: str) -> str:
    """The figure of `on` as an <svg> element whose colors are CSS variables and whose ids begin with `name`."""
    figure = on.figure
    figure.tight_layout(pad=0.3)  # type: ignore[union-attr]
    text = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})  # type: ignore[union-attr]
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" {_ROOT} aria-label="{escape(label)}">', svg
    )
    svg = re.sub(r'\bid="', f'id="{name}-', svg).replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r"#0000[0-9a-f]{2}\b", lambda token: f"var(--{NAMES[token[0]]})", svg)
    return svg.replace("'DejaVu Sans Mono'", MONO).replace("'DejaVu Sans'", SANS).strip() + "\n"


_ROOT = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img"'


def _colors(scheme: int) -> str:
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in PALETTE.items())


def variables() -> str:
    """CSS that gives every name of the palette its color, in both schemes."""
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_colors(1)} }} }}"
    return f":root {{ color-scheme: light dark; {_colors(0)} }}\n{dark}"


def schemes() -> str:
    """CSS that fixes one scheme for a page whose root says `data-scheme`, whatever the system prefers."""
    return "\n".join(
        f':root[data-scheme="{scheme}"] {{ color-scheme: {scheme}; {_colors(side)} }}'
        for side, scheme in enumerate(("light", "dark"))
    )


def standalone(svg: str) -> str:
    """The element as a standalone file with its own background, which a document shows as an image."""
    head, _, rest = svg.partition(">")
    return f"{head}>\n<style>{variables()} svg {{ background: var(--paper); }}</style>\n{rest}"


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places for labels, in the order given, moved apart until neighbors are `gap` from each other.

    >>> spread([1.0, 1.1, 5.0], gap=1.0)
    [0.55, 1.55, 5.0]
    """

    def center(cluster: Sequence[int]) -> float:
        return sum(places[index] for index in cluster) / len(cluster)

    clusters: list[list[int]] = []
    for index in sorted(range(len(places)), key=places.__getitem__):
        clusters.append([index])
        while len(clusters) > 1 and center(clusters[-1]) - center(clusters[-2]) < (
            (len(clusters[-2]) + len(clusters[-1])) * gap / 2
        ):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    spaced = list(places)
    for cluster in clusters:
        for rank, index in enumerate(cluster):
            spaced[index] = center(cluster) + (rank - (len(cluster) - 1) / 2) * gap
    return spaced


EM = 0.62  # width of a character, in font sizes; monospaced ones are the widest
LEAST = 9  # font size of any label: a page shows a picture at about one unit a pixel


def cell(x: float, y: float, width: float, height: float, fill: str, tooltip: str = "") -> str:
    """A rectangle filled with a color of the palette; the tooltip is read aloud, too."""
    inside = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="var(--{fill})">{inside}</rect>'
    )


def label(
    x: float, y: float, text: str, fill: str = "ink", size: float = 11, anchor: str = "middle", mono: bool = False
) -> str:
    """Text whose middle is at height `y`."""
    family = f' font-family="{MONO}"' if mono else ""
    return (
        f'<text x="{x:g}" y="{y:g}" dy=".35em" text-anchor="{anchor}" font-size="{size:g}" '
        f'fill="var(--{fill})" pointer-events="none"{family}>{escape(text)}</text>'
    )


def filled(x: float, y: float, width: float, height: float, fill: str, texts: Sequence[str], tooltip: str) -> str:
    """A cell and the first of `texts` that fits in it, from 11 units high down to LEAST."""
    parts = cell(x, y, width, height, fill, tooltip)
    for text in texts:
        size = min(11, height - 3, (width - 1) / (EM * max(len(text), 2)))  # alike for lanes of one and of two digits
        if size >= LEAST:
            return parts + label(x + width / 2, y + height / 2, text, "paper", size)
    return parts


def svg(described: str, height: float, parts: Iterable[str]) -> str:
    """The picture as an <svg> element as wide as every figure."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(described)}" font-family="{SANS}" font-variant-numeric="tabular-nums">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def lanes(numbers: Sequence[int]) -> str:
    """Lanes in few characters.

    >>> lanes([3]), lanes([0, 1, 2, 3]), lanes([0, 2, 8, 9])
    ('3', '0–3', '0 2 8 9')
    """
    grouped = groupby(enumerate(numbers), lambda each: each[1] - each[0])
    runs = [[number for _, number in run] for _, run in grouped]
    return " ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def who(numbers: Sequence[int]) -> tuple[str, ...]:
    """Labels for the lanes that meet in a cell, the longest first."""
    return (lanes(numbers), f"×{len(numbers)}") if len(numbers) > 1 else (lanes(numbers),)


def spoken(numbers: Sequence[int]) -> str:
    """The same in words: "lane 3", "lanes 0–3"."""
    return f"{'lane' if len(numbers) == 1 else 'lanes'} {lanes(numbers)}"


def key(x: float, y: float, meanings: Sequence[tuple[str, str]]) -> str:
    """A row of colors and their meanings from `x` on, whose middle is at height `y`."""
    parts = []
    for fill, meaning in meanings:
        parts += [cell(x, y - 6, 12, 12, fill), label(x + 18, y, meaning, "muted", 11, "start")]
        x += 18 + 6.2 * len(meaning) + 22
    return "".join(parts)


def line_of(event: WarpAccess | Divergence) -> Line:
    """The line of an access or a branch: the innermost one that is more than a wrapper of one instruction."""
    return calling(event.frames or (event.line,))[-1]


def with_callers(event: WarpAccess | Divergence) -> str:
    """That line, and those it is called from: "registers.cuh:22 (called from simt_padded.cu:19)"."""
    *outer, here = map(str, calling(event.frames or (event.line,)))
    return f"{here} (called from {', '.join(reversed(outer))})" if outer else here


def instruction(access: WarpAccess) -> str:
    """The instruction and its line: "st.shared.f32 at simt_smem.cu:18, warp 0"."""
    return f"{access.opcode} at {with_callers(access)}, warp {access.warp}"


def quoted(source: Mapping[str, str], *events: WarpAccess | Divergence | None) -> str:
    """The text of their lines, where it is known: " The source: “x = 0;”."."""
    texts = [source.get(str(line_of(event)), "") for event in events if event is not None]
    known = [f"“{text}”" for text in dict.fromkeys(texts) if text]
    return f" The source: {', '.join(known)}." if known else ""
