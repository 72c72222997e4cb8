"""Predicted times of rungs beside those of records, as a sheet."""

from __future__ import annotations

from gemmery.cuda.pipes import predictable
from gemmery.ladder.prediction import PredictedRung, agreement
from gemmery.ladder.rung_counts import EmulatedLadder
from gemmery.report import words
from gemmery.report.sheet import Cell, Columns, Sheet, tabulate
from gemmery.report.words import plural

MEANING = (
    "Predicted from the blocks of one multiprocessor, whose units and caches are modelled. What bounds a rung is the "
    "unit that is busy for the longest time, or waits."
)


def predicted_sheets(ladder: EmulatedLadder) -> tuple[Sheet, ...]:
    """One table of all predicted times; none where nothing was counted."""
    if not ladder.predicted:
        return ()
    measured: Columns[PredictedRung] = [
        ("measured", lambda row: words.digits(row.measured * 1e6) if row.measured else ""),
        ("ratio", lambda row: f"{row.ratio:.2f}" if row.ratio else ""),
    ]
    columns: Columns[PredictedRung] = [
        ("rung", lambda row: row.rung),
        ("n", lambda row: str(row.n)),
        ("type", lambda row: row.dtype),
        ("predicted", lambda row: words.digits(row.prediction.seconds * 1e6) if row.prediction else ""),
        *(measured if any(row.measured for row in ladder.predicted) else []),
        ("bound by", lambda row: row.prediction.bound if row.prediction else Cell("not predicted", tone="faint")),
    ]
    title = f"Predicted times on {ladder.device.name}, µs"
    return (tabulate(title, columns, ladder.predicted, [_agreement(ladder), MEANING, *_doubts(ladder)]),)


def unpredicted(ladder: EmulatedLadder) -> str:
    """Why no times are predicted; "" where some are, or could be."""
    name = ladder.device.name
    if name in predictable():
        return ""
    return f"No times are predicted for {name}, whose latencies are not known; they are for {', '.join(predictable())}."


def _agreement(ladder: EmulatedLadder) -> str:
    both = agreement(ladder.predicted)
    if both is None:
        return (
            f"Too few of these products have records of {ladder.device.name} here; a clone has some from n = 1024 on."
        )
    return (
        f"Against {plural(both.count, 'record')} of {ladder.device.name}: rank correlation {both.rank:.3f}, "
        f"median error {both.error:.1%}."
    )


def _doubts(ladder: EmulatedLadder) -> list[str]:
    """What the predictions do not take into account, each with its rungs, and what was not predicted."""
    rungs: dict[str, list[str]] = {}
    for row in ladder.predicted:
        for doubt in row.prediction.doubts if row.prediction else ():
            rungs.setdefault(doubt.partition(":")[0], []).append(row.rung)
    notes = [f"Not modelled: {doubt}, in {plural(len(set(names)), 'rung')}." for doubt, names in rungs.items()]
    return notes + [f"{row.rung} is not predicted: {row.refused}" for row in ladder.predicted if row.refused]
