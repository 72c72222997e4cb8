"""The exhibits in a terminal: their list, and one exhibit with its predictions and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.bench.record import Run
from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit
from gemmery.problem import Config
from gemmery.report import words
from gemmery.report.doubts import banner, weighed
from gemmery.report.sheet import Sheet
from gemmery.report.terminal import Growing

Predicted = Sequence[tuple[Config, Mapping[str, int]]]


class Exhibiting(Growing[EmulatedExhibit]):
    """Progress while the emulator runs an exhibit; `update` it with every config."""

    def line(self, record: EmulatedExhibit) -> str:
        config = ", ".join(f"{key} {value}" for key, value in record.config.items())
        counted = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in record.counted.items())
        return f"{record.name}, {config}: {counted}"

    def sheets(self, rows: Sequence[EmulatedExhibit]) -> Sequence[Sheet]:
        return ()

    def place(self, record: EmulatedExhibit) -> object:
        return record.name


def list_exhibits(exhibits: Sequence[Exhibit], console: Console) -> None:
    """Print a line for each exhibit: its name and the effect that it shows."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for one in exhibits:
        table.add_row(Text(one.name, style="bold"), Text(one.idea))
    console.print(table)


def show_exhibit(shown: Exhibit, source: str, predicted: Predicted, run: Run, console: Console) -> None:
    """Print an exhibit: idea, lesson and kernel, then the predicted counts and the measured times."""
    _introduce(shown, source, console)
    console.print(_figures(shown, predicted, weighed(run)))
    if warning := banner(run):
        console.print(Text(warning, style="bold red"))
    console.print(Text("Counts are those that the rules of the hardware predict for one launch.", style="dim"))
    for m in run.measurements:
        if m.refused or not words.passed(m):
            console.print(Text(f"{m.config}: {m.refused or 'an element of the result is wrong'}"))


def show_emulated_exhibit(shown: Exhibit, source: str, emulated: Sequence[EmulatedExhibit], console: Console) -> None:
    """Print an exhibit without a GPU: the counts that the rules predict next to those of the emulator."""
    _introduce(shown, source, console)
    first = emulated[0]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in (*first.config, "counts", *(count.replace("_", " ") for count in first.predicted)):
        table.add_column(name, justify="right")
    for one in emulated:
        table.add_row(
            *(str(value) for value in one.config.values()), "rules", *map("{:,}".format, one.predicted.values())
        )
        seen = [
            Text(f"{value:,}", style="dim" if value == one.predicted[name] else "bold red")
            for name, value in one.counted.items()
        ]
        table.add_row(*[""] * len(one.config), Text("emulator", style="dim"), *seen)
    console.print(table)
    for line in (
        f"rules: the counts that the rules of the hardware predict for one launch on {first.n:,} elements",
        f"emulator: the counts of the kernel's PTX for {first.arch}; every result was checked",
    ):
        console.print(Text(line, style="dim"))


def _introduce(shown: Exhibit, source: str, console: Console) -> None:
    console.print(Text.assemble((shown.name, "bold"), (f": {shown.idea}", "dim")))
    console.print(Text(shown.lesson))
    console.print()
    console.print(Text("\n".join(folded(source, console.width)), style="dim"))
    console.print()


def folded(source: str, width: int) -> Iterator[str]:
    """Lines of code wrapped to so many columns; comments continue as comments.

    >>> list(folded("  x = first + second;", 16))
    ['  x = first +', '      second;']
    """
    for line in source.rstrip().splitlines():
        code = line.lstrip()
        below = line[: len(line) - len(code)] + ("// " if code.startswith("//") else "    ")
        yield from wrap(line, width, subsequent_indent=below, break_on_hyphens=False) or [""]


def _figures(shown: Exhibit, predicted: Predicted, run: Run) -> Table:
    """A row for each config: its values, the time, the ratio to the parent, and the predicted counts."""
    counts = list(predicted[0][1])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    head = [*shown.default, "time", *([shown.parent] if shown.parent else [])]
    for name in (*head, *(count.replace("_", " ") for count in counts)):
        table.add_column(name, justify="right")
    taken = {tuple(sorted(m.config.items())): m for m in run.measurements}
    for config, each in predicted:
        row = [str(value) for value in config.values()]
        m = taken[tuple(sorted(config.items()))]
        row.append(words.duration(m.seconds) if m.seconds else "refused")
        if shown.parent:
            row.append(words.times(m.versus.get(shown.parent), m.spread.get(shown.parent, 0.0)))
        table.add_row(*row, *(f"{each[count]:,}" for count in counts))
    return table
