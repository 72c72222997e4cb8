"""An exhibit as a page: its idea and lesson, what is predicted next to what was measured or counted, its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gemmery.bench.record import Run
from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit
from gemmery.report import words
from gemmery.report.doubts import banner, weighed
from gemmery.report.exhibit_tables import Predicted, emulated_sheet, measured_sheet
from gemmery.report.rendering import render
from gemmery.report.sheet import Sheet

RULES = "The counts are those of one launch, predicted by the rules of the hardware."


def exhibit_page(exhibit: Exhibit, source: str, predicted: Predicted, run: Run) -> str:
    """Return the page of an exhibit that was measured on a GPU."""
    sheet = measured_sheet(exhibit, predicted, weighed(run))
    where = " · ".join([*words.processor(run.machine), words.when(run)])
    return _page(exhibit, source, where, replace(sheet, notes=(RULES, *sheet.notes)), banner(run))


def emulated_exhibit_page(exhibit: Exhibit, source: str, emulated: Sequence[EmulatedExhibit]) -> str:
    """Return the page of an exhibit that was counted on the emulator."""
    sheet, first = emulated_sheet(emulated, "predicted", "counted"), emulated[0]
    note = f"{RULES} The emulator counted them in the kernel's PTX for {first.arch}, and checked every result."
    where = f"Emulated, {first.arch}, {first.n:,} elements"
    return _page(exhibit, source, where, replace(sheet, notes=(note,)))


def _page(exhibit: Exhibit, source: str, where: str, sheet: Sheet, warning: str = "") -> str:
    title = f"Exhibit {exhibit.name}"
    return render(
        "exhibit.html", title=title, exhibit=exhibit, where=where, warning=warning, sheet=sheet, source=source
    )
