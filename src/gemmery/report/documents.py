"""What documents say of speed, from the records in benchmarks/results: what stands between two markers is generated.

| marker | what follows it, up to the marker `<!-- end -->` |
| --- | --- |
| `<!-- ladder: dtype=f32 -->` | every rung: what it is, teaches, refuses, and what it gave |
| `<!-- rungs -->` | every rung in a table; `<!-- rungs: gpu -->` and `<!-- ladder: gpu -->` are of the GPU's ladder |
| `<!-- overview: SUITE ... -->` | a row for each suite: the ratios to the fastest rival, and where gemmery is slower |
| `<!-- table: SUITE -->` | the tables of a suite, with the spread of each ratio |
| `<!-- figure: SUITE PLOT -->` | a figure, written to docs/figures/ |
| `<!-- modelled -->` | the instructions that the emulator computes; `<!-- modelled: machine -->` all the others |
| `<!-- value: SUITE WHAT -->` | one value: `rate`, `share`, `time`, or the speed-up over a rival of that name |

Each is made for every machine that has a file of records: `machine=cpu` for those of CPUs, `machine=gpu` for those of
GPUs, `machine=NAME` or `machine=first` for one. Fields of a measurement narrow what is taken: `n=1024 dtype=f32
kernel='packed kc=256'`; `precision=` leaves out what was rounded to tf32. Where there is no record, words say so.
`python -m gemmery.report.documents` in a checkout rewrites every document; a test holds that nothing would change.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gemmery.bench import suite
from gemmery.bench.record import Measurement, Run
from gemmery.errors import ArgumentError
from gemmery.ladder.rung import Rung
from gemmery.report import modelled, words
from gemmery.report.figures import figures
from gemmery.report.overview import overview
from gemmery.report.rungs import ladder
from gemmery.report.sheet import sheets
from gemmery.report.stored import Query, Stored, missing, query
from gemmery.report.suites import is_own
from gemmery.report.svg import standalone
from gemmery.report.text import table

MARKER = re.compile(
    r"<!-- (ladder|rungs|overview|table|figure|value|modelled)(?:: ([^>]*?))? -->(.*?)<!-- end -->", re.DOTALL
)
FIGURES = Path("docs", "figures")


class Documents:
    """Fills documents from the records of one checkout; `written` collects the files of its figures."""

    def __init__(self, root: Path, rungs: Sequence[Rung], gpu_rungs: Sequence[Rung] = ()) -> None:
        self.root, self.rungs, self.gpu_rungs = root, rungs, gpu_rungs
        self.written: dict[Path, str] = {}
        self._stored = Stored(root)
        self._made: dict[str, Callable[[Path, str], str]] = {
            "ladder": self._ladder,
            "rungs": self._rungs,
            "overview": self._overview,
            "table": self._table,
            "figure": self._figure,
            "value": self._value,
            "modelled": self._modelled,
        }

    def fill(self, path: Path) -> str:
        """The text of the document at `path` with everything between markers made anew.

        >>> Documents(Path("."), CPU).fill(Path("README.md"))  # doctest: +SKIP
        '# gemmery...'

        Raises ArgumentError for an unknown suite, figure or field, and for a value that is not one.
        """

        def replaced(found: re.Match[str]) -> str:
            kind, said = found[1], found[2] or ""
            opening = f"<!-- {kind}{': ' if said else ''}{said} -->"
            body = self._made[kind](path, said)
            return f"{opening}{body}<!-- end -->" if kind == "value" else f"{opening}\n{body.strip()}\n<!-- end -->"

        return MARKER.sub(replaced, path.read_text(encoding="utf-8"))

    def _ladder(self, path: Path, said: str) -> str:
        asked = query(f"ladder {said}")
        rungs, gpu = self._asked(asked.others)
        if gpu:
            runs = self._stored.newest_of_each_type(replace(asked, machine="gpu"))
        else:
            runs = self._stored.newest(replace(asked, machine=asked.machine or "cpu"))
        return ladder(rungs, runs, self.root, path.parent)

    def _asked(self, others: Sequence[str]) -> tuple[Sequence[Rung], bool]:
        """The rungs that a marker is about, and whether they are those of the GPU."""
        gpu = "gpu" in others
        return (self.gpu_rungs if gpu else self.rungs), gpu

    def _of(self, run: Run) -> Sequence[Rung]:
        """The rungs that a run's records may be of."""
        return self.gpu_rungs if run.machine.gpu.name else self.rungs

    def _rungs(self, _: Path, said: str) -> str:
        lines = ["| rung | grew from | what it changed | types |", "| :--- | :--- | :--- | :--- |"]
        for rung in self._asked(said.split())[0]:
            parent = f"`{rung.parent}`" if rung.parent else ""
            idea = rung.idea.replace("|", "\\|").replace("*", "\\*")
            lines.append(f"| `{rung.name}` | {parent} | {idea} | {', '.join(rung.dtypes)} |")
        return "\n".join(lines)

    def _modelled(self, _: Path, said: str) -> str:
        return modelled.machine() if said == "machine" else modelled.instructions()

    def _overview(self, _: Path, said: str) -> str:
        asked = query(said)
        suites = (asked.suite, *asked.others)
        runs = self._stored.everything(suites)
        if not runs:
            return missing(Query(" ".join(suites), (), {}))
        folder = self.root / "benchmarks"
        about = {
            path.stem: suite.load(path).about for path in (folder / f"{name}.toml" for name in suites) if path.exists()
        }
        return "\n".join(f"{_taken(run)}\n\n{table(overview(run, about))}" for run in runs)

    def _table(self, _: Path, said: str) -> str:
        asked = query(said)
        runs = self._stored.newest(asked)
        if not runs:
            return missing(asked)
        parts = []
        for run in runs:
            made = [f"**{sheet.title}**\n\n{table(sheet)}" for sheet in sheets(run, self._of(run))]
            parts += [f"{_taken(run)}\n", *made]
        return "\n".join(parts)

    def _figure(self, path: Path, said: str) -> str:
        asked = query(said)
        runs = self._stored.newest(asked)
        parts = []
        for run in runs:
            plots = {plot.name: plot for plot in figures(run, self._of(run))}
            if not plots.keys() >= set(asked.others):
                raise ArgumentError(f"marker {said!r}: these records make the figures {', '.join(plots) or 'none'}")
            for plot in [plots[name] for name in asked.others] or plots.values():
                of = [] if asked.suite in plot.name else [asked.suite]
                narrowed = [value for _, value in sorted(asked.fields.items()) if value]
                file = self.root / FIGURES / f"{_stem(run.machine.name, *of, plot.name, *narrowed)}.svg"
                self.written[file] = standalone(plot.svg)
                link = os.path.relpath(file, path.parent)
                image = f'<img src="{link}" alt="{html.escape(plot.title)}" width="100%">'
                parts.append(f"**{plot.title}**. {plot.caption}\n\n{image}\n\n{_taken(run)}")
        return "\n\n".join(parts) or missing(asked)

    def _value(self, _: Path, said: str) -> str:
        asked = query(said)
        runs = self._stored.newest(asked)
        chosen = [m for run in runs for m in run.measurements if "kernel" in asked.fields or is_own(m)]
        if not runs:
            return "(not measured yet)"
        if len(chosen) != 1 or len(asked.others) != 1:
            raise ArgumentError(f"marker {said!r}: it names {len(chosen)} records; say what, and narrow it down to one")
        return _value(chosen[0], asked.others[0], said)


def _value(m: Measurement, what: str, said: str) -> str:
    known = {
        "rate": f"{words.digits(words.reached(m))} {words.rate(m)}",
        "share": words.percent(words.share(m)),
        "time": words.duration(m.seconds),
    }
    if what in known:
        return known[what]
    if what in m.versus:
        return words.times(m.versus[what], m.spread.get(what, 0.0))
    raise ArgumentError(f"marker {said!r}: {what!r} is neither rate, share, time nor a rival measured with it")


def _taken(run: Run) -> str:
    """Where and when, and the kernels that the rivals ran."""
    found = run.machine
    caches = (f"{name} {words.size(held)}" for name, held in words.caches(found))
    rivals = dict.fromkeys(m.note for m in run.measurements if m.kernel in words.RIVALS and m.note)
    cores = f"{found.gpu.sms} multiprocessors" if found.gpu.name else f"{found.cores} cores"
    where = ", ".join([*words.processor(found), cores, *caches])
    return f"*{'; '.join([where, *rivals])}. Measured {words.when(run)}.*"


def _stem(*parts: str) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).lower() for part in parts)


def documents(root: Path) -> tuple[Path, ...]:
    """The documents of a checkout."""
    return (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md")), *sorted(root.glob("*/README.md")))


def main(root: Path) -> None:
    """Write every document and figure of the checkout at `root` anew, and remove figures that none shows."""
    from gemmery.ladder.cpu import CPU
    from gemmery.ladder.cuda import CUDA

    filler = Documents(root, CPU, CUDA)
    for path in documents(root):
        path.write_text(filler.fill(path), encoding="utf-8")
    for path in (root / FIGURES).glob("*.svg"):
        if path not in filler.written:
            path.unlink()
    for path, svg in filler.written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(Path.cwd())
