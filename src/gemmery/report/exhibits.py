"""The exhibits in a terminal: the list of them, and one with what is predicted and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.bench.record import Run
from gemmery.cuda.exhibits import Config
from gemmery.ladder.exhibits import Exhibit
from gemmery.report import words

Predicted = Sequence[tuple[Config, Mapping[str, int]]]


def list_exhibits(exhibits: Sequence[Exhibit], console: Console) -> None:
    """A line for each: its name, and the effect it shows."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for one in exhibits:
        table.add_row(Text(one.name, style="bold"), Text(one.idea))
    console.print(table)


def show_exhibit(
    shown: Exhibit, source: str, predicted: Predicted, run: Run | None, missing: str, console: Console
) -> None:
    """One exhibit: idea, lesson and kernel, then what the rules predict, and what was measured or why nothing was."""
    console.print(Text(shown.name, style="bold"), Text(shown.idea, style="dim"))
    console.print(Text(shown.lesson))
    console.print()
    console.print(Text(source.rstrip(), style="dim"), soft_wrap=True)
    console.print()
    console.print(_figures(shown, predicted, run))
    console.print(Text("counts: of one launch, by the rules of the hardware", style="dim"))
    if missing:
        console.print(Text(f"not run: {missing}"))
    for m in run.measurements if run else ():
        if m.refused or not words.passed(m):
            console.print(Text(f"{m.config}: {m.refused or 'an element of the result is wrong'}"))


def _figures(shown: Exhibit, predicted: Predicted, run: Run | None) -> Table:
    """A row for each config: what was set, time, ratio to the parent, and the predicted counts."""
    counts = list(predicted[0][1])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    head = [*shown.default, *(["time"] if run else []), *([shown.parent] if run and shown.parent else [])]
    for name in (*head, *(count.replace("_", " ") for count in counts)):
        table.add_column(name, justify="right")
    taken = {tuple(sorted(m.config.items())): m for m in run.measurements} if run else {}
    for config, each in predicted:
        row = [str(value) for value in config.values()]
        if run:
            m = taken[tuple(sorted(config.items()))]
            row.append(words.duration(m.seconds) if m.seconds else "refused")
            if shown.parent:
                row.append(words.times(m.versus.get(shown.parent), m.spread.get(shown.parent, 0.0)))
        table.add_row(*row, *(f"{each[count]:,}" for count in counts))
    return table
