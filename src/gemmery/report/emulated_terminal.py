"""The ladder on the emulator in a terminal: progress, then a table for each size, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.text import Text

from gemmery.ladder.rung_counts import EmulatedLadder, EmulatedRung
from gemmery.report.emulated_tables import COUNTED, ROOF, complaints, described, memory, overviews, shape, verdict
from gemmery.report.sheet import Sheet
from gemmery.report.terminal import Growing, laid_out


class Counting(Growing[EmulatedRung]):
    """The progress of an emulated ladder; `update` it with every rung."""

    def line(self, record: EmulatedRung) -> str:
        what = f"{record.rung}, {shape(record)}, {record.dtype}"
        if record.refused:
            return f"{what}: not run, {record.refused}"
        counts = f"{record.counts.sectors:,} sectors, {record.counts.bank_conflicts:,} bank conflicts"
        return f"{what}: {counts}, error/bound {record.error:.2g}" + "".join(f"; it {fault}" for fault in record.wrong)

    def sheets(self, rows: Sequence[EmulatedRung]) -> Sequence[Sheet]:
        return (memory(rows),)

    def place(self, record: EmulatedRung) -> object:
        return record.size


def show_emulated(ladder: EmulatedLadder, console: Console) -> None:
    """Print one table for each size, what it means, and the verdict."""
    for sheet in overviews(ladder):
        console.print(Group(*laid_out(sheet, console.width)))
    if any(not run.refused for run in ladder.rungs):
        for text in (COUNTED, ROOF, f"{described(ladder.device)}."):
            console.print(Text(text, style="dim"))
    faults = complaints(ladder)
    console.print(Text(verdict(ladder), style="bold red" if faults else "bold"))
    for fault in faults:
        console.print(Text(fault, style="red"))
