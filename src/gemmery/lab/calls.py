"""Calls of every kind on small arrays, next to the same in the library that the arrays are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gemmery
from gemmery.bench import calls as kinds
from gemmery.bench import libraries, timing
from gemmery.bench.record import Measurement
from gemmery.bench.rival_process import RivalProcess
from gemmery.bench.timing import Contestant
from gemmery.bench.work import Work
from gemmery.errors import GemmeryError, RefusedError
from gemmery.lab import results
from gemmery.lab.session import CpuSession
from gemmery.lab.threads import in_force, on

OURS = "gm.matmul"


def calls(
    session: CpuSession, name: str, work: Work, threads: int, rivals: Sequence[RivalProcess], seconds: float
) -> list[Measurement]:
    """Check one kind of call, time it in turn with the library that its arrays are of, and return the records.

    The note of a record has both expressions. Overhead is what counts here, so no limits are measured.
    """
    plain = results.blank(name, OURS, work, threads)
    try:
        convert = _convert(work)
        with in_force(threads):
            error = min(kinds.error(work, _result(work, convert)), results.WRONG)
        contestants = [Contestant(OURS, on(threads, kinds.sample(work, "ours", {"gm": gemmery}, convert)))]
    except GemmeryError as refused:
        return [replace(plain, refused=str(refused))]
    rows = []
    for rival in rivals:
        if rival.name == work.arrays:
            try:
                rival.prepare(work)
                contestants.append(rival.contestant)
                rows.append(replace(plain, kernel=rival.name, note=rival.runs))
            except RefusedError as refused:
                rows.append(replace(plain, kernel=rival.name, refused=str(refused)))
    found = timing.compare(contestants, seconds, timing.IDLE_SECONDS if threads > 1 else 0.0)
    note = f"{kinds.text(work, 'ours')} against {kinds.text(work, work.arrays)}"
    ours = results.timed(replace(plain, note=note), found.timings[OURS], (0.0, 0.0), found.versus)
    timed = [m if m.refused else results.timed(m, found.timings[m.kernel], (0.0, 0.0)) for m in rows]
    return [replace(ours, error=error, checked=True), *timed]


def _convert(work: Work) -> kinds.Convert:
    """Return what makes an operand of NumPy's array. Raises RefusedError where the library is not installed."""
    if work.arrays == "numpy":
        return lambda array: array
    missing = libraries.find(work.arrays).missing()
    if missing:
        raise RefusedError(missing)
    return libraries.as_tensor


def _result(work: Work, convert: kinds.Convert) -> Any:
    """Return the result of one call as an array of NumPy."""
    arrays = {name: convert(array) for name, array in kinds.operands(work, "ours").items()}
    made = kinds.result(work, "ours", {"gm": gemmery, **arrays})
    return made if work.arrays == "numpy" else made.float().numpy()
