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

KINDS = ("fma", "mma", "ld", "st", "ldmatrix", "cp.async", "bar", "shfl")  # instructions with a column of their own
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
    """For each size: global memory; shared memory, branches and what was checked; the roof; instructions by kind."""
    sizes = dict.fromkeys(one.size for one in ladder.rungs)
    by_size = [[one for one in ladder.rungs if one.size == size] for size in sizes]
    return tuple(sheet(same) for same in by_size for sheet in (_global, _shared, _roof, _kinds))


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
    return f"<dt><code>{rung.name}</code></dt><dd><b>{idea}.</b><p>{html.escape(rung.lesson)}</p></dd>"


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
            _count(counts.bytes),
        )

    head = ("requests", "sectors", "sectors a load", "sectors a store", "used, loads", "used, stores", "bytes")
    sheet = _sheet("Global memory", rungs, head, row)
    others = [f"{one.rung}: {shape(one)}, {one.dtype}" for one in rungs if not one.refused and _apart(one, rungs)]
    notes = ["Used is bytes that lanes asked for of the 32 of a sector."]
    notes += [f"Other products: {'; '.join(others)}."] if others else []
    notes += [f"{one.rung} did not run: {one.refused}" for one in rungs if one.refused]
    return replace(sheet, notes=tuple(notes))


def _shared(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        counts = one.counts
        claims = Cell(f"{len(one.unmet)} not met !", tone="bad") if one.unmet else Cell("met" if one.expected else "")
        return (
            _count(counts.wavefronts),
            _count(counts.wavefronts_ideal),
            _count(counts.bank_conflicts),
            _count(counts.branches),
            _count(counts.divergent_branches),
            Cell(f"{len(one.findings)} !", tone="bad") if one.findings else Cell("none"),
            claims,
            Cell(f"{one.error:.2g}") if one.error <= 1 else Cell(f"{one.error:.2g} !", tone="bad"),
        )

    head = ("wavefronts", "ideal", "bank conflicts", "branches", "divergent", "findings", "claims", "error/bound")
    sheet = _sheet("Shared memory, branches and checks", rungs, head, row)
    claims = [f"{one.rung} claims {_claims(one)}" for one in rungs if one.expected]
    wrong = [f"{one.rung} {said}" for one in rungs for said in one.wrong]
    return replace(sheet, notes=(*claims, *wrong))


def _roof(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        by = "compute" if one.compute_seconds >= one.memory_seconds else "memory"
        return (
            _count(one.counts.flops),
            _figure(one.intensity),
            _figure(one.compute_seconds * 1e6),
            _figure(one.memory_seconds * 1e6),
            _figure(one.roof_seconds * 1e6),
            Cell(f"{by}" if by == "memory" else UNITS[one.unit]),
        )

    head = ("flops", "flops a byte", "compute, µs", "memory, µs", "roof, µs", "by")
    return _sheet("Roofline", rungs, head, row)


def _kinds(rungs: Sequence[EmulatedRung]) -> Sheet:
    def counted(one: EmulatedRung, kind: str) -> int:
        return sum(number for name, number in one.kinds.items() if name == kind or name.startswith(f"{kind}."))

    shown = tuple(kind for kind in KINDS if any(counted(one, kind) for one in rungs))

    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        figures = [counted(one, kind) for kind in shown]
        return (*map(_count, figures), _count(one.counts.warp_instructions - sum(figures)))

    return _sheet("Warps' instructions by kind", rungs, (*shown, "others"), row)


def _claims(one: EmulatedRung) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in one.expected.items())


def _apart(one: EmulatedRung, rungs: Sequence[EmulatedRung]) -> bool:
    """True for another product than most rungs of the size have."""
    return not one.m == one.n == one.k == one.size or one.dtype != rungs[0].dtype


def _count(number: int) -> Cell:
    return Cell(f"{number:,}" if number else "0", tone="" if number else "faint")


def _figure(value: float) -> Cell:
    return Cell(words.digits(value), tone="" if value else "faint")
