"""Measured figures in the documents: the text between two markers is generated from benchmarks/results.

| marker | text generated between it and `<!-- end -->` |
| --- | --- |
| `<!-- ladder: dtype=f32 -->` | a section for each rung: idea, lesson, refusals, measurements |
| `<!-- rungs -->` | a table of all rungs; `<!-- rungs: gpu -->` and `<!-- ladder: gpu -->` are for the GPU ladder |
| `<!-- overview: SUITE ... -->` | one row per suite: the ratios to the fastest rival, and where gemmery is slower |
| `<!-- summary: SUITE ... -->` | the same without the slower products, for one machine |
| `<!-- table: SUITE -->` | the tables of a suite, with the spread of each ratio |
| `<!-- figure: SUITE PLOT -->` | a figure with its caption, written to docs/figures/ |
| `<!-- picture: SUITE PLOT -->` | the same figure with one line below it |
| `<!-- modelled -->` | the instructions the emulator computes; `<!-- modelled: machine -->` lists the others |
| `<!-- value: SUITE WHAT -->` | `rate`, `share`, `time`, or the speed-up over the rival WHAT; never begins a line |

Each block covers every machine that has a file of records: `machine=cpu` selects the CPUs, `machine=gpu` the GPUs,
`machine=NAME` or `machine=first` one machine. Fields of a measurement narrow the selection: `n=1024 dtype=f32
kernel='packed kc=256'`; `precision=` excludes tf32. A block without records says so. README.zh.md has
the blocks of README.md in the words of docs/zh.toml. `python -m gemmery.report.documents` in a checkout rewrites every
document; a test checks that they are up to date.
"""

from __future__ import annotations

import html
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gemmery.bench import suite
from gemmery.bench.record import Measurement, Run
from gemmery.errors import ArgumentError
from gemmery.ladder.rung import Rung
from gemmery.report import modelled, words
from gemmery.report.figures import figures
from gemmery.report.ladder_text import ladder
from gemmery.report.stored import Query, Stored, missing, query
from gemmery.report.suite_tables import brief_overview, is_of_model, is_own, overview
from gemmery.report.svg import Plot, standalone
from gemmery.report.tables import sheets
from gemmery.report.text import table

FIGURES = Path("docs", "figures")


class Documents:
    """Fills documents from the records of one checkout; `written` collects the figure files."""

    def __init__(self, root: Path, rungs: Sequence[Rung], gpu_rungs: Sequence[Rung] = ()) -> None:
        self.root, self.rungs, self.gpu_rungs = root, rungs, gpu_rungs
        self.written: dict[Path, str] = {}
        self._stored = Stored(root)

    def fill(self, path: Path) -> str:
        """Return the text of the document at `path` with every generated block rewritten.

        >>> Documents(Path("."), CPU).fill(Path("README.md"))  # doctest: +SKIP
        '# gemmery...'

        Raises ArgumentError for an unknown suite, figure or field, and for a `value` that matches several records.
        """

        def replaced(marked: re.Match[str]) -> str:
            kind, marker = marked[1], marked[2] or ""
            opening = f"<!-- {kind}{': ' if marker else ''}{marker} -->"
            body = self._in_language_of(path, BLOCKS[kind](self, path, marker))
            return f"{opening}{body}<!-- end -->" if kind == "value" else f"{opening}\n{body.strip()}\n<!-- end -->"

        return MARKER.sub(replaced, path.read_text(encoding="utf-8"))

    def _in_language_of(self, path: Path, text: str) -> str:
        """A generated block in the words of docs/XX.toml, for a document README.XX.md."""
        phrases = self.root / "docs" / f"{path.stem.partition('.')[2]}.toml"
        if not phrases.exists():
            return text
        known: dict[str, str] = tomllib.loads(phrases.read_text(encoding="utf-8"))["phrases"]
        for english in sorted(known, key=len, reverse=True):
            text = text.replace(english, known[english])
        return text

    def _ladder(self, path: Path, marker: str) -> str:
        selection = query(f"ladder {marker}")
        if "gpu" in selection.others:
            runs = self._stored.newest_of_each_type(replace(selection, machine="gpu"))
        else:
            runs = self._stored.newest(replace(selection, machine=selection.machine or "cpu"))
        return ladder(self._of("gpu" in selection.others), runs, self.root, path.parent)

    def _of(self, gpu: bool) -> Sequence[Rung]:
        return self.gpu_rungs if gpu else self.rungs

    def _rungs(self, _: Path, marker: str) -> str:
        lines = ["| rung | parent | what it changed | types |", "| :--- | :--- | :--- | :--- |"]
        for rung in self._of("gpu" in marker.split()):
            parent = f"`{rung.parent}`" if rung.parent else ""
            idea = rung.idea.replace("|", "\\|").replace("*", "\\*")
            lines.append(f"| `{rung.name}` | {parent} | {idea} | {', '.join(rung.dtypes)} |")
        return "\n".join(lines)

    def _modelled(self, _: Path, marker: str) -> str:
        return modelled.machine() if marker == "machine" else modelled.instructions()

    def _overview(self, _: Path, marker: str) -> str:
        selection, runs, about = self._suites(marker)
        return "\n".join(f"{_provenance(run)}\n\n{table(overview(run, about))}" for run in runs) or missing(selection)

    def _summary(self, _: Path, marker: str) -> str:
        selection, runs, about = self._suites(marker)
        return f"{table(brief_overview(runs[0], about))}\n{_provenance(runs[0])}" if runs else missing(selection)

    def _suites(self, marker: str) -> tuple[Query, list[Run], dict[str, str]]:
        """Return what a marker over several suites asks for, the runs with all of them, and what each suite is."""
        selection = query(marker)
        suites = (selection.suite, *selection.others)
        about = {name: suite.load(suite.find(name)).about for name in suites if name in suite.names()}
        runs = self._stored.everything(suites, selection)
        return Query(" ".join(suites), (), {}, selection.machine), runs, about

    def _table(self, _: Path, marker: str) -> str:
        selection = query(marker)
        parts = list[str]()
        runs = self._stored.newest(selection)
        if any(is_of_model(m) for run in runs for m in run.measurements):  # a run may have timed some modes alone
            runs = self._stored.newest_of_each_case(selection)
        for run in runs:
            tables = sheets(run, self._of(bool(run.machine.gpu.name)))
            parts += [f"{_provenance(run)}\n", *(f"**{sheet.title}**\n\n{table(sheet)}" for sheet in tables)]
        return "\n".join(parts) or missing(selection)

    def _figure(self, path: Path, marker: str) -> str:
        parts = [
            f"**{plot.title}**. {plot.caption}\n\n{image}\n\n{_provenance(run)}"
            for run, plot, image in self._drawn(path, marker)
        ]
        return "\n\n".join(parts) or missing(query(marker))

    def _picture(self, path: Path, marker: str) -> str:
        parts = [
            f"{image}\n\n*{plot.title}, on {words.processor(run.machine)[0]}, {run.started[:10]}. {plot.caption}*"
            for run, plot, image in self._drawn(path, marker)
        ]
        return "\n\n".join(parts) or missing(query(marker))

    def _drawn(self, path: Path, marker: str) -> Iterator[tuple[Run, Plot, str]]:
        """The figures of a marker, each with the run it shows and the HTML that shows it in the document at `path`."""
        selection = query(marker)
        for run in self._stored.newest(selection):
            plots = {plot.name: plot for plot in figures(run, self._of(bool(run.machine.gpu.name)))}
            if not plots.keys() >= set(selection.others):
                raise ArgumentError(f"marker {marker!r}: these records make the figures {', '.join(plots) or 'none'}")
            for plot in [plots[name] for name in selection.others] or plots.values():
                of = [] if selection.suite in plot.name else [selection.suite]
                narrowed = [value for _, value in sorted(selection.fields.items()) if value]
                file = self.root / FIGURES / f"{_stem(run.machine.name, *of, plot.name, *narrowed)}.svg"
                self.written[file] = standalone(plot.svg)
                link = os.path.relpath(file, path.parent)
                yield run, plot, f'<img src="{link}" alt="{html.escape(plot.title)}" width="100%">'

    def _value(self, _: Path, marker: str) -> str:
        selection = query(marker)
        runs = self._stored.newest(selection)
        records = [m for run in runs for m in run.measurements if "kernel" in selection.fields or is_own(m)]
        if not runs:
            return "(not measured yet)"
        if len(records) != 1 or len(selection.others) != 1:
            raise ArgumentError(f"marker {marker!r}: matches {len(records)} records; name one value and one record")
        return _value(records[0], selection.others[0], marker)


BLOCKS: dict[str, Callable[[Documents, Path, str], str]] = {
    "ladder": Documents._ladder,
    "rungs": Documents._rungs,
    "overview": Documents._overview,
    "summary": Documents._summary,
    "table": Documents._table,
    "figure": Documents._figure,
    "picture": Documents._picture,
    "value": Documents._value,
    "modelled": Documents._modelled,
}
MARKER = re.compile(rf"<!-- ({'|'.join(BLOCKS)})(?:: ([^>]*?))? -->(.*?)<!-- end -->", re.DOTALL)


def _value(m: Measurement, what: str, marker: str) -> str:
    known = {
        "rate": f"{words.digits(words.reached(m))} {words.rate(m)}",
        "share": words.percent(words.share(m)),
        "time": words.duration(m.seconds),
    }
    if what in known:
        return known[what]
    if what in m.versus:
        return words.times(m.versus[what], m.spread.get(what, 0.0))
    raise ArgumentError(f"marker {marker!r}: {what!r} is not rate, share, time or a rival in that record")


def _provenance(run: Run) -> str:
    """One line: machine, rival libraries, and when it was measured."""
    machine = run.machine
    caches = (f"{name} {words.size(size)}" for name, size in words.caches(machine))
    notes = [m.note for m in run.measurements if m.kernel in words.RIVALS and m.note]
    cores = f"{machine.gpu.sms} multiprocessors" if machine.gpu.name else f"{machine.cores} cores"
    where = ", ".join([*words.processor(machine), cores, *caches])
    return f"*{'; '.join([where, *_joined(notes)])}. Measured {words.when(run)}.*"


def _joined(notes: Iterable[str]) -> Iterator[str]:
    """Descriptions of the rivals, each once; notes that differ only in their last word share a line.

    >>> list(_joined(["cuBLAS 13, torch.mm", "cuBLAS 13, torch.mv", "torch 2; returns f16: none is wider", "torch 2"]))
    ['cuBLAS 13, torch.mm and torch.mv', 'torch 2', 'PyTorch returns f16 where C is float32']
    """
    by_head: dict[str, dict[str, None]] = {}
    for note in notes:
        for sentence in note.split("; "):
            returned = sentence.partition(":")[0]
            part = f"PyTorch {returned} where C is float32" if sentence.startswith("returns ") else sentence
            head, comma, tail = part.rpartition(", ")
            by_head.setdefault(head + comma if comma else part, {})[tail if comma else ""] = None
    for head, tails in by_head.items():
        yield head + " and ".join(tails)


def _stem(*parts: str) -> str:
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).lower() for part in parts)


def documents(root: Path) -> tuple[Path, ...]:
    """Return the documents of a checkout."""
    return (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md")), *sorted(root.glob("*/README.md")))


def main(root: Path) -> None:
    """Rewrite every document and figure of the checkout at `root`, and remove figures that no document shows."""
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
