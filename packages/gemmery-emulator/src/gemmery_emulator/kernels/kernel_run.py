"""A run of any kernel on the emulator in words and as a page: findings, counters by line of its source, pictures."""

# No `from __future__ import annotations` here: help() would show annotations as strings.

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemmery.errors import ArgumentError, not_installed
from gemmery_emulator.kernels import counters
from gemmery_emulator.kernels.counters import EmulatorCounts, Section, count_run, counts_section
from gemmery_emulator.kernels.prediction import Prediction, predicted_run, warp_timeline
from gemmery_emulator.pace.warp_timeline import WarpTimeline
from gemmery_emulator.pages import numerals
from gemmery_emulator.run import EmulatedRun

if TYPE_CHECKING:
    from gemmery_emulator.pages.svg import Plot

TERMS = 5  # of a prediction that are listed
TERM_NAMES = {"launch": "starting the launch", "waits": "waits of all warps at once"}
SUM = "The time is that of starting the launch, the waits and the busiest unit together, or memory's if it is longer."
LEAST = 0.01  # share of a line that is listed
LANES = "The pictures show one warp of the first block, of each line the first access."


class KernelRun(EmulatedRun):
    """The result of a launch on the emulator, which a notebook displays as a page with pictures of its accesses."""

    def html(self, path: str | Path | None = None, line: str = "") -> str:
        """Return the page of this run, and write it to a file if `path` is given.

        `line`, such as "kernel.cu:6", chooses the line whose accesses are drawn; the default is the costliest.

        >>> import numpy as np, gemmery as gm
        >>> code = "__global__ void f(float* x) { x[threadIdx.x] += 1; }"
        >>> gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32)]).html().count("<h1>")
        1

        Raises ArgumentError for a line without memory accesses, InstallError without the packages of the extra `lab`.
        """
        page = run_page(self, line=line)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def svg(self, line: str = "") -> str:
        """Return the first picture of a line, or of the costliest accesses, as an SVG file.

        Raises as `html` does, and ArgumentError if the run has nothing to draw.
        """
        drawings = drawn(self, line)
        if not drawings:
            raise ArgumentError("this run has nothing to draw: it has no access to memory, or had check=False")
        return next(iter(drawings.values()))

    def predict(self, card: str) -> Prediction:
        """Return the predicted time of this launch on a card, what bounds it, and the share of each line.

        >>> import numpy as np, gemmery as gm
        >>> code = "__global__ void f(float* x) { x[blockIdx.x * 256 + threadIdx.x] += 1; }"
        >>> prediction = gm.emulate(code, "f", 1024, 256, [np.zeros(1024 * 256, np.float32)]).predict("a100")
        >>> prediction.bound, prediction.seconds < 1e-5, [line for line, share in prediction.largest(1)]
        ('launch', True, ['kernel.cu:1'])

        `seconds` are those of the launch alone, `doubts` say what is not taken into account. One multiprocessor's
        blocks run again, on a copy of the arrays as they are now. Raises DeviceError for a card whose latencies are not
        known, and EmulationError for blocks that wait for others.
        """
        return predicted_run(self, card)

    def timeline(self, card: str) -> WarpTimeline:
        """Return what each warp does over time on a card, of the blocks with which a multiprocessor begins.

        >>> import numpy as np, gemmery as gm
        >>> code = "__global__ void f(float* x) { x[blockIdx.x * 256 + threadIdx.x] += 1; }"
        >>> timeline = gm.emulate(code, "f", 1024, 256, [np.zeros(1024 * 256, np.float32)]).timeline("a100")
        >>> len(timeline.rows()), '"traceEvents"' in timeline.trace()
        (64, True)

        `trace()` is JSON that Perfetto and Chrome's tracing open. Raises as `predict` does.
        """
        return warp_timeline(self, card)

    def _repr_html_(self) -> str:
        try:
            from gemmery_emulator.pages.writing import framed
        except ModuleNotFoundError:
            return super()._repr_html_()
        return framed(run_page(self), f"emulated {self.kernel}")


class KernelRuns:
    """Two runs side by side, which a notebook displays as a page."""

    def __init__(self, old: EmulatedRun, new: EmulatedRun) -> None:
        self.old, self.new = old, new

    def __repr__(self) -> str:
        """One line."""
        return f"<Comparison of {' and '.join(titled([self.old, self.new]))}>"

    def html(self, path: str | Path | None = None) -> str:
        """Return the page of both runs, and write it to a file if `path` is given."""
        page = run_page(self.old, self.new)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        try:
            from gemmery_emulator.pages.writing import framed
        except ModuleNotFoundError as error:
            raise not_installed(error, "the page of two runs") from error
        return framed(self.html(), repr(self))


def with_page(run: EmulatedRun) -> KernelRun:
    """The same run with its page."""
    return KernelRun(**{field.name: getattr(run, field.name) for field in fields(run)})


def drawn(run: EmulatedRun, line: str = "") -> dict[str, str]:
    """The pictures of a run as SVG files, by name."""
    try:
        from gemmery_emulator.pages.pictures import files
    except ModuleNotFoundError as error:
        raise not_installed(error, "a picture of a run") from error
    counts = count_run(run, line)
    return files(run.kernel.partition("<")[0].replace("::", "_"), counts.chosen, counts.source)


def run_page(
    run: EmulatedRun, other: EmulatedRun | None = None, line: str = "", predictions: Sequence[Prediction] = (),
    timelines: Sequence[WarpTimeline] = (),
) -> str:  # fmt: skip
    """The page of a run, or of two side by side, with their predicted times and what their warps do over them."""
    try:
        from gemmery_emulator.pages.pictures.timeline import warps_picture
        from gemmery_emulator.pages.writing import render
    except ModuleNotFoundError as error:
        raise not_installed(error, "the page of a run") from error
    runs = [run, *([other] if other else [])]
    names = titled(runs) if other else [""]
    counts = [count_run(each, line if each is run else "") for each in runs]
    pairs = paired_pictures(list(zip(names, counts, strict=True)))
    if timelines:
        pairs.insert(0, [warps_picture(each, f"{place}-warps") for place, each in enumerate(timelines, 1)])
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
    faults = numerals.plural(len(run.findings), "finding") if run.findings else "no findings"
    loads = run.global_.loads
    used = f", {loads.used_a_sector:.1f} of 32 bytes used in each sector that is loaded" if loads.sectors else ""
    faults += f", {numerals.plural(len(run.warnings), 'warning')}" if run.warnings else ""
    return f"{faults}, {numerals.plural(run.shared.bank_conflicts, 'bank conflict')}{used}"


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


def paired_pictures(runs: Sequence[tuple[str, EmulatorCounts | None]]) -> "list[list[Plot]]":
    """The pictures of both, those of a kind together; only the first of a kind says how to read it.

    Each run has a name, which begins the titles of its pictures unless it is "".
    """
    from gemmery_emulator.pages.pictures import pictures

    plots: dict[str, list[Plot]] = {}
    explained: frozenset[str] = frozenset()
    for number, (name, counts) in enumerate(runs, 1):
        for plot in pictures(counts.chosen, counts.source, explained=explained) if counts else ():
            title = f"{name}: {plot.title}" if name else plot.title
            plots.setdefault(plot.name, []).append(replace(plot, name=f"{number}-{plot.name}", title=title))
            explained |= {plot.name.partition("-")[0]}
    return list(plots.values())
