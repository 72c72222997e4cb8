"""The ladder on the emulator as one self-contained HTML page, with all counters and a picture for each rung."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery.ladder.rung_counts import EmulatedLadder
from gemmery.report import words
from gemmery.report.emulated_tables import (
    COUNTED,
    PARENTS,
    ROOF,
    by_size,
    complaints,
    described,
    emulated_sheets,
    overviews,
    verdict,
)
from gemmery.report.pictures import pictures
from gemmery.report.rendering import render
from gemmery.report.roofs import roofs
from gemmery.report.svg import Plot
from gemmery.report.tree import tree


def emulated_page(ladder: EmulatedLadder) -> str:
    """Return the page of a ladder, or of a sweep, whose rungs have names of their own."""
    ran = {rung.rung for rung in ladder.rungs}
    rungs = tuple(rung for rung in CUDA if rung.name in ran)
    title = "The ladder" if rungs else "The sweep"
    return render(
        "emulated.html",
        title=f"{title} on the emulator, as {ladder.device.name}",
        heading=f"{title}, emulated",
        where=f"{described(ladder.device)}, on the emulator · {ladder.started[:16].replace('T', ' ')} UTC",
        verdict=verdict(ladder),
        complaints=complaints(ladder),
        overviews=overviews(ladder),
        meaning=(COUNTED, ROOF),
        branches=tree(rungs),
        gains=_gains(ladder),
        roofs=roofs(ladder),
        lessons=list(_lessons(ladder, rungs)),
        sheets=emulated_sheets(ladder),
    )


def _gains(ladder: EmulatedLadder) -> dict[str, str]:
    """The gain of each rung over its parent by their roofs, at the largest size."""
    gains = {}
    for rung in by_size(ladder)[-1] if ladder.rungs else ():
        parent = PARENTS.get(rung.rung)
        if gain := ladder.gain(rung, parent):
            gains[rung.rung] = f"{words.digits(gain)}× {parent}"
    return gains


def _lessons(ladder: EmulatedLadder, rungs: Sequence[Rung]) -> Iterator[tuple[Rung, str, Plot | None]]:
    """Each rung with its claims, and a picture of its costliest access to shared memory, or else to global memory."""
    explained: set[str] = set()
    for rung in rungs:
        claims = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in rung.expect.items())
        note = f"Expected counters of an aligned product: {claims}." if claims else ""
        yield rung, note, _picture(ladder, rung.name, explained)


def _picture(ladder: EmulatedLadder, name: str, explained: set[str]) -> Plot | None:
    """The picture of a rung; the kinds of pictures on the page so far are `explained`, and are not again."""
    run = next((run for run in ladder.rungs if run.rung == name and not run.refused), None)
    if run is None:
        return None
    plots = {plot.name: plot for plot in pictures(run.chosen, run.source, f"{name}-", frozenset(explained))}
    for kind in ("banks", "sectors"):
        if plot := plots.get(f"{name}-{kind}-1"):
            explained.add(kind)
            return plot
    return None
