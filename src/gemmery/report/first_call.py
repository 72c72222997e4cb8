"""Records of first products as a sheet: the whole, and its pieces."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.first_call import PIECES
from gemmery.bench.record import Measurement
from gemmery.report import words
from gemmery.report.sheet import Cell, Sheet


def has_pieces(measurements: Sequence[Measurement]) -> bool:
    """Return True for records that have the pieces of a first product."""
    return any(m.case in PIECES for m in measurements)


def of_first_calls(heading: str, measurements: Sequence[Measurement]) -> list[Sheet]:
    """Return a sheet with a row for each product and state of the cache, with its time, its pieces and its ratios."""
    by_key = {(m.kernel, m.m, m.n, m.k, m.dtype, m.threads, m.case): m for m in measurements}
    rivals = tuple(dict.fromkeys(rival for m in measurements for rival in m.versus))
    wholes = [m for m in measurements if not m.case and m.seconds]
    rows = []
    for m in wholes:
        parts = [by_key.get((m.kernel, m.m, m.n, m.k, m.dtype, m.threads, piece)) for piece in PIECES]
        rows.append(
            (
                Cell(f"{words.shape(m)}, {words.types(m)}, {words.kernel(m.kernel)}"),
                Cell(words.duration(m.seconds)),
                *(Cell(words.duration(part.seconds) if part and part.seconds else "") for part in parts),
                *(Cell(words.times(m.versus.get(name), m.spread.get(name, 0.0))) for name in rivals),
            )
        )
    notes = [f"{words.kernel(m.kernel)} did not run: {m.refused}" for m in measurements if m.refused]
    head = ("product", "first product", *PIECES, *(f"× {words.kernel(name)}" for name in rivals))
    where = f", {words.cores(measurements[0].threads)}"
    return [Sheet(f"{heading}{where}", head, tuple(rows), tuple(dict.fromkeys(notes)))]
