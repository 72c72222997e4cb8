"""A run of any kernel on the emulator in words and as a page: findings, counters by line of its source, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gemmery.emulation import counters
from gemmery.emulation.counters import Section, counts_section
from gemmery.emulation.line_counts import EmulatorCounts, count_run
from gemmery.emulation.prediction import Prediction
from gemmery.emulator.run import EmulatedRun
from gemmery.errors import not_installed
from gemmery.pages import numerals
from gemmery.pages.numerals import plural

if TYPE_CHECKING:
    from gemmery.pages.svg import Plot

TERMS = 5  # of a prediction that are listed
TERM_NAMES = {"launch": "starting the launch", "waits": "waits of all warps at once"}
SUM = "The time is that of starting the launch, the waits and the busiest unit together, or memory's if it is longer."
LEAST = 0.01  # share of a line that is listed
LANES = "The pictures show one warp of the first block, of each line the first access."


def drawn(run: EmulatedRun, line: str = "") -> dict[str, str]:
    """The pictures of a run as SVG files, by name."""
    try:
        from gemmery.pages.pictures import files
    except ModuleNotFoundError as error:
        raise not_installed(error, "a picture of a run") from error
    counts = count_run(run, line)
    return files(run.kernel.partition("<")[0].replace("::", "_"), counts.chosen, counts.source)


def run_page(
    run: EmulatedRun, other: EmulatedRun | None = None, line: str = "", predictions: Sequence[Prediction] = ()
) -> str:
    """The page of a run, or of two side by side, with their predicted times."""
    try:
        from gemmery.pages.rendering import render
    except ModuleNotFoundError as error:
        raise not_installed(error, "the page of a run") from error
    runs = [run, *([other] if other else [])]
    names = titled(runs) if other else [""]
    counts = [count_run(each, line if each is run else "") for each in runs]
    pairs = paired_pictures(list(zip(names, counts, strict=True)))
    return render(
        "run.html",
        __package__,
        title=" and ".join(titled(runs)),
        verdict="; ".join(verdict(each) for each in runs),
        subject=f"{launched(run)}, on the emulator. {LANES if pairs else ''}",
        sections=[
            *(part for each in runs for part in fault_sections(each)),
            *([compared(run, other)] if other else []),
            *(predicted_section(prediction) for prediction in predictions),
            *(part for each in runs for part in counter_sections(each)),
        ],
        pairs=pairs,
        codes=[(name, numbered(text)) for each in runs if each.drawable for name, text in each.drawable.texts.items()],
    )


def titled(runs: list[EmulatedRun]) -> list[str]:
    """The names of runs, with their files where they are alike."""
    names = [run.kernel for run in runs]
    if len(set(names)) == len(names):
        return names
    files = [next(iter(run.drawable.texts), "") if run.drawable else "" for run in runs]
    return [f"{name} of {file}" for name, file in zip(names, files, strict=True)]


def verdict(run: EmulatedRun) -> str:
    """Findings and the costs that are wasted, in a line."""
    faults = plural(len(run.findings), "finding") if run.findings else "no findings"
    loads = run.global_.loads
    used = f", {loads.used_a_sector:.1f} of 32 bytes used in each sector that is loaded" if loads.sectors else ""
    faults += f", {plural(len(run.warnings), 'warning')}" if run.warnings else ""
    return f"{faults}, {plural(run.shared.bank_conflicts, 'bank conflict')}{used}"


def launched(run: EmulatedRun) -> str:
    """The launch in words."""
    grid, block = (" x ".join(map(str, sides)) for sides in (run.launch.grid, run.launch.block))
    return f"grid {grid}, block {block}"


def numbered(text: str) -> str:
    """A source with the numbers of its lines."""
    return "\n".join(f"{number:5}  {line}" for number, line in enumerate(text.splitlines(), 1))


def fault_sections(run: EmulatedRun) -> list[Section]:
    """Findings, causes first, and warnings."""
    parts = []
    for name, faults in (("Findings", run.findings), ("Warnings", run.warnings)):
        if faults:
            texts = (str(fault).partition(": ") for fault in faults)
            rows = tuple((line, text) for line, _, text in texts)
            parts.append(Section(f"{name} in {run.kernel}", rows, alarm=name == "Findings"))
    return parts


def counter_sections(run: EmulatedRun) -> list[Section]:
    """Counters by line, and what was not compiled."""
    counts = count_run(run)
    head, rows = counters.table(counts)
    title = f"Counters of {run.kernel} by line{counters.of_file(counts)}"
    parts = [Section(title, rows, head, (counters.NOTE, counters.by_kind(counts)))]
    if run.left_out:
        parts.append(Section("Not compiled, because the kernel does not need it", ((", ".join(run.left_out), ""),)))
    return parts


def predicted_section(prediction: Prediction) -> Section:
    """The predicted time of a run, its longest terms, the lines that take them, and what is left out of account."""
    seconds = f"{numerals.digits(prediction.seconds * 1e6)} µs, bound by {prediction.bound}"
    terms = sorted(prediction.terms.items(), key=lambda term: -term[1])[:TERMS]
    rows = [("time", seconds), *([("at once", prediction.fits)] if prediction.fits else [])]
    rows += [(TERM_NAMES.get(name, name), f"{numerals.digits(each * 1e6)} µs") for name, each in terms if each]
    units = {name: each for name, each in prediction.terms.items() if name not in (*TERM_NAMES, "memory")}
    busiest = max(units, key=lambda name: units[name], default="")
    what = {"launch": f"the time of {busiest}", "memory": "the traffic"}.get(prediction.bound, prediction.bound)
    rows += [(line, f"{share:.0%} of {what}") for line, share in prediction.largest() if share >= LEAST]
    doubts = (f"Not taken into account: {doubt}." for doubt in prediction.doubts)
    return Section(f"Predicted on {prediction.card}", tuple(rows), notes=(SUM, *doubts))


def summary(run: EmulatedRun) -> dict[str, object]:
    """A run as plain data: findings, and the counters of each line."""
    counts = count_run(run)
    return {
        "kernel": run.kernel,
        "grid": run.launch.grid,
        "block": run.launch.block,
        "findings": [{"kind": it.kind, "line": str(it.line), "message": it.message} for it in run.findings],
        "warnings": [{"kind": it.kind, "line": str(it.line), "message": it.message} for it in run.warnings],
        "lines": counts.lines,
        "total": counts.total,
        "kinds": dict(counts.kinds),
        "left_out": run.left_out,
    }


def compared(old: EmulatedRun, new: EmulatedRun) -> Section:
    """The counters of two runs, with the costs that differ marked."""
    first, second = titled([old, new])
    return counts_section((first, second), "Counters of both", count_run(old), count_run(new))


def paired_pictures(runs: Sequence[tuple[str, EmulatorCounts | None]]) -> list[list[Plot]]:
    """The pictures of both, those of a kind together; only the first of a kind says how to read it.

    Each run has a name, which begins the titles of its pictures unless it is "".
    """
    from gemmery.pages.pictures import pictures

    plots: dict[str, list[Plot]] = {}
    explained: frozenset[str] = frozenset()
    for number, (name, counts) in enumerate(runs, 1):
        for plot in pictures(counts.chosen, counts.source, explained=explained) if counts else ():
            title = f"{name}: {plot.title}" if name else plot.title
            plots.setdefault(plot.name, []).append(replace(plot, name=f"{number}-{plot.name}", title=title))
            explained |= {plot.name.partition("-")[0]}
    return list(plots.values())
