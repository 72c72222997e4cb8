"""The ladder on the emulator: one table in a terminal, all of the counters as a page, and a line for each rung run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console, Group
from rich.text import Text

from gemmery.cuda.device import Device
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung_counts import EmulatedLadder, EmulatedRung
from gemmery.report import words
from gemmery.report.sheet import Cell, Sheet
from gemmery.report.terminal import Growing, laid_out

KINDS = {
    "fma": ("fma",),
    "mma": ("mma",),
    "loads": ("ld", "ldmatrix"),
    "stores": ("st", "stmatrix"),
    "cp.async": ("cp.async",),
    "barriers": ("bar",),
}  # instructions with a column of their own
PARENTS = {rung.name: rung.parent for rung in CUDA}
CHOOSING = {rung.name for rung in CUDA if rung.default.get("bm") == 0}
COUNTED = (
    "Counted on the emulator, over the whole product. Sectors are the 32-byte pieces of global memory that warps move; "
    "no cache is modelled. Wavefronts are passes over the banks of shared memory; bank conflicts are the extra passes "
    "because lanes need different words of one bank. Instructions are warp instructions."
)
ROOF = (
    "The roof is the longest of four times: sectors at the bandwidth of memory, operations at the peak of their unit "
    "(compute), wavefronts at 1 (shared) and instructions at 4 (issue) per clock and multiprocessor. It assumes that "
    "the grid fills the device, as a large product does. × parent is the parent's roof over the rung's. No time was "
    "measured."
)


class Counting(Growing[EmulatedRung]):
    """The progress of an emulated ladder; `update` it with every rung."""

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


def overviews(ladder: EmulatedLadder) -> tuple[Sheet, ...]:
    """One table for each size: what each rung counted, its roof, and how that compares with its parent's."""
    return tuple(_overview(ladder, rungs) for rungs in by_size(ladder) if not all(one.refused for one in rungs))


def emulated_sheets(ladder: EmulatedLadder) -> tuple[Sheet, ...]:
    """For each size: global memory; shared memory and branches; the roofs; instructions by kind; the checks."""
    return tuple(sheet(same) for same in by_size(ladder) for sheet in (_global, _shared, _roof, _kinds, _checks))


def show_emulated(ladder: EmulatedLadder, console: Console) -> None:
    """Print one table for each size, what it means, and the verdict."""
    for sheet in overviews(ladder):
        console.print(Group(*laid_out(sheet, console.width)))
    if any(not one.refused for one in ladder.rungs):
        for text in (COUNTED, ROOF, f"{described(ladder.device)}."):
            console.print(Text(text, style="dim"))
    wrong = complaints(ladder)
    console.print(Text(verdict(ladder), style="bold red" if wrong else "bold"))
    for one in wrong:
        console.print(Text(one, style="red"))


def verdict(ladder: EmulatedLadder) -> str:
    """The checks of all rungs in a sentence.

    >>> verdict(lab.emulated_ladder(["simt_naive", "simt_smem"]))  # doctest: +SKIP
    '2 of 2 results are right, no findings, all claims hold.'
    """
    ran = [one for one in ladder.rungs if not one.refused]
    right = sum(one.error <= 1 for one in ran)
    found = sum(len(one.findings) for one in ran)
    unmet = sum(len(one.unmet) for one in ran)
    findings = words.plural(found, "finding") if found else "no findings"
    claims = f"{words.plural(unmet, 'claim')} not met" if unmet else "all claims hold"
    left = len(ladder.rungs) - len(ran)
    if not ran:
        return f"No rung ran: {'; '.join(dict.fromkeys(f'{one.rung}, {one.refused}' for one in ladder.rungs))}."
    refused = f"; {words.plural(left, 'rung')} did not run" if left else ""
    return f"{right} of {len(ran)} results are right, {findings}, {claims}{refused}."


def complaints(ladder: EmulatedLadder) -> tuple[str, ...]:
    """The faults of the rungs, a line each; () when there are none."""
    return tuple(f"{one.rung}, {shape(one)}, {one.dtype}: it {said}" for one in ladder.rungs for said in one.wrong)


def described(device: Device) -> str:
    """The device in a line: its architecture, and the limits that the roofs come from."""
    peaks = "; ".join(
        f"{words.digits(device.peak(unit))} GFLOP/s by {name}"
        for unit, name in words.UNITS.items()
        if device.peak(unit)
    )
    where = f"{device.name}: {device.arch}, {device.sms} multiprocessors at {device.clock:.4g} GHz"
    return f"{where}, {words.digits(device.bandwidth)} GB/s; {peaks}"


def shape(one: EmulatedRung) -> str:
    """`n = 256`, or all three sides where they differ."""
    return f"n = {one.n}" if one.m == one.n == one.k else f"{one.m} × {one.n} × {one.k}"


def _sheet(
    title: str, rungs: Sequence[EmulatedRung], head: tuple[str, ...], row: Callable[[EmulatedRung], tuple[Cell, ...]]
) -> Sheet:
    """A row for each rung that ran."""
    ran = [one for one in rungs if not one.refused]
    return Sheet(f"{title}, n = {rungs[0].size}", ("rung", *head), tuple((Cell(one.rung), *row(one)) for one in ran))


def by_size(ladder: EmulatedLadder) -> list[list[EmulatedRung]]:
    """Return the rungs of each size, in the order of the ladder."""
    sizes = dict.fromkeys(one.size for one in ladder.rungs)
    return [[one for one in ladder.rungs if one.size == size] for size in sizes]


def _overview(ladder: EmulatedLadder, rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        counts, parent = one.counts, PARENTS.get(one.rung)
        gain = ladder.gain(one, parent)
        return (
            _count(counts.sectors),
            _count(counts.wavefronts),
            _count(counts.bank_conflicts),
            _count(counts.warp_instructions),
            _figure(one.roof_seconds * 1e6),
            Cell(one.limit),
            Cell(f"{words.digits(gain)}× {parent}" if gain else ""),
        )

    head = ("sectors", "wavefronts", "bank conflicts", "instructions", "roof, µs", "limit", "× parent")
    sheet = _sheet("Counters and roofs", rungs, head, row)
    ran = [one for one in rungs if not one.refused]
    return replace(sheet, notes=(*_products(rungs), *_tiles(ran, ladder.device)))


def _products(rungs: Sequence[EmulatedRung]) -> list[str]:
    """Notes on rungs with another product than most, and on those that did not run."""
    others: dict[str, list[str]] = {}
    for one in rungs:
        if not one.refused and _apart(one, rungs):
            others.setdefault(f"{shape(one)}, {one.dtype}", []).append(one.rung)
    stated = "; ".join(f"{product}: {', '.join(names)}" for product, names in others.items())
    notes = [f"Other products: {stated}."] if stated else []
    return notes + [f"{one.rung} did not run: {one.refused}" for one in rungs if one.refused]


def _tiles(ran: Sequence[EmulatedRung], device: Device) -> list[str]:
    """How full the grids leave the device, and which rungs chose their tiles by the size of the product."""
    notes = []
    if few := [one for one in ran if one.blocks < device.sms]:
        least, most = min(one.blocks for one in few), max(one.blocks for one in few)
        blocks = words.plural(least, "block") if least == most else f"{least} to {most} blocks"
        which = "All grids have" if len(few) == len(ran) else f"{len(few)} of {len(ran)} grids have"
        if len(few) == 1:
            which = "The grid has" if len(ran) == 1 else f"1 of {len(ran)} grids has"
        notes.append(
            f"{which} {blocks} at this size, fewer than the {device.sms} multiprocessors; the roofs are those of "
            "larger products."
        )
    chosen = [f"{one.rung} {one.tile[0]} × {one.tile[1]}" for one in ran if one.rung in CHOOSING]
    if chosen:
        notes.append(
            f"Rungs that choose their tile by the size of the product: {', '.join(chosen)}. Smaller tiles fill the "
            "device, and load more."
        )
    return notes


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

    head = (
        "accesses of warps",
        "sectors",
        "sectors per load",
        "sectors per store",
        "bytes used per loaded sector",
        "bytes used per stored sector",
    )
    sheet = _sheet("Global memory", rungs, head, row)
    return replace(sheet, notes=("Bytes used are those of a 32-byte sector that a lane requests.", *_products(rungs)))


def _shared(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        counts = one.counts
        return (
            _count(counts.wavefronts),
            _count(counts.shared_load_wavefronts),
            _count(counts.shared_store_wavefronts),
            _count(counts.bank_conflicts),
            _count(counts.wavefronts_ideal),
            _count(counts.branches),
            _count(counts.divergent_branches),
        )

    head = (
        "wavefronts",
        "by loads",
        "by stores",
        "bank conflicts",
        "wavefronts for the bytes alone",
        "branches of warps",
        "divergent branches",
    )
    return replace(_sheet("Shared memory and branches", rungs, head, row), notes=tuple(_wavefronts(rungs)))


def _wavefronts(rungs: Sequence[EmulatedRung]) -> list[str]:
    """Why wavefronts are not the sum of conflicts and of those for the bytes, for each rung where they are not."""
    notes = [words.IDEAL_WAVEFRONTS]
    ran = [(one, one.counts.wavefronts - one.counts.bank_conflicts - one.counts.wavefronts_ideal) for one in rungs]
    fewer = [f"{one.rung} {-rest:,}" for one, rest in ran if rest < 0]
    more = [f"{one.rung} {rest:,}" for one, rest in ran if rest > 0]
    if fewer:
        notes.append(
            f"Fewer, because lanes that read the same words share a wavefront of a wide load: {', '.join(fewer)}."
        )
    if more:
        notes.append(
            "More without a conflict, because cp.async takes a wavefront for each line of global memory and row of "
            f"banks that it joins: {', '.join(more)}."
        )
    return notes


def _roof(rungs: Sequence[EmulatedRung]) -> Sheet:
    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        times = tuple(
            Cell(words.digits(time * 1e6), tone="best" if name == one.limit else "" if time else "faint")
            for name, time in one.roofs.items()
        )
        return (
            _figure(one.counts.flops / 1e6),
            _figure(one.counts.bytes / 1e6),
            _figure(one.intensity),
            *times,
            _count(one.blocks),
        )

    limits = tuple(f"{name}, µs" for name in EmulatedRung("", 0, 0, 0, 0, "", {}).roofs)
    head = ("Mflop", "MB", "flops a byte", *limits, "blocks")
    return _sheet("Roofs", rungs, head, row)


def _kinds(rungs: Sequence[EmulatedRung]) -> Sheet:
    def counted(one: EmulatedRung, column: str) -> int:
        return sum(number for kind, number in one.kinds.items() if kind in KINDS[column])

    shown = tuple(column for column in KINDS if any(counted(one, column) for one in rungs))

    def row(one: EmulatedRung) -> tuple[Cell, ...]:
        figures = [counted(one, column) for column in shown]
        return tuple(_figure(number / 1e3) for number in (*figures, one.counts.warp_instructions - sum(figures)))

    return _sheet("Warp instructions by kind, in thousands", rungs, (*shown, "others"), row)


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
        notes.append("Claims hold for products without partial tiles; the cell of a rung without claims is empty.")
    return replace(_sheet("Checks", rungs, ("error/bound", "findings", "claims"), row), notes=tuple(notes))


def _apart(one: EmulatedRung, rungs: Sequence[EmulatedRung]) -> bool:
    """True for another product than most rungs of that size have."""
    return not one.m == one.n == one.k == one.size or one.dtype != rungs[0].dtype


def _count(number: int) -> Cell:
    return Cell(f"{number:,}" if number else "0", tone="" if number else "faint")


def _figure(value: float) -> Cell:
    return Cell(words.digits(value), tone="" if value else "faint")
