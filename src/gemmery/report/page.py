"""A run as one self-contained HTML page: no script, font or image from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files

from gemmery import experiments
from gemmery.bench.record import Gpu, Machine, Measurement, Run
from gemmery.experiments import LADDER
from gemmery.ladder.rung import Rung
from gemmery.report import words
from gemmery.report.doubts import banner, doubts, weighed
from gemmery.report.figures import figures
from gemmery.report.sheet import Cell, Group, Sheet, fullest, largest, named, speedup
from gemmery.report.summary import over_fastest
from gemmery.report.svg import Plot, schemes, variables
from gemmery.report.tables import ladder_groups, sheets
from gemmery.report.tree import anchor, tree

PROTOCOL = """
All kernels of a problem take turns in one run, so that they see the same clocks and the same other processes. A time
is the median over the samples; a sample repeats short calls until the resolution of the clock no longer matters.

Ratios are taken pair by pair within a round; the median is shown. A difference smaller than half the interquartile
range of the ratios is a tie, marked ~.

The peak is a loop of independent fused multiply-adds, the bandwidth a loop of reads, both measured in this run. Each
rival library runs in its own process, without environment variables that change its speed.

Every result is compared with a product in higher precision, element by element. error/bound is the largest error
divided by its bound f(k) u |A||B|: 1 or less passes.
"""

PROTOCOL_GPU = """
All kernels of a problem take turns in one run, so that they see the same clocks. A time is the median over the
samples; a sample lasts some milliseconds between two events on the device. Short calls are captured in a graph and
replayed. The operands are standard normal numbers and rotate over at least three times the L2 cache, so a call reads
them from memory, unless they are smaller than a thousandth of that.

Ratios are taken pair by pair within a round; the median is shown. A difference smaller than half the interquartile
range of the ratios is a tie, marked ~.

The peak of each unit is a loop of independent multiply-adds in registers, the bandwidth a loop of reads, both
measured in this run. The peak of tensor cores is that of mma.sync; Hopper's wgmma is faster. cuBLAS runs in this
process, on the same stream, with TF32 off unless the types say tf32, and sums in float32.

Every element of every result is checked to have been written, and a sample of rows and columns is compared with a
product in higher precision. error/bound is the largest error divided by its bound f(k) u |A||B|: 1 or less passes.
"""

LEAD = (
    "Every rung is one kernel for the same matrix product, C = A B, and changes one thing in the rung that it grew "
    "from, its parent. This page shows what each change gained on this machine, next to {}."
)


def page(run: Run, rungs: Sequence[Rung] = ()) -> str:
    """Return the page of a run.

    >>> Path("ladder.html").write_text(page(run, CPU))  # doctest: +SKIP
    """
    run = weighed(run)
    plots, protocol = figures(run, rungs), PROTOCOL_GPU if run.machine.gpu.name else PROTOCOL
    first = plots[:1]
    body = [
        _head(run),
        _tiles(run, rungs),
        *(figure(plot) for plot in first),
        _tree(run, rungs),
        section("The measurements", *(table(sheet) for sheet in sheets(run, rungs))),
        *(figure(plot) for plot in plots if plot not in first),
        _rungs(run, rungs),
        section("How it was measured", *(f"<p>{html.escape(line)}</p>" for line in protocol.strip().split("\n\n"))),
        _machine(run.machine),
        f"<footer>gemmery {html.escape(run.machine.gemmery)}, {words.when(run)}</footer>",
    ]
    return document(f"{words.title(run)} on {words.processor(run.machine)[0]}", *filter(None, body))


def document(title: str, *parts: str) -> str:
    """A whole HTML document in the common style, from the parts of its body."""
    style = f"{variables()}\n{schemes()}\n" + files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(run: Run) -> str:
    where = " · ".join([*words.processor(run.machine), words.when(run)])
    ladder = any(experiments.of(m) is LADDER for m in run.measurements)
    library = "cuBLAS, the vendor's library" if run.machine.gpu.name else "the library that NumPy calls"
    lead = f"<p class=lead>{LEAD.format(library)}</p>" if ladder else ""
    warning = f"<p class=banner role=alert>{html.escape(said)}</p>" if (said := banner(run)) else ""
    return f"<header><h1>{words.title(run)}</h1><p class=faint>{html.escape(where)}</p>{warning}{lead}</header>"


def _tiles(run: Run, rungs: Sequence[Rung]) -> str:
    """The key figures of the largest problem of a ladder."""
    ladder = ladder_groups(run, rungs)
    group = largest(ladder) if ladder else Group((), ())
    ran = [m for m in group.rungs if m.seconds]
    if not ran or doubts(run):
        return ""
    best = max(ran, key=lambda m: m.gflops)
    tiles = [(f"{words.digits(words.reached(best))}", f"{words.rate(best)} by {best.kernel}")]
    if part := words.share(best):
        peak = words.digits(words.reached(best, best.peak_gflops))
        tiles.append((words.percent(part), f"of the measured peak, {peak}"))
    if over := over_fastest(best, group):
        tiles.append((words.times(*over[1]), f"the speed of {named(over[0], group)}"))
    if best is not ran[0]:
        tiles.append((words.times(ran[0].seconds / best.seconds), f"the speed of {ran[0].kernel}"))
    shown = "".join(
        f"<div><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>" for value, label in tiles
    )
    return f'<div class="tiles">{shown}</div><p class=faint>{html.escape(words.shape(best))}, {words.types(best)}</p>'


def figure(plot: Plot) -> str:
    """A figure with its title and caption."""
    caption = f"<figcaption>{html.escape(plot.caption)}</figcaption>"
    return f"<figure><h2>{html.escape(plot.title)}</h2>{drawing(plot)}{caption}</figure>"


def drawing(plot: Plot) -> str:
    """The drawing of a figure, which scrolls sideways where it is wider than the page."""
    return f"<div class=drawing>{plot.svg}</div>"


def section(title: str, *parts: str) -> str:
    """A part of the page under its title."""
    return f"<section><h2>{html.escape(title)}</h2>{''.join(parts)}</section>"


def table(sheet: Sheet) -> str:
    """A table; a remark stands below the cell that it is about."""
    after = 2 if sheet.aside else 1
    named = (html.escape(name).replace("× ", "×&nbsp;") for name in (sheet.head[0], *sheet.head[after:]))
    head = "".join(f"<th>{name}</th>" for name in named)
    rows = ""
    for row in sheet.rows:
        below = f"<small>{html.escape(row[1].text)}</small>" if sheet.aside and row[1].text else ""
        rows += f"<tr>{_cell(row[0], below)}{''.join(_cell(cell) for cell in row[after:])}</tr>"
    notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in sheet.notes)
    return (
        f"<h3>{html.escape(sheet.title)}</h3><div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{notes}"
    )


def _cell(cell: Cell, below: str = "") -> str:
    classes = " ".join(filter(None, [cell.tone, "bar" if cell.bar is not None else ""]))
    bar = f' style="--share:{min(cell.bar, 1):.3f}"' if cell.bar is not None else ""
    opening = f'<td class="{classes}"{bar}>' if classes else "<td>"
    return f"{opening}{html.escape(cell.text)}{below}</td>"


def _rungs(run: Run, rungs: Sequence[Rung]) -> str:
    """Each rung with its lesson, and its gain over its parent at every size."""
    ladder = ladder_groups(run, rungs)
    ran = {m.kernel for group in ladder for m in group.rungs}
    shown = [rung for rung in rungs if rung.name in ran]
    if not shown:
        return ""
    return section("Rung by rung", f"<dl class=rungs>{''.join(_rung(rung, ladder) for rung in shown)}</dl>")


def _tree(run: Run, rungs: Sequence[Rung]) -> str:
    """The rungs under their parents, with the gain at the largest square."""
    ladder = ladder_groups(run, rungs)
    ran = {m.kernel for group in ladder for m in group.rungs}
    shown = [rung for rung in rungs if rung.name in ran]
    if len(shown) < 2:
        return ""
    group = fullest(ladder)
    own = {m.kernel: m for m in group.rungs}
    gains = {
        rung.name: f"{words.times(*gain)} {rung.parent}"
        for rung in shown
        if rung.parent and rung.name in own and (gain := speedup(own[rung.name], rung.parent, group))
    }
    note = f"<p class=note>The factor is the speed over the parent's at {html.escape(words.shape(group.one))}.</p>"
    return section("Rungs under their parents", tree(shown, gains), note if gains else "")


def _rung(rung: Rung, ladder: Sequence[Group]) -> str:
    own = [(group, m) for group in ladder for m in group.rungs if m.kernel == rung.name]
    if rung.parent:
        gains = [(m, speedup(m, rung.parent, group)) for group, m in own]
        stated = [f"{words.times(*gain)} at {words.shape(m)}" for m, gain in gains if gain]
        gave = f"Against {rung.parent}: {', '.join(stated)}." if stated else ""
    else:
        stated = [f"{_time(m)} at {words.shape(m)}" for _, m in own if m.seconds]
        gave = f"{', '.join(stated)}." if stated else ""
    configs = {f"{key} {value}" for _, m in own for key, value in rung.explicit(m.config).items()}
    with_ = f" With {', '.join(sorted(configs))}." if configs else ""
    return entry(rung, gave + with_)


def entry(rung: Rung, note: str) -> str:
    """A rung in a list of them: its name, idea and lesson, a note, its source and how to see what changed."""
    lesson = f"<p>{html.escape(rung.lesson)}</p>" if rung.lesson else ""
    noted = f"<p class=note>{html.escape(note)}</p>" if note else ""
    return (
        f'<dt id="{html.escape(anchor(rung.name))}"><code>{html.escape(rung.name)}</code></dt>'
        f"<dd><b>{html.escape(rung.idea)}</b>{lesson}{noted}{_source(rung)}</dd>"
    )


def _source(rung: Rung) -> str:
    """The file of a rung's kernel, and the command that shows what it changed."""
    file = f"Source: <code>src/gemmery/{html.escape(rung.source)}</code>." if rung.source else ""
    changed = f"gemmery ladder diff {rung.parent} {rung.name}" if rung.source and rung.parent else ""
    shown = f" What it changed: <code>{html.escape(changed)}</code>" if changed else ""
    return f"<p class=note>{file}{shown}</p>" if file else ""


def _time(measurement: Measurement) -> str:
    return words.duration(measurement.seconds)


def _machine(machine: Machine) -> str:
    facts = [
        *_gpu(machine.gpu),
        ("CPU", machine.cpu),
        ("Instruction set", machine.isa),
        ("Cores", str(machine.cores)),
        *((name, words.size(held)) for name, held in words.caches(machine) if not machine.gpu.name),
        ("System", machine.os),
        ("Python", machine.python),
        ("NumPy", f"{machine.numpy}, {machine.blas}"),
        ("llvmlite", machine.llvmlite),
    ]
    shown = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts if value)
    return section("The machine", f"<dl class=facts>{shown}</dl>")


def _gpu(gpu: Gpu) -> list[tuple[str, str]]:
    if not gpu.name:
        return []
    return [
        ("GPU", gpu.name),
        ("Compute capability", f"{gpu.capability / 10:.1f}"),
        ("Multiprocessors", str(gpu.sms)),
        ("L2", words.size(gpu.l2)),
        ("Clock, at most", f"{gpu.clock_mhz} MHz"),
        ("Power limit", f"{gpu.power_w:g} W" if gpu.power_w else "unknown: NVML is not found"),
        ("Driver", f"{gpu.driver or 'unknown'}, CUDA {gpu.cuda}"),
        ("NVRTC", gpu.nvrtc),
    ]
