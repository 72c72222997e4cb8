"""An exhibit in a terminal and as a page: what is predicted next to what was measured, or counted on the emulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.cuda import nvrtc
from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit
from gemmery_emulator.pages import numerals
from gemmery_emulator.pages.writing import render
from gemmery_lab.measure.record import Measurement, Run
from gemmery_lab.report import words
from gemmery_lab.report.sheet import Cell, Columns, Sheet, ratio, tabulate
from gemmery_lab.report.terminal import Growing, laid_out
from gemmery_lab.report.words import banner, weighed

TITLE = "Each config"
RULES = "The counts are those of one launch, predicted by the rules of the hardware."


def _measured(exhibit: Exhibit, run: Run) -> Sheet:
    """Return the values of a config, its time, its ratio to the parent, and the predicted counts."""
    show, parent = exhibit.show, exhibit.parent or ""
    rows = [(m, show.counts(show.n, m.config)) for m in run.measurements]
    columns: Columns[tuple[Measurement, Mapping[str, int]]] = [
        *((key, lambda row, key=key: str(row[0].config[key])) for key in exhibit.default),
        ("time", lambda row: numerals.duration(row[0].seconds) if row[0].seconds else "refused"),
        *([(f"× {parent}", lambda row: ratio(row[0], parent))] if parent else []),
        *((_plain(name), lambda row, name=name: f"{row[1][name]:,}") for name in show.counts(show.n, exhibit.default)),
    ]
    return tabulate(TITLE, columns, rows, _faults(run.measurements))


def _faults(measurements: Sequence[Measurement]) -> list[str]:
    """Return a note for each config that was refused, or whose result is wrong."""
    faulty = (m for m in measurements if m.refused or not words.passed(m))
    return [f"{m.config}: {m.refused or 'an element of the result is wrong'}" for m in faulty]


def _emulated(emulated: Sequence[EmulatedExhibit], rules: str, emulator: str) -> Sheet:
    """Return two rows for each config, under these names: the predicted counts, and those of the emulator."""
    rows = list[tuple[Cell, ...]]()
    for run in emulated:
        config, counted = [Cell(str(value)) for value in run.config.values()], run.counted
        rows.append((*config, Cell(rules), *(Cell(f"{count:,}") for count in run.predicted.values())))
        tones = {name: "" if counted[name] == count else "bad" for name, count in run.predicted.items()}
        own = (Cell(f"{counted[name]:,}", tone=tone) for name, tone in tones.items())
        rows.append((*[Cell("")] * len(config), Cell(emulator, tone="faint"), *own))
    return Sheet(TITLE, (*emulated[0].config, "counts", *map(_plain, emulated[0].predicted)), tuple(rows))


def _plain(name: str) -> str:
    return name.replace("_", " ")


def exhibit_progress(console: Console) -> Growing[EmulatedExhibit]:
    """Return progress while the emulator runs an exhibit; `update` it with every config."""
    return Growing(console, _line, lambda _: (), lambda run: run.name)


def _line(run: EmulatedExhibit) -> str:
    config = ", ".join(f"{key} {value}" for key, value in run.config.items())
    counted = ", ".join(f"{value:,} {_plain(name)}" for name, value in run.counted.items())
    return f"{run.name}, {config}: {counted}"


def list_exhibits(exhibits: Sequence[Exhibit], console: Console) -> None:
    """Print a line for each exhibit: its name and the effect that it shows."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for exhibit in exhibits:
        table.add_row(Text(exhibit.name, style="bold"), Text(exhibit.idea))
    console.print(table)


def show_exhibit(exhibit: Exhibit, run: Run, console: Console) -> None:
    """Print an exhibit: idea, lesson and kernel, then the predicted counts and the measured times."""
    warning = [Text(text, style="bold red") for text in filter(None, [banner(run)])]
    rules = Text("Counts are those that the rules of the hardware predict for one launch.", style="dim")
    lines = [*warning, rules, *map(Text, _faults(run.measurements))]
    _show(exhibit, _measured(exhibit, weighed(run)), lines, console)


def show_emulated_exhibit(exhibit: Exhibit, emulated: Sequence[EmulatedExhibit], console: Console) -> None:
    """Print an exhibit without a GPU: the counts that the rules predict next to those of the emulator."""
    rules = "rules: the counts that the rules of the hardware predict for one launch"
    counted = f"emulator: the counts of the kernel's PTX for {emulated[0].arch}; every result was checked"
    lines = [Text(line, style="dim") for line in (f"{rules} on {emulated[0].n:,} elements", counted)]
    _show(exhibit, _emulated(emulated, "rules", "emulator"), lines, console)


def _show(exhibit: Exhibit, sheet: Sheet, lines: Sequence[Text], console: Console) -> None:
    """Print an exhibit, a sheet without its title and notes, and what is to be known of it."""
    console.print(Text.assemble((exhibit.name, "bold"), (f": {exhibit.idea}", "dim")))
    console.print(Text(exhibit.lesson))
    console.print()
    console.print(Text("\n".join(folded(_source(exhibit), console.width)), style="dim"))
    console.print()
    for part in (*laid_out(replace(sheet, title="", notes=()), console.width), *lines):
        console.print(part)


def folded(source: str, width: int) -> Iterator[str]:
    """Lines of code wrapped to so many columns; comments continue as comments.

    >>> list(folded("  x = first + second;", 16))
    ['  x = first +', '      second;']
    """
    for line in source.rstrip().splitlines():
        code = line.lstrip()
        below = line[: len(line) - len(code)] + ("// " if code.startswith("//") else "    ")
        yield from wrap(line, width, subsequent_indent=below, break_on_hyphens=False) or [""]


def exhibit_page(exhibit: Exhibit, run: Run) -> str:
    """Return the page of an exhibit that was measured on a GPU."""
    sheet = _measured(exhibit, weighed(run))
    where = " · ".join([*words.processor(run.machine), words.when(run)])
    return _page(exhibit, where, replace(sheet, notes=(RULES, *sheet.notes)), banner(run))


def emulated_exhibit_page(exhibit: Exhibit, emulated: Sequence[EmulatedExhibit]) -> str:
    """Return the page of an exhibit that was counted on the emulator."""
    sheet, first = _emulated(emulated, "predicted", "counted"), emulated[0]
    note = f"{RULES} The emulator counted them in the kernel's PTX for {first.arch}, and checked every result."
    where = f"Emulated, {first.arch}, {first.n:,} elements"
    return _page(exhibit, where, replace(sheet, notes=(note,)))


def _page(exhibit: Exhibit, where: str, sheet: Sheet, warning: str = "") -> str:
    values = {"exhibit": exhibit, "where": where, "warning": warning, "sheet": sheet, "source": _source(exhibit)}
    return render("exhibit.html", __package__, title=f"Exhibit {exhibit.name}", **values)


def _source(exhibit: Exhibit) -> str:
    return nvrtc.text(Path(exhibit.source).name)
