"""The records of whole models as a sheet: tokens a second, with linear layers of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import Measurement
from gemmery.report import words
from gemmery.report.sheet import Cell, Columns, Sheet, entry, not_run, tabulate

RIVAL = "torch"


def is_of_model(measurement: Measurement) -> bool:
    """Return True for a record of a model's step, which reads or makes `m` tokens."""
    return "layers" in measurement.config


def tokens(heading: str, measurements: Sequence[Measurement]) -> Sheet:
    """Return tokens a second: a row for each way to run the model, a column for each kind of linear layers.

    In brackets is the ratio to PyTorch's layers in the same rounds.
    """
    by_case: dict[str, dict[str, Measurement]] = {}
    for m in measurements:
        by_case.setdefault(m.case, {})[m.kernel] = m

    def cell(row: dict[str, Measurement], kernel: str) -> Cell:
        best = min((m.seconds for m in row.values() if m.seconds), default=0.0)
        return entry(row.get(kernel), _rate, best)

    last = {m.kernel: m for m in measurements}
    columns: Columns[tuple[str, dict[str, Measurement]]] = [
        ("tokens a second", lambda row: row[0]),
        *((words.kernel(kernel), lambda row, kernel=kernel: cell(row[1], kernel)) for kernel in last),
    ]
    notes = [
        ", ".join(f"{name} {value:,}" for name, value in measurements[0].config.items()),
        *(f"{words.kernel(m.kernel)}: {words.amount(m.bytes, 'B')} in linear layers; {m.note}" for m in last.values()),
        *not_run(measurements),
    ]
    return tabulate(f"{heading}, {words.types(measurements[0])}", columns, by_case.items(), notes)


def _rate(measurement: Measurement) -> str:
    """Tokens a second, and the ratio to PyTorch's layers."""
    ratio = words.times(measurement.versus.get(RIVAL), measurement.spread.get(RIVAL, 0.0))
    return words.digits(measurement.m / measurement.seconds) + (f" ({ratio})" if ratio else "")
