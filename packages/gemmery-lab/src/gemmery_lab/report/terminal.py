"""Records in a terminal: progress and rows while a command runs, then its tables; the difference of two rungs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gemmery.ladder.rung import Rung
from gemmery_emulator.pages import numerals
from gemmery_emulator.pages.writing import render
from gemmery_lab import experiments
from gemmery_lab.experiments import LADDER
from gemmery_lab.measure.record import MachineRecord, Measurement, Run
from gemmery_lab.report import words
from gemmery_lab.report.sheet import Sheet
from gemmery_lab.report.tables import IDEA, Results, results, sheets, tree, walk
from gemmery_lab.report.words import banner, doubts, fullest, gains, is_square, label, largest, over_fastest, speedup

if TYPE_CHECKING:
    from gemmery.ladder.diff import Difference  # which imports the rungs of GPUs

StepRecord = TypeVar("StepRecord")
STYLES = {"best": "bold green", "bad": "bold red", "faint": "dim", "": ""}
WIDE = 120  # from this width the ideas are in the table; in narrower terminals they follow it
BETWEEN = re.compile(r"(?<=\d) × (?=\d)")
LABEL = 16  # the least width of a label before a table is split
NUMBER = 7  # the width that headings of numbers are wrapped at
NOWHERE = MachineRecord("", "", "", 0, 0, 0, 0, "", "", "", "", "", "")


class Growing(Generic[StepRecord]):
    """Rows above a progress bar on a terminal; elsewhere one line for each finished step.

    `line` returns a finished step as one line, `sheets` the tables of the rows so far, and `place` what the rows of
    one table have in common: a row of another table replaces them. `update` it with every event:

    Nothing is drawn between events: a thread that redraws would disturb the timing.
    """

    def __init__(
        self,
        console: Console,
        line: Callable[[StepRecord], str],
        sheets: Callable[[Sequence[StepRecord]], Sequence[Sheet]],
        place: Callable[[StepRecord], object],
    ) -> None:
        self._console, self._line, self._sheets, self._place = console, line, sheets, place
        self._rows: list[StepRecord] = []
        self._announced = False
        self._printed = 0  # steps that have been printed
        columns = BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self._bar = Progress(TextColumn("{task.description}"), *columns, console=console, auto_refresh=False)
        self._task = self._bar.add_task("starting", total=None)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def announce(self, text: str) -> None:
        """Print a line before everything else; later calls, and calls without text, print nothing."""
        if text and not self._announced:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._announced = True

    def update(self, what: str, done: int, total: int, record: StepRecord | None = None) -> None:
        """Show that a step begins (`record` is None) or has ended."""
        if record is not None:
            if self._rows and self._place(self._rows[-1]) != self._place(record):
                self._rows.clear()
            self._rows.append(record)
        if not self._console.is_terminal:
            if record is not None and done > self._printed:  # the rivals' records arrive with that of a rung
                self._printed = done
                line = f"{done}/{total} {self._line(record)}"
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        self._bar.update(self._task, description=escape(what), completed=done, total=total)
        width, room = self._console.width, max(self._console.height - 8, 1)
        parts = list[RenderableType]()
        for sheet in self._sheets(self._rows) if self._rows else ():
            last = max(room // len(_folded(sheet, width)), 1)
            parts += laid_out(replace(sheet, rows=sheet.rows[-last:], notes=()), width)
        self._live.update(Group(*parts, self._bar), refresh=True)


def progress(rungs: Sequence[Rung], console: Console) -> Growing[Measurement]:
    """Return the progress of a command that measures these rungs."""

    def place(m: Measurement) -> tuple[object, ...]:
        """What the rows of one table have in common."""
        return (m.suite, *((m.m, m.n, m.k, m.dtype) if experiments.of(m) is LADDER else ()))

    return Growing(console, _line, lambda rows: sheets(Run(NOWHERE, "", tuple(rows)), rungs), place)


def show(run: Run, rungs: Sequence[Rung], console: Console) -> None:
    """Print the tables of a run, with the ideas in the tables on a wide terminal and below them on a narrow one.

    A warning precedes and follows unreliable figures; otherwise the last line of a ladder is its summary.
    """
    of, warning, tables = results(run, rungs), banner(run), sheets(run, rungs)
    if warning:
        console.print(Text(warning, style="bold red"))
        console.print()
    for sheet in tables:
        console.print(Group(*laid_out(sheet, console.width)))
    if of.climbed and any(IDEA in sheet.head for sheet in tables):  # each rung below its parent
        over_parent, branches = gains(of.climbed, of.problems), Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        branches.add_column(no_wrap=True)
        branches.add_column(no_wrap=True, justify="right")
        branches.add_column(overflow="fold")
        for depth, rung in walk(tree(of.climbed)):
            idea = Text(rung.idea if console.width < WIDE else "", style="dim")
            branches.add_row(Text("  " * depth + rung.name), Text(over_parent.get(rung.name, "")), idea)
        at = f", × the speed of its parent at {words.shape(fullest(of.problems).first)}" if len(of.climbed) > 1 else ""
        console.print(Text(f"Each rung below its parent{at}", style="bold"))
        console.print(branches)
    console.print(Text(f"{words.machine(run.machine)}. {words.when(run)}.", style="dim"))
    if any(cell.text.startswith("~") for sheet in tables for row in sheet.rows for cell in row):
        ties = "~ marks a tie: a difference smaller than its spread. A wide spread is shown as a range."
        console.print(Text(ties, style="dim"))
    if warning:
        console.print(Text(warning, style="bold red"))
    elif closing := summary(of):
        console.print(Text(closing, style="bold"))


def summary(results: Results) -> str:
    """Return the largest square of a ladder in one line; "" for other runs and for unreliable figures."""
    squares = [group for group in results.problems if is_square(group.first)]
    ran = [m for m in largest(squares).rungs if m.seconds] if squares else []
    if not ran or doubts(results.run):
        return ""
    group, parents = largest(squares), {rung.name: rung.parent or "" for rung in results.rungs}
    best = max(ran, key=lambda m: m.gflops)
    line = f"{words.shape(best)}, {words.types(best)}: {best.kernel} reaches "
    line += f"{numerals.digits(words.reached(best))} {words.rate(best)}"
    if part := words.share(best):
        line += f", {numerals.percent(part)} of the peak"
    if over := over_fastest(best, group):
        line += f", {numerals.times(*over[1])} {label(over[0], group)}"
    if steps := [(gain[0], m) for m in ran if (gain := speedup(m, parents[m.kernel], group))]:
        step, m = max(steps, key=lambda pair: pair[0])
        line += f"; largest step: {m.kernel}, {numerals.times(step)} {parents[m.kernel]}"
    return line


def findings(rows: Sequence[tuple[str, str, bool, str]], console: Console) -> None:
    """Print the checks of a machine: (name, value, passed, advice); what is absent, and may be, has no "ok"."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value, ok, advice in rows:
        absent = value in ("none", "not installed", "not found")
        mark = Text("-" if absent else "ok", style="" if absent else "green") if ok else Text("!!", style="bold red")
        table.add_row(mark, Text(name), Text(value))
        if advice:
            table.add_row("", "", Text(advice, style="yellow" if ok else "bold yellow"))
    console.print(table)


def laid_out(sheet: Sheet, width: int) -> list[RenderableType]:
    """Return a sheet as a rich table, or as several if it is too wide, with its notes below."""
    rows = tuple(tuple(replace(cell, text=BETWEEN.sub("×", cell.text)) for cell in row) for row in sheet.rows)
    closer = replace(sheet, rows=rows)  # with shapes like 8×2048×2048, without spaces
    if len(_folded(sheet, width)) > 1 == len(_folded(closer, width)):
        sheet = closer
    first, *others = _folded(sheet, width)
    tables = [_table(sheet, first, sheet.title), *(_table(sheet, columns) for columns in others)]
    return [*tables, *(Padding(Text(note, style="dim"), (0, 0, 0, 2)) for note in sheet.notes), Text()]


def _folded(sheet: Sheet, width: int) -> list[list[int]]:
    """The columns of each table of a sheet: labels are in all of them, other columns in one."""
    present = [index for index in range(len(sheet.head)) if index != 1 or not sheet.aside or width >= WIDE]
    labels = [index for index in present if index in sheet.left_aligned]
    blank = 1 + sum(min(_width(sheet, index), LABEL) + 2 for index in labels)
    blocks, room = [labels], width - blank
    for index in present[len(labels) :]:
        wide = _width(sheet, index) + 2  # one space after the column and one before the next
        if wide > room and blocks[-1] != labels:
            blocks, room = [*blocks, labels], width - blank
        blocks[-1] = [*blocks[-1], index]
        room -= wide
    return blocks


def _width(sheet: Sheet, index: int) -> int:
    return max(map(cell_len, [*_heading(sheet, index).split("\n"), *(row[index].text for row in sheet.rows)]))


def _table(sheet: Sheet, columns: Sequence[int], title: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    for index in columns:
        label = index in sheet.left_aligned
        justify: Literal["left", "right"] = "left" if label else "right"
        table.add_column(_heading(sheet, index), justify=justify, no_wrap=not label, overflow="fold")
    for row in sheet.rows:
        table.add_row(*(Text(row[index].text, style=STYLES[row[index].tone]) for index in columns))
    return table


def _heading(sheet: Sheet, index: int) -> str:
    """The heading of a column; of numbers one word a line, so that the column is as narrow as they are."""
    width = LABEL if index in sheet.left_aligned else NUMBER
    return "\n".join(wrap(sheet.head[index].replace("error/bound", "error/ bound"), width, break_long_words=False))


def _line(measurement: Measurement) -> str:
    what = f"{words.kernel(measurement.kernel)}, {words.shape(measurement)}, {words.types(measurement)}"
    config = measurement.config if experiments.of(measurement).is_sweep else {}
    what += "".join(f", {key} {value}" for key, value in config.items())
    if measurement.refused:
        return f"{what}: not run, {measurement.refused}"
    speed = f", {numerals.digits(words.reached(measurement))} {words.rate(measurement)}" if measurement.flops else ""
    return f"{what}: {numerals.duration(measurement.seconds)}{speed}"


KINDS = {"---": "file", "+++": "file", "@": "hunk", "+": "added", "-": "removed"}  # by the beginning of a line
LINE_STYLES = {"file": "bold", "hunk": "cyan", "added": "green", "removed": "red", "": ""}
SAME = "Both rungs run the same code; they differ only in the facts above."


def show_difference(difference: Difference, console: Console) -> None:
    """Print the facts that differ, then the difference of the code."""
    table = Table(box=None, show_header=True, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", difference.old, difference.new):
        table.add_column(name, overflow="fold")
    for fact in difference.facts:
        table.add_row(Text(fact.name, style="dim"), Text(fact.old, style="red"), Text(fact.new, style="green"))
    console.print(table)
    console.print()
    for line in difference.lines:
        console.print(Text(line, style=LINE_STYLES[_kind(line)]), soft_wrap=True)
    if not difference.lines:
        console.print(Text(SAME, style="dim"))


def difference_page(difference: Difference) -> str:
    """Return the same as one self-contained HTML page."""
    title = f"From {difference.old} to {difference.new}"
    return render("difference.html", __package__, title=title, difference=difference, lines=colored(difference))


def colored(difference: Difference) -> list[tuple[str, str]]:
    """Return the lines of a difference, each with its kind."""
    return [(_kind(line), line) for line in difference.lines] or [("", SAME)]


def _kind(line: str) -> str:
    """The kind of a line of code, "" for one that both rungs have."""
    return next((kind for beginning, kind in KINDS.items() if line.startswith(beginning)), "")
