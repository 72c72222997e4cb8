"""Sections and runs in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery_emulator.kernels import counters, kernel_run
from gemmery_emulator.kernels.counters import SOURCE, Section
from gemmery_emulator.kernels.prediction import Prediction
from gemmery_emulator.pages import numerals
from gemmery_emulator.run import EmulatedRun

SHORT = {"instructions": "instr", "wavefronts": "waves", "conflicts": "confl", "requests": "req", "divergent": "div"}
# Left out in this order on narrow terminals.
DISPENSABLE = ("divergent", "used", "requests", "ideal", "sectors", "flops")
LEAST_SOURCE = 20  # characters of source that are worth showing
STYLES = {"": "dim", counters.FEWER: "green", counters.MORE: "yellow", counters.DIFFERS: "bold"}


def show_run(run: EmulatedRun, console: Console) -> None:
    """Print a run of any kernel: its totals, counters by line, findings."""
    console.print(Text.assemble((run.kernel, "bold"), (f": {kernel_run.launched(run)}", "dim")))
    console.print(Text(kernel_run.verdict(run)))
    for section in (*kernel_run.fault_sections(run), *kernel_run.counter_sections(run)):
        show_section(section, console)


def show_prediction(prediction: Prediction, console: Console) -> None:
    """Print the predicted time of a run."""
    show_section(kernel_run.predicted_section(prediction), console)


def show_runs(old: EmulatedRun, new: EmulatedRun, console: Console) -> None:
    """Print the counters of two runs side by side."""
    show_pair(kernel_run.compared(old, new), console)


def show_section(section: Section, console: Console) -> None:
    """Print a section, with counters in the room that there is."""
    part = fitted(section, console.width - 2)  # the table's edges
    rows, head = part.rows, part.head
    gap = 1 if head[:1] == counters.HEAD[:1] else 2
    table = Table(box=box.SIMPLE_HEAD if head else None, show_header=bool(head), padding=(0, gap, 0, 0))
    for index in range(len(rows[0]) if rows else len(head)):
        name = head[index] if head else ""
        is_name = index == 0 or not head or name == SOURCE
        table.add_column(
            name, justify="left" if is_name else "right", no_wrap=index == 0 or bool(head), overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell, style="dim" if index == 0 else "") for index, cell in enumerate(row)))
    _show(part, table, console)


def show_pair(section: Section, console: Console) -> None:
    """Print a section of two kernels, with the differences in color."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
    for name in section.head:
        table.add_column(name, justify="right" if name and section.numbers else "left", overflow="fold")
    for (name, old, new, *ratio), mark in zip(section.rows, section.marks, strict=True):
        table.add_row(Text(name, style="dim"), Text(old), Text(new, style=STYLES[mark]), *ratio)
    _show(section, table, console)


def _show(section: Section, table: Table, console: Console) -> None:
    console.print()
    console.print(Text(section.title, style="bold"))
    console.print(table)
    for note in section.notes:
        console.print(Text(note, style="dim"))


def fitted(section: Section, room: int) -> Section:
    """Counters in `room` columns of a terminal, with a note on what is left out; any other section as it is.

    The source is cropped first; then figures are rounded, the source is left out, and columns are.
    """
    if SOURCE not in section.head:
        return section
    rounded = tuple((row[0], *map(_rounded, row[1:-1]), row[-1]) for row in section.rows)
    short = replace(section, head=tuple(SHORT.get(name, name) for name in section.head), rows=rounded)
    columns = list(range(len(section.head) - 1))  # all but the source
    for table in (section, _noted(short)):
        spare = room - _width(_columns(table, columns)) - 2
        if spare >= LEAST_SOURCE:
            return replace(table, rows=tuple((*row[:-1], _cropped(row[-1], spare)) for row in table.rows))
    if room >= _width(without_source := _columns(section, columns)):
        return without_source
    dropped = []
    for name in DISPENSABLE:
        if _width(_columns(short, columns)) <= room:
            break
        if name in section.head:
            dropped.append(name)
            columns.remove(section.head.index(name))
    return _noted(_columns(short, columns), dropped)


def _columns(section: Section, columns: Sequence[int]) -> Section:
    """These columns of a table."""
    head, *rows = (tuple(row[index] for index in columns) for row in (section.head, *section.rows))
    return replace(section, head=head, rows=tuple(rows))


def _width(section: Section) -> int:
    """Columns of a terminal that a table needs, with two between neighbors."""
    return sum(2 + max(map(len, column)) for column in zip(section.head, *section.rows, strict=True))


def _noted(section: Section, dropped: Sequence[str] = ()) -> Section:
    without = f", {', '.join(dropped)} left out" if dropped else ""
    note = f"Figures are rounded{without}: a wider terminal, --html and --json have all of them."
    return replace(section, notes=(*section.notes, note))


def _cropped(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _rounded(cell: str) -> str:
    """A number in five characters.

    >>> _rounded("4,194,304"), _rounded("9,216"), _rounded("32.0"), _rounded("")
    ('4.19M', '9216', '32.0', '')
    """
    digits = cell.replace(",", "")
    if len(digits) < 5 or not digits.isdigit():
        return digits
    exponent = (len(digits) - 1) // 3
    return f"{numerals.digits(int(digits) / 1000**exponent)}{'kMGT'[exponent - 1]}"
