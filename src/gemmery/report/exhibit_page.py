"""An exhibit as a page: its idea and lesson, what is predicted next to what was measured or counted, its kernel."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import Run
from gemmery.ladder.exhibits import EmulatedExhibit, Exhibit
from gemmery.report import words
from gemmery.report.doubts import banner, weighed
from gemmery.report.exhibits import Predicted
from gemmery.report.rendering import render
from gemmery.report.sheet import Cell, Sheet

RULES = "The counts are those of one launch, predicted by the rules of the hardware."


def exhibit_page(shown: Exhibit, source: str, predicted: Predicted, run: Run) -> str:
    """The page of an exhibit that was measured on a GPU."""
    counts = list(predicted[0][1])
    taken = {tuple(sorted(m.config.items())): m for m in weighed(run).measurements}
    rows, notes = [], [RULES]
    for config, each in predicted:
        m = taken[tuple(sorted(config.items()))]
        over = (m.versus.get(shown.parent or ""), m.spread.get(shown.parent or "", 0.0))
        rows.append(
            (
                *(Cell(str(value)) for value in config.values()),
                Cell(words.duration(m.seconds) if m.seconds else "refused"),
                *([Cell(words.times(*over))] if shown.parent else []),
                *(Cell(f"{each[count]:,}") for count in counts),
            )
        )
        if m.refused or not words.passed(m):
            notes.append(f"{m.config}: {m.refused or 'an element of the result is wrong'}")
    head = (*shown.default, "time", *([f"× {shown.parent}"] if shown.parent else []), *map(_plain, counts))
    where = " · ".join([*words.processor(run.machine), words.when(run)])
    return _page(shown, source, where, Sheet("Each config", head, tuple(rows), tuple(notes)), banner(run))


def emulated_exhibit_page(shown: Exhibit, source: str, emulated: Sequence[EmulatedExhibit]) -> str:
    """The page of an exhibit that was counted on the emulator."""
    first, rows = emulated[0], []
    for one in emulated:
        config = [Cell(str(value)) for value in one.config.values()]
        rows.append((*config, Cell("predicted"), *(Cell(f"{count:,}") for count in one.predicted.values())))
        tones = ["" if one.counted[name] == count else "bad" for name, count in one.predicted.items()]
        found = (Cell(f"{one.counted[name]:,}", tone=tone) for name, tone in zip(one.predicted, tones, strict=True))
        rows.append((*[Cell("")] * len(config), Cell("counted", tone="faint"), *found))
    head = (*first.config, "counts", *map(_plain, first.predicted))
    note = f"{RULES} The emulator counted them in the kernel's PTX for {first.arch}, and checked every result."
    where = f"Emulated, {first.arch}, {first.n:,} elements"
    return _page(shown, source, where, Sheet("Each config", head, tuple(rows), (note,)))


def _page(shown: Exhibit, source: str, where: str, sheet: Sheet, warning: str = "") -> str:
    return render(
        "exhibit.html",
        title=f"Exhibit {shown.name}",
        exhibit=shown,
        where=where,
        warning=warning,
        sheet=sheet,
        source=source,
    )


def _plain(name: str) -> str:
    return name.replace("_", " ")
