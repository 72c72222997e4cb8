"""An exhibit as a sheet: a row for each config, with its predicted counts next to its time, or to the emulator's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gemmery.bench.record import Measurement, Run
from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit
from gemmery.problem import Config
from gemmery.report import words
from gemmery.report.sheet import Cell, Columns, Sheet, ratio, tabulate

Predicted = Sequence[tuple[Config, Mapping[str, int]]]  # each config with its counts
TITLE = "Each config"


def measured_sheet(exhibit: Exhibit, predicted: Predicted, run: Run) -> Sheet:
    """Return the values of a config, its time, its ratio to the parent, and the predicted counts."""
    by_config = {_key(m.config): m for m in run.measurements}
    rows = [(config, by_config[_key(config)], counts) for config, counts in predicted]
    parent = exhibit.parent or ""
    columns: Columns[tuple[Config, Measurement, Mapping[str, int]]] = [
        *((key, lambda row, key=key: str(row[0][key])) for key in exhibit.default),
        ("time", lambda row: words.duration(row[1].seconds) if row[1].seconds else "refused"),
        *([(f"× {parent}", lambda row: ratio(row[1], parent))] if parent else []),
        *((plain(name), lambda row, name=name: f"{row[2][name]:,}") for name in predicted[0][1]),
    ]
    return tabulate(TITLE, columns, rows, faults(run.measurements))


def faults(measurements: Sequence[Measurement]) -> list[str]:
    """Return a note for each config that was refused, or whose result is wrong."""
    return [
        f"{m.config}: {m.refused or 'an element of the result is wrong'}"
        for m in measurements
        if m.refused or not words.passed(m)
    ]


def emulated_sheet(emulated: Sequence[EmulatedExhibit], rules: str, emulator: str) -> Sheet:
    """Return two rows for each config, under these names: the predicted counts, and those of the emulator."""
    rows = tuple(row for run in emulated for row in _rows(run, rules, emulator))
    return Sheet(TITLE, (*emulated[0].config, "counts", *map(plain, emulated[0].predicted)), rows)


def _rows(run: EmulatedExhibit, rules: str, emulator: str) -> Iterator[tuple[Cell, ...]]:
    config = [Cell(str(value)) for value in run.config.values()]
    yield (*config, Cell(rules), *(Cell(f"{count:,}") for count in run.predicted.values()))
    counts = (
        Cell(f"{run.counted[name]:,}", tone="" if run.counted[name] == count else "bad")
        for name, count in run.predicted.items()
    )
    yield (*[Cell("")] * len(config), Cell(emulator, tone="faint"), *counts)


def _key(config: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(config.items()))


def plain(name: str) -> str:
    """Return the name of a counter in words."""
    return name.replace("_", " ")
