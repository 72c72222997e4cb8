"""What pictures share: cells, labels and the <svg> around them in the colours of the page, and phrases of captions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from gemmery_emulator.pages.svg import MONO, SANS, WIDTH
from gemmery_emulator.ptx import Line, calling
from gemmery_emulator.trace import Divergence, WarpAccess

EM = 0.62  # width of a character, in font sizes; monospaced ones are the widest
LEAST = 9  # font size of any label: a page shows a picture at about one unit a pixel


def cell(x: float, y: float, width: float, height: float, fill: str, tooltip: str = "") -> str:
    """A rectangle filled with a colour of the palette; the tooltip is read aloud, too."""
    inside = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="var(--{fill})">{inside}</rect>'
    )


def outline(x: float, y: float, width: float, height: float, stroke: str, dashed: bool = False) -> str:
    """The border of a cell."""
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    return (
        f'<rect x="{x + 0.5:g}" y="{y + 0.5:g}" width="{width - 1:g}" height="{height - 1:g}" rx="2" '
        f'fill="none" stroke="var(--{stroke})"{dashes}/>'
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
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def who(numbers: Sequence[int]) -> tuple[str, ...]:
    """Labels for the lanes that meet in a cell, the longest first."""
    return (lanes(numbers), f"×{len(numbers)}") if len(numbers) > 1 else (lanes(numbers),)


def spoken(numbers: Sequence[int]) -> str:
    """The same in words: "lane 3", "lanes 0–3"."""
    return f"{'lane' if len(numbers) == 1 else 'lanes'} {lanes(numbers)}"


def legend(x: float, y: float, meanings: Sequence[tuple[str, str]]) -> str:
    """A row of colours and their meanings from `x` on, whose middle is at height `y`."""
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
