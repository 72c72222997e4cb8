"""The records of whole models as a sheet: tokens a second, with layers of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import Measurement
from gemmery.report import words
from gemmery.report.sheet import Cell, Columns, Sheet, entry, not_run, tabulate

RIVAL = "torch"


def is_of_model(measurement: Measurement) -> bool:
    """Return True for a record of steps of a model that reads and makes tokens."""
    return "tokens" in measurement.config


def tokens(heading: str, measurements: Sequence[Measurement]) -> Sheet:
    """Return tokens a second: a row for each model, phase and mode, a column for each kind of layers.

    In brackets is the ratio to PyTorch's layers in the same rounds.
    """
    by_case: dict[str, dict[str, Measurement]] = {}
    for m in measurements:
        by_case.setdefault(m.case, {})[m.kernel] = m
    kernels = dict.fromkeys(m.kernel for m in measurements)

    def cell(row: dict[str, Measurement], kernel: str) -> Cell:
        best = min((m.seconds for m in row.values() if m.seconds), default=0.0)
        return entry(row.get(kernel), _rate, best)

    columns: Columns[tuple[str, dict[str, Measurement]]] = [
        ("tokens/s", lambda row: _what(row[0], row[1])),
        *((words.kernel(kernel), lambda row, kernel=kernel: cell(row[1], kernel)) for kernel in kernels),
    ]
    notes = [
        f"{words.kernel(m.kernel)}: weights of linear layers {words.amount(m.bytes, 'B')}, {m.note}"
        for m in _last(measurements)
    ]
    return tabulate(heading, columns, by_case.items(), [*notes, *not_run(measurements)])


def _what(case: str, row: dict[str, Measurement]) -> str:
    first = next(iter(row.values()))
    return f"{case}, {first.config.get('batch', 1)} x {first.config.get('prompt', 0)} tokens"


def _rate(measurement: Measurement) -> str:
    """Tokens a second, and the ratio to PyTorch's layers."""
    ratio = words.times(measurement.versus.get(RIVAL), measurement.spread.get(RIVAL, 0.0))
    return f"{words.digits(measurement.m / measurement.seconds)}{f' ({ratio})' if ratio else ''}"


def _last(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The last record of each kind of layers of each model."""
    return list({(m.case.partition(",")[0], m.kernel): m for m in measurements if m.seconds}.values())
