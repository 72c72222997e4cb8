"""Sheets: tables of text for the terminal, Markdown and HTML to lay out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from gemmery_emulator.pages import numerals
from gemmery_lab.measure.record import Measurement
from gemmery_lab.report import words

MMA = "mma.sync"  # the unit of tensor cores whose peak is measured
RowType = TypeVar("RowType")
Text = Callable[[Measurement], str]
ByKernel = Mapping[str, Measurement]


@dataclass(frozen=True)
class Cell:
    """One cell of text. `bar` is a fraction of the peak, drawn as a bar; `tone` is "best", "bad" or "faint".

    `margin` is the spread of a ratio, shown if there is room.
    """

    text: str
    bar: float | None = None
    tone: str = ""
    margin: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table of text. With `aside`, the second column is a remark on the first, shown if there is room.

    `sentences` are columns of words, left-aligned in a document.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    aside: bool = False
    sentences: tuple[int, ...] = ()

    @property
    def left_aligned(self) -> tuple[int, ...]:
        """The left-aligned columns; the others are right-aligned."""
        return (0, 1) if self.aside else (0,)


Column = tuple[str, Callable[[RowType], Cell | str]]  # a heading, and the cell of a row
Columns = Sequence[Column[RowType]]


def tabulate(
    title: str, columns: Columns[RowType], rows: Iterable[RowType], notes: Iterable[str] = (), aside: bool = False
) -> Sheet:
    """Return a sheet with a row of cells for each of `rows`; each note that is not empty once."""
    head = tuple(heading for heading, _ in columns)
    cells = tuple(tuple(Cell(cell) if isinstance(cell := of(row), str) else cell for _, of in columns) for row in rows)
    return Sheet(title, head, cells, tuple(filter(None, dict.fromkeys(notes))), aside)


def measured(*columns: Column[Measurement], absent: str = "not run") -> Columns[Measurement]:
    """Return columns that are blank for what did not run, the first of which says so."""

    def unless_refused(of: Callable[[Measurement], Cell | str], instead: Cell) -> Callable[[Measurement], Cell | str]:
        return lambda m: instead if m.refused else of(m)

    instead = [Cell(absent, tone="faint"), *[Cell("")] * len(columns)]
    return [(head, unless_refused(of, cell)) for (head, of), cell in zip(columns, instead, strict=False)]


def entry(measurement: Measurement | None, text: Text, best: float, absent: str = "not run") -> Cell:
    """Return the cell of a record among others of the same product: blank without one, marked if its time is `best`."""
    if measurement is None or measurement.refused:
        return Cell(absent if measurement else "", tone="faint" if measurement else "")
    return Cell(text(measurement), tone="best" if measurement.seconds == best else "")


def least(measurements: Iterable[Measurement]) -> float:
    """Return the least time of what ran."""
    return min((m.seconds for m in measurements if m.seconds), default=0.0)


def pivoted(
    measurements: Iterable[Measurement], row: Callable[[Measurement], RowType], column: Text = lambda m: m.kernel
) -> dict[RowType, dict[str, Measurement]]:
    """Return records by row and column, in order of appearance."""
    rows: dict[RowType, dict[str, Measurement]] = {}
    for m in measurements:
        rows.setdefault(row(m), {})[column(m)] = m
    return rows


def kernels(rows: Mapping[RowType, ByKernel], text: Text) -> Columns[tuple[RowType, ByKernel]]:
    """Return a column for each kernel of such rows, in which the fastest is marked."""

    def cell(row: tuple[RowType, ByKernel], kernel: str) -> Cell:
        return entry(row[1].get(kernel), text, least(row[1].values()))

    names = dict.fromkeys(name for by_kernel in rows.values() for name in by_kernel)
    return [(words.kernel(name), partial(cell, kernel=name)) for name in names]


def rate(measurement: Measurement) -> str:
    """Return the rate as text, in the unit of `words.rate`; "" for what did not run."""
    return numerals.digits(words.reached(measurement)) if measurement.seconds else ""


def bandwidth(measurement: Measurement) -> str:
    """Return the bytes that must move by the time."""
    return numerals.digits(measurement.bytes / measurement.seconds / 1e9)


def share(measurement: Measurement) -> Cell:
    """Return the fraction of the peak, with a bar."""
    part = words.share(measurement)
    return Cell(numerals.percent(part), bar=part)


def ratio(measurement: Measurement, rival: str) -> str:
    """Return the speed-up over a rival that took turns with it, "" if none did."""
    return numerals.times(measurement.versus.get(rival), measurement.spread.get(rival, 0.0))


def error(measurement: Measurement) -> Cell:
    """Return the largest error as a fraction of its bound."""
    if not measurement.checked:
        return Cell("")
    if not words.passed(measurement):
        return Cell(f"{measurement.error:.2g} !", tone="bad")
    return Cell(f"{measurement.error:.2g}")


def not_run(measurements: Iterable[Measurement], name: Text = lambda m: words.kernel(m.kernel)) -> list[str]:
    """Return a note for each kernel that did not run."""
    return [f"{name(m)} did not run: {m.refused}" for m in measurements if m.refused]


def limits(measurements: Iterable[Measurement]) -> str:
    """Return the peak and bandwidth measured in the same run, for each number of threads or unit of a GPU."""
    parts = []
    measurements = tuple(measurements)
    on_cpu = {(m.threads, m.dtype): m for m in measurements if m.peak_gflops and not m.unit}
    for threads in sorted({threads for threads, _ in on_cpu}):
        same = [m for (count, _), m in on_cpu.items() if count == threads]
        peaks = [f"{numerals.digits(m.peak_gflops)} {words.rate(m)} {m.dtype}" for m in same]
        bandwidth = f"{numerals.digits(same[0].bandwidth_gbs)} GB/s"
        parts.append(f"{', '.join(peaks)}, {bandwidth} on {words.cores(threads)}")
    on_gpu = [m for m in measurements if m.peak_gflops and m.unit]
    units = {(m.unit, m.precision or m.dtype): m for m in on_gpu}
    for (unit, dtype), m in units.items():
        parts.append(f"{numerals.digits(words.reached(m, m.peak_gflops))} {words.rate(m)} {dtype} on {unit}")
    if on_gpu:
        clocks = sorted({m.clock_mhz for m in on_gpu if m.clock_mhz})
        copied = f", {numerals.digits(on_gpu[0].copy_gbs)} copied" if on_gpu[0].copy_gbs else ""
        parts.append(f"memory {numerals.digits(on_gpu[0].bandwidth_gbs)} GB/s read{copied}")
        between = " to ".join(map(str, dict.fromkeys((clocks[0], clocks[-1])))) if clocks else ""
        parts += [f"multiprocessors at {between} MHz while timed"] if clocks else []
    if any(unit == MMA and dtype != "f64" for unit, dtype in units):
        parts.append("Hopper's wgmma, which cuBLAS uses there, is faster than mma.sync")
    return f"measured limits: {'; '.join(parts)}" if parts else ""


def table(sheet: Sheet) -> str:
    """Return a sheet as a table, without its title."""
    texts = {*sheet.left_aligned, *sheet.sentences}
    lines = [
        _line(sheet.head),
        _line([":---" if index in texts else "---:" for index in range(len(sheet.head))]),
        *(_line([_marked(cell) for cell in row]) for row in sheet.rows),
    ]
    notes = "".join(f"\n{note}\n" for note in sheet.notes)
    return "\n".join(lines) + "\n" + notes


def _marked(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.tone == "best" and cell.text else cell.text
    return f"{text} {cell.margin}" if cell.margin else text


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
