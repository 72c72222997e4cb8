"""The ladder on the emulator: its tables in a terminal and as a page, and what is shown while it runs."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console, Group
from rich.text import Text

from gemmery.cuda.device import Device
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.emulated import EmulatedLadder, EmulatedRung
from gemmery.ladder.rung import Rung
from gemmery.report import words
from gemmery.report.inspection import UNITS
from gemmery.report.sheet import Cell, Sheet
from gemmery.report.terminal import Growing, ideas, laid_out

KINDS = {
    "fma": ("fma",),
    "mma": ("mma",),
    "loads": ("ld", "ldmatrix"),
    "stores": ("st", "stmatrix"),
    "cp.async": ("cp.async",),
    "barriers": ("bar",),
}  # instructions with a column of their own
NOTE = (
    "Counted on the emulator: warps' requests and instructions, adjacent accesses as ptxas merges them. Caches are not "
    "modelled, so bytes are those asked of L1, 32 a sector. The roof is the longer of the operations at the peak of "
    "their unit and these bytes at the bandwidth of memory: no time was measured."
)


class Counting(Growing[EmulatedRung]):
    """What is shown while the emulator climbs the ladder; `update` it with every rung."""

    def line(self, record: EmulatedRung) -> str:
        what = f"{record.rung}, {shape(record)}, {record.dtype}"
        if record.refused:
            return f"{what}: not run, {record.refused}"
        counts = record.counts
        shown = f"{counts.sectors:,} sectors, {counts.bank_conflicts:,} bank conflicts"
        return f"{what}: {shown}, error/bound {record.error:.2g}" + "".join(f"; it {one}" for one in record.wrong)

    def sheets(self, rows: Sequence[EmulatedRung]) -> Sequence[Sheet]:
        return (_global(rows),)

    def place(self, record: EmulatedRung) -> object:
        return record.size


def emulated_sheets(ladder: EmulatedLadder) -> tuple[Sheet, ...]:
    """For each size: global memory; shared memory and branches; the roof; instructions by kind; what was checked."""
    sizes = dict.fromkeys(one.size for one in ladder.rungs)
    by_size = [[one for one in ladder.rungs if one.size == size] for size in sizes]
    return tuple(sheet(same) for same in by_size for sheet in (_global, _shared, _roof, _kinds, _checks))


def show_emulated(ladder: EmulatedLadder, console: Console) -> None:
    """Print the tables, and what was emulated."""
    for sheet in emulated_sheets(ladder):
        console.print(Group(*laid_out(sheet, console.width)))
    console.print(Text("What each rung changed", style="bold"))
    console.print(ideas(_named(ladder)))
    console.print(Text(f"{NOTE} {described(ladder.device)}.", style="dim"))


def emulated_page(ladder: EmulatedLadder) -> str:
    """The same as one HTML page that needs nothing else."""
    from gemmery.report.page import document, section, table

    when = f"{ladder.started[:16].replace('T', ' ')} UTC"
    where = html.escape(f"{described(ladder.device)}, on the emulator · {when}")
    lead = f"<p class=lead>{html.escape(NOTE)}</p>"
    wrong = "".join(f"<p class=note>{html.escape(one)}</p>" for one in complaints(ladder))
    return document(
        f"The ladder on the emulator, as {ladder.device.name}",
        f"<header><h1>The ladder, emulated</h1><p class=faint>{where}</p>{lead}</header>",
        section("What is wrong", wrong) if wrong else "",
        section("What was counted", *(table(sheet) for sheet in emulated_sheets(ladder))),
        section("Rung by rung", f"<dl class=rungs>{''.join(map(_lesson, _named(ladder)))}</dl>"),
    )


def complaints(ladder: EmulatedLadder) -> tuple[str, ...]:
    """What is wrong with the rungs, a line each; () when all is well."""
    return tuple(f"{one.rung}, {shape(one)}, {one.dtype}: it {said}" for one in ladder.rungs for said in one.wrong)


def described(device: Device) -> str:
    """The device in a line: its code, and the limits that roofs are made of."""
    peaks = "; ".join(
        f"{words.digits(device.peak(unit))} GFLOP/s by {name}" for unit, name in UNITS.items() if device.peak(unit)
    )
    where = f"{device.name}: {device.arch}, {device.sms} multiprocessors at {device.clock:.4g} GHz"
    return f"{where}, {words.digits(device.bandwidth)} GB/s; {peaks}"


def shape(one: EmulatedRung) -> str:
    """`n = 256`, or all three sides where they differ."""
    return f"n = {one.n}" if one.m == one.n == one.k else f"{one.m} × {one.n} × {one.k}"


def _named(ladder: EmulatedLadder) -> tuple[Rung, ...]:
    ran = {one.rung for one in ladder.rungs}
    return tuple(rung for rung in CUDA if rung.name in ran)


def _lesson(rung: Rung) -> str:
    idea = html.escape(rung.idea[:1].upper() + rung.idea[1:])
    claims = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in rung.expect.items())
    claimed = f"<p class=note>It claims, of an aligned product: {claims}.</p>" if claims else ""
    return f"<dt><code>{rung.name}</code></dt><dd><b>{idea}.</b><p>{html.escape(rung.lesson)}</p>{claimed}</dd>"


def _sheet(
    title: str, rungs: Sequence[EmulatedRung], head: tuple[str, ...], row: Callable[[EmulatedRung], tuple[Cell, ...]]
) -> Sheet:
    """A row for each rung that ran."""
    ran = [one for one in rungs if not one.refused]
    return Sheet(f"{title}, n = {rungs[0].size}", ("rung", *head), tuple((Cell(one.rung), *row(one)) for one in ran))


def _global(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        counts = one.counts
        return (
            _count(counts.requests),
            _count(counts.sectors),
            _figure(counts.load_sectors_a_request),
            _figure(counts.store_sectors_a_request),
            _figure(counts.load_bytes_a_sector),
            _figure(counts.store_bytes_a_sector),
        )

    head = ("requests", "sectors", "sectors a load", "sectors a store", "used, loads", "used, stores")
    sheet = _sheet("Global memory", rungs, head, row)
    others: dict[str, list[str]] = {}
    for one in rungs:
        if not one.refused and _apart(one, rungs):
            others.setdefault(f"{shape(one)}, {one.dtype}", []).append(one.rung)
    stated = "; ".join(f"{product}: {', '.join(names)}" for product, names in others.items())
    notes = ["Used is bytes that lanes asked for of the 32 of a sector."]
    notes += [f"Other products: {stated}."] if stated else []
    notes += [f"{one.rung} did not run: {one.refused}" for one in rungs if one.refused]
    return replace(sheet, notes=tuple(notes))


def _shared(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        counts = one.counts
        return (
            _count(counts.wavefronts),
            _count(counts.wavefronts_ideal),
            _count(counts.bank_conflicts),
            _count(counts.branches),
            _count(counts.divergent_branches),
        )

    head = ("wavefronts", "ideal", "bank conflicts", "branches", "divergent")
    return _sheet("Shared memory and branches", rungs, head, row)


def _roof(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        seconds = (one.compute_seconds, one.memory_seconds, one.roof_seconds)
        return (
            _figure(one.counts.flops / 1e6),
            _figure(one.counts.bytes / 1e6),
            _figure(one.intensity),
            *(_figure(time * 1e6) for time in seconds),
        )

    head = ("Mflop", "MB", "flops a byte", "compute, µs", "memory, µs", "roof, µs")
    return _sheet("Roofline", rungs, head, row)


def _kinds(rungs: Sequence[EmulatedRung]) -> Sheet:
    def counted(one: EmulatedRung, column: str) -> int:
        return sum(number for kind, number in one.kinds.items() if kind in KINDS[column])

    shown = tuple(column for column in KINDS if any(counted(one, column) for one in rungs))

    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        figures = [counted(one, column) for column in shown]
        return tuple(_figure(number / 1e3) for number in (*figures, one.counts.warp_instructions - sum(figures)))

    return _sheet("Thousands of warps' instructions by kind", rungs, (*shown, "others"), row)


def _checks(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        claims = Cell(f"{len(one.unmet)} not met !", tone="bad") if one.unmet else Cell("met" if one.expected else "")
        return (
            Cell(f"{one.error:.2g}") if one.error <= 1 else Cell(f"{one.error:.2g} !", tone="bad"),
            Cell(f"{len(one.findings)} !", tone="bad") if one.findings else Cell("none"),
            claims,
        )

    notes = [f"{one.rung} {line}" for one in rungs for line in one.wrong]
    if any(not one.refused and not one.expected for one in rungs):
        notes.append("Claims are of products that no tile's edge cuts; where none is made, the cell is empty.")
    return replace(_sheet("Checks", rungs, ("error/bound", "findings", "claims"), row), notes=tuple(notes))


def _apart(one: EmulatedRung, rungs: Sequence[EmulatedRung]) -> bool:
    """True for another product than most rungs of the size have."""
    return not one.m == one.n == one.k == one.size or one.dtype != rungs[0].dtype


def _count(number: int) -> Cell:
    return Cell(f"{number:,}" if number else "0", tone="" if number else "faint")


def _figure(value: float) -> Cell:
    return Cell(words.digits(value), tone="" if value else "faint")
