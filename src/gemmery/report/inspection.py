"""The resources, occupancy, roofline and counters of a rung in words, in a terminal and as a page."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery import dtypes
from gemmery.cuda.inspection import Kernel
from gemmery.cuda.occupancy import Occupancy
from gemmery.cuda.roofline import Roofline
from gemmery.cuda.sass import bytes_each, is_notable
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.exhibits import EXHIBITS
from gemmery.ladder.inspection import Inspection
from gemmery.report import counters, words

UNITS = {
    "f32": "CUDA cores, f32",
    "f64": "CUDA cores, f64",
    "tensor": "tensor cores, half precision",
    "tensor_tf32": "tensor cores, tf32",
    "tensor_f64": "tensor cores, f64",
}
ROOFLINE = "Roofline"
SOURCE = counters.HEAD[-1]  # a column of code
MOST_PTX = 12  # opcodes of PTX that are shown where there is no SASS


@dataclass(frozen=True)
class Part:
    """A section: facts in two columns, or a table with a head."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    head: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def show_inspection(found: Inspection, console: Console, ptx: bool = False, machine: bool = False) -> None:
    """Print an inspection, and the code that was asked for."""
    console.print(Text.assemble((found.rung, "bold"), (f": {found.idea}", "dim")))
    console.print(Text(where(found), style="dim"))
    for part in parts(found):
        console.print()
        console.print(Text(part.title, style="bold"))
        shown = _fitted(part, console.width)
        console.print(_table(shown))
        for note in shown.notes:
            console.print(Text(note, style="dim"))
    for title, text in _codes(found, ptx, machine):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Text(text), soft_wrap=True)


def inspection_page(found: Inspection) -> str:
    """The same as one self-contained HTML page, with all of the code."""
    from gemmery.report.page import document, drawing, figure
    from gemmery.report.pictures import pictures
    from gemmery.report.roofs import roofline_plot

    roof = None if found.exhibit else roofline_plot(found)
    sections = [
        f"<section><h2>{html.escape(part.title)}</h2>"
        f"<div class='{'scroll wide' if SOURCE in part.head else 'scroll'}'>{_html(part)}</div>"
        + "".join(f"<p class=note>{html.escape(note)}</p>" for note in part.notes)
        + (drawing(roof) if roof and part.title == ROOFLINE else "")
        + "</section>"
        for part in parts(found)
    ]
    codes = [
        f"<details><summary>{html.escape(title)}</summary><pre class=code>{html.escape(text)}</pre></details>"
        for title, text in _codes(found, True, True)
    ]
    run = found.emulated
    figures = [figure(plot) for plot in pictures(run.chosen, run.source)] if run else []
    if run and run.chosen.untraced:
        figures.append(f"<section><p class=note>{html.escape(counters.untraced(run))}</p></section>")
    head = (
        f"<header><h1>{html.escape(found.rung)}</h1><p class=lead>{html.escape(found.idea)}</p>"
        f"<p>{html.escape(lesson(found.rung))}</p><p class=faint>{html.escape(where(found))}</p></header>"
    )
    return document(
        f"{found.rung} on {found.device.name}", head, *sections, *figures, "<section>", *codes, "</section>"
    )


def parts(found: Inspection) -> tuple[Part, ...]:
    """The sections: each launch, the roofline, the instructions, the counters by line."""
    several = len(found.kernels) > 1
    launches = [
        Part(f"Launch {place} of {len(found.kernels)}" if several else "Launch", _launch(one, found))
        for place, one in enumerate(found.kernels, 1)
    ]
    roof = [] if found.exhibit else [_roofline(found)]
    return (*launches, *roof, *(_instructions(one, several) for one in found.kernels), *_counters(found))


def lesson(name: str) -> str:
    """What a reader learns from a rung or an exhibit."""
    lessons = {one.name: one.lesson for one in CUDA} | {one.name: one.lesson for one in EXHIBITS}
    return lessons.get(name, "")


def where(found: Inspection, config: bool = True) -> str:
    """The product, the config and the device in a line."""
    problem, device = found.problem, found.device
    columns = ", B by columns" if problem.b_layout == "col" else ""
    shape = f"{counters.size(problem, found.exhibit)}, {problem.precision or problem.dtype}{columns}"
    chosen = f", {configured(found)}" if config and found.config else ""
    limits = f"{device.sms} multiprocessors at {device.clock:.4g} GHz, {words.digits(device.bandwidth)} GB/s"
    return f"{shape}{chosen}; {device.name}: {device.arch}, {limits}"


def configured(found: Inspection) -> str:
    """Its config: "bm 128, bn 64"."""
    return ", ".join(f"{key} {value}" for key, value in found.config.items())


def launch_of(found: Inspection) -> tuple[tuple[str, str], ...]:
    """The facts of the launch that multiplies."""
    return _launch(found.kernels[-1], found)


def _launch(one: Kernel, found: Inspection) -> tuple[tuple[str, str], ...]:
    limits, filled = found.device.limits, one.occupancy
    blocks = one.grid[0] * one.grid[1] * one.grid[2]
    spills = f"{one.spilled} bytes a thread spilled to memory" if one.spilled else "no spills"
    stack = f", {one.stack} bytes of local memory" if one.stack else ""
    held = one.static_shared + one.dynamic_shared
    shared = (
        f"{words.size(held)} a block: {one.static_shared:,} bytes static, {one.dynamic_shared:,} dynamic; "
        f"a block may have {words.size(limits.shared)}"
    )
    allowed = ", ".join(f"{name} {number}" for name, number in filled.limits.items())
    warps = f"{filled.warps} of {filled.most_warps} warps a multiprocessor, {words.percent(filled.share)}"
    return (
        ("kernel", one.name),
        ("grid", f"{_count(blocks, 'block')} of {_threads(one.block)}"),
        ("registers", f"{one.registers} a thread, {spills}{stack}"),
        ("shared memory", shared if held else "none"),
        *([("scratch memory", words.size(found.workspace))] if found.workspace and one is found.kernels[-1] else []),
        ("occupancy", f"{warps}: {_count(filled.blocks, 'block')}, limited by {' and '.join(filled.by)}"),
        ("blocks allowed", f"by {allowed}"),
        ("waves", _waves(blocks, filled)),
    )


def _waves(blocks: int, filled: Occupancy) -> str:
    """How often the grid fills the device, and how full the last wave is."""
    share = words.percent(filled.tail)
    if blocks <= filled.slots:
        return f"1: {blocks:,} of the {filled.slots:,} blocks that run at a time, {share} of the device"
    each = f"{words.digits(filled.waves)} of {filled.slots:,} blocks"
    return f"{each}; the last fills {share} of the device, all together {words.percent(filled.filled)}"


def _roofline(found: Inspection) -> Part:
    device, loads, once = found.device, found.loads, found.once
    each = round(loads.peak / device.sms / device.clock)
    units = f"{device.sms} multiprocessors × {each} operations a clock × {device.clock:.4g} GHz"
    rows = [
        ("peak", f"{units} = {words.digits(loads.peak)} GFLOP/s ({UNITS[found.unit]})"),
        ("as it loads", f"{_loading(found)}: {_reached(loads)}"),
        ("each element once", f"{_moved(once)}: {_reached(once)}"),
    ]
    note = (
        "As it loads counts every load of A and B as one from memory; each element once is what perfect caches would "
        "leave. Caches keep a kernel between the two. The clock is the boost clock; power limits may lower it."
    )
    return Part(ROOFLINE, tuple(rows), notes=(note,))


def _loading(found: Inspection) -> str:
    size, (bm, bn) = dtypes.get(found.problem.dtype).size, found.tile
    if (bm, bn) == (1, 1):
        return f"2 loads for every multiply-add, {2 * size} bytes for 2 operations"
    return f"A once for each {bn} columns of C, B once for each {bm} rows, {_moved(found.loads)}"


def _reached(line: Roofline) -> str:
    """The arithmetic of one roof in words.

    >>> from gemmery.cuda.roofline import roofline
    >>> _reached(roofline(2, 8, peak=346.5, bandwidth=86.4))
    '0.250 operations a byte × 86.4 GB/s = 21.6 GFLOP/s attainable, limited by memory'
    """
    product = f"{words.digits(line.intensity)} operations a byte × {words.digits(line.bandwidth)} GB/s"
    by_memory = f"{words.digits(line.intensity * line.bandwidth)} GFLOP/s"
    if line.by == "memory":
        return f"{product} = {by_memory} attainable, limited by memory"
    return f"{product} = {by_memory}, above the peak: {words.digits(line.attainable)} GFLOP/s attainable"


def _moved(line: Roofline) -> str:
    return f"{words.amount(line.bytes, 'B')} for {words.amount(line.flops, 'FLOP')}"


def _instructions(one: Kernel, several: bool) -> Part:
    title = f"Instructions of {one.name.partition('<')[0]}" if several else "Instructions"
    if one.missing:
        shown = tuple((name, f"{number:,}") for name, number in list(one.ptx_counts.items())[:MOST_PTX])
        return Part(f"{title}, PTX", shown, ("opcode", "kernel"), (one.missing,))
    columns = {"kernel": one.counts} | ({"main loop": one.loop} if one.loop else {})
    if one.passes > 1:
        columns[f"step: {one.passes} passes of it"] = one.step
    rows = [(name, *(f"{x.get(name, 0):,}" for x in columns.values())) for name in one.counts if is_notable(name)]
    others = [sum(number for name, number in x.items() if not is_notable(name)) for x in columns.values()]
    rows.append(("others", *(f"{number:,}" for number in others)))
    return Part(title, tuple(rows), ("kind", *columns), tuple(_loads(one.step or one.loop)))


def _counters(found: Inspection) -> Sequence[Part]:
    """The counters by line, or why there are none; nothing where they were not asked for."""
    if found.emulated is None:
        return [Part("Counters by line", (("not counted", found.not_emulated),))] if found.not_emulated else []
    run = found.emulated
    title = f"Counters by line{counters.of_file(run)}, {counters.where(run, found.exhibit)}"
    head, rows = counters.table(run)
    return [Part(title, rows, head, tuple(filter(None, (counters.NOTE, counters.kinds(run), counters.roof(found)))))]


def _loads(loop: Mapping[str, int]) -> Sequence[str]:
    """Bytes that the main loop loads for each multiply-add, where CUDA cores do them."""
    per = {space: bytes_each(loop, space) for space in ("global", "shared")}
    stated = [f"{words.digits(each)} bytes of {space} memory" for space, each in per.items() if each]
    return [f"In the main loop a thread loads {' and '.join(stated)} for each multiply-add."] if stated else []


def _codes(found: Inspection, ptx: bool, machine: bool) -> list[tuple[str, str]]:
    given = []
    for one in found.kernels:
        given += [(f"PTX of {one.name}", one.ptx)] if ptx else []
        given += [(f"SASS of {one.name}", one.sass or one.missing)] if machine else []
    return given


def _threads(block: tuple[int, int, int]) -> str:
    sides = [str(side) for side in block if side > 1]
    threads = _count(math.prod(block), "thread")
    return f"{' × '.join(sides)} = {threads}" if len(sides) > 1 else threads


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _fitted(part: Part, width: int) -> Part:
    """Counters cut to the columns of a terminal; any other part as it is."""
    if SOURCE not in part.head:
        return part
    head, rows, note = counters.fitted(part.head, part.rows, width - 2)  # the table's edges
    return replace(part, head=head, rows=rows, notes=(*part.notes, *filter(None, [note])))


def _table(part: Part) -> Table:
    rows, head = part.rows, part.head
    apart = 1 if head[:1] == counters.HEAD[:1] else 2
    table = Table(box=box.SIMPLE_HEAD if head else None, show_header=bool(head), padding=(0, apart, 0, 0))
    for index in range(len(rows[0]) if rows else len(head)):
        name = head[index] if head else ""
        left = index == 0 or not head or name == SOURCE
        table.add_column(name, justify="left" if left else "right", no_wrap=index == 0 or bool(head), overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style="dim" if index == 0 else "") for index, cell in enumerate(row)))
    return table


def _html(part: Part) -> str:
    classes = [" class=source" if name == SOURCE else "" for name in part.head] or [""] * len(part.rows[0])
    head = "".join(f"<th{kind}>{html.escape(name)}</th>" for name, kind in zip(part.head, classes, strict=False))
    rows = "".join(
        f"<tr>{''.join(f'<td{kind}>{html.escape(cell)}</td>' for cell, kind in zip(row, classes, strict=True))}</tr>"
        for row in part.rows
    )
    return f"<table class={'figures' if head else 'words'}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
