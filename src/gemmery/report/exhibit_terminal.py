"""The exhibits in a terminal: their list, and one exhibit with its predictions and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.bench.record import Run
from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit
from gemmery.report.doubts import banner, weighed
from gemmery.report.exhibit_tables import Predicted, emulated_sheet, faults, measured_sheet, plain
from gemmery.report.sheet import Sheet
from gemmery.report.terminal import STYLES, Growing


class Exhibiting(Growing[EmulatedExhibit]):
    """Progress while the emulator runs an exhibit; `update` it with every config."""

    def line(self, record: EmulatedExhibit) -> str:
        config = ", ".join(f"{key} {value}" for key, value in record.config.items())
        counted = ", ".join(f"{value:,} {plain(name)}" for name, value in record.counted.items())
        return f"{record.name}, {config}: {counted}"

    def sheets(self, rows: Sequence[EmulatedExhibit]) -> Sequence[Sheet]:
        return ()

    def place(self, record: EmulatedExhibit) -> object:
        return record.name


def list_exhibits(exhibits: Sequence[Exhibit], console: Console) -> None:
    """Print a line for each exhibit: its name and the effect that it shows."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for exhibit in exhibits:
        table.add_row(Text(exhibit.name, style="bold"), Text(exhibit.idea))
    console.print(table)


def show_exhibit(exhibit: Exhibit, source: str, predicted: Predicted, run: Run, console: Console) -> None:
    """Print an exhibit: idea, lesson and kernel, then the predicted counts and the measured times."""
    _introduce(exhibit, source, console)
    _print(measured_sheet(exhibit, predicted, weighed(run)), console)
    if warning := banner(run):
        console.print(Text(warning, style="bold red"))
    console.print(Text("Counts are those that the rules of the hardware predict for one launch.", style="dim"))
    for fault in faults(run.measurements):
        console.print(Text(fault))


def show_emulated_exhibit(exhibit: Exhibit, source: str, emulated: Sequence[EmulatedExhibit], console: Console) -> None:
    """Print an exhibit without a GPU: the counts that the rules predict next to those of the emulator."""
    _introduce(exhibit, source, console)
    _print(emulated_sheet(emulated, "rules", "emulator"), console)
    for line in (
        f"rules: the counts that the rules of the hardware predict for one launch on {emulated[0].n:,} elements",
        f"emulator: the counts of the kernel's PTX for {emulated[0].arch}; every result was checked",
    ):
        console.print(Text(line, style="dim"))


def _introduce(exhibit: Exhibit, source: str, console: Console) -> None:
    console.print(Text.assemble((exhibit.name, "bold"), (f": {exhibit.idea}", "dim")))
    console.print(Text(exhibit.lesson))
    console.print()
    console.print(Text("\n".join(folded(source, console.width)), style="dim"))
    console.print()


def _print(sheet: Sheet, console: Console) -> None:
    """A sheet without its title and notes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in sheet.head:
        table.add_column(name, justify="right")
    for row in sheet.rows:
        table.add_row(*(Text(cell.text, style=STYLES[cell.tone]) for cell in row))
    console.print(table)


def folded(source: str, width: int) -> Iterator[str]:
    """Lines of code wrapped to so many columns; comments continue as comments.

    >>> list(folded("  x = first + second;", 16))
    ['  x = first +', '      second;']
    """
    for line in source.rstrip().splitlines():
        code = line.lstrip()
        below = line[: len(line) - len(code)] + ("// " if code.startswith("//") else "    ")
        yield from wrap(line, width, subsequent_indent=below, break_on_hyphens=False) or [""]
