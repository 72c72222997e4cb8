"""The generated parts of documents, each between two markers: measured figures, lists of rungs and of modules.

| marker | text generated between it and `<!-- end -->` |
| --- | --- |
| `<!-- ladder: dtype=f32 -->` | a section for each rung: idea, lesson, refusals, measurements |
| `<!-- rungs -->` | a table of all rungs; `<!-- rungs: gpu -->` and `<!-- ladder: gpu -->` are for the GPU ladder |
| `<!-- overview: SUITE ... -->` | one row per suite: the ratios to the fastest rival, and where gemmery is slower |
| `<!-- summary: SUITE ... -->` | the same without the slower products, for one machine |
| `<!-- table: SUITE -->` | the tables of a suite, with the spread of each ratio |
| `<!-- figure: SUITE PLOT -->` | a figure with its caption, written to docs/figures/ |
| `<!-- picture: SUITE PLOT -->` | the same figure with one line below it |
| `<!-- modeled -->` | the instructions the emulator computes; `<!-- modeled: machine -->` lists the others |
| `<!-- predicted -->` | the micro-kernels for ARM, from benchmarks/arm_predicted.json, which `gemmery predict` writes |
| `<!-- files: FOLDER -->` | the modules of a folder, with the first lines of their docstrings |
| `<!-- value: SUITE WHAT -->` | `rate`, `share`, `time`, or the speed-up over the rival WHAT; never begins a line |

Each block covers every machine that has a file of records: `machine=cpu` selects the CPUs, `machine=gpu` the GPUs,
`machine=NAME` or `machine=first` one machine. Fields of a measurement narrow the selection: `n=1024 dtype=f32
kernel='packed kc=256'`; `precision=` excludes tf32. A block without records says so. README.zh.md has
the blocks of README.md in the words of docs/zh.toml. `python -m site_pages.documents` in a checkout rewrites every
document, and writes docs/results.md, which git ignores, from site_pages/results.md. A test checks that the others are
up to date.
"""

from __future__ import annotations

import html
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from gemmery import dtypes
from gemmery.cpu import target
from gemmery.errors import ArgumentError
from gemmery.ladder.diff import pseudocode
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery_emulator.pages import numerals
from gemmery_emulator.pages.svg import Plot, standalone
from gemmery_lab import experiments
from gemmery_lab.experiments import LADDER
from gemmery_lab.inspection import cpu_rung
from gemmery_lab.measure import suite
from gemmery_lab.measure.record import Measurement, Run
from gemmery_lab.report import words
from gemmery_lab.report.page import figures
from gemmery_lab.report.sheet import Cell, Sheet, rate, share, table, tabulate
from gemmery_lab.report.suite_tables import is_of_model, is_own
from gemmery_lab.report.tables import sheets, tree, walk
from gemmery_lab.report.words import Group, gain, groups
from site_pages import modeled, modules
from site_pages.overviews import brief_overview, overview
from site_pages.stored import TYPE, Query, Stored, missing, query

FIGURES = Path("docs", "figures")


class Documents:
    """Fills documents from the records of one checkout; `written` collects the figure files."""

    def __init__(self, root: Path, rungs: Sequence[Rung], gpu_rungs: Sequence[Rung] = ()) -> None:
        self.root, self.rungs, self.gpu_rungs = root, rungs, gpu_rungs
        self.written: dict[Path, str] = {}
        self._stored = Stored(root)

    def fill(self, path: Path, text: str) -> str:
        """Return the text of the document at `path` with every generated block rewritten.

        >>> Documents(Path("."), CPU).fill(Path("README.md"), "<!-- rungs --><!-- end -->")  # doctest: +SKIP
        '<!-- rungs -->...'

        Raises ArgumentError for an unknown suite, figure or field, and for a `value` that matches several records.
        """

        def replaced(marked: re.Match[str]) -> str:
            kind, marker = marked[1], marked[2] or ""
            opening = f"<!-- {kind}{': ' if marker else ''}{marker} -->"
            body = self._in_language_of(path, BLOCKS[kind](self, path, marker))
            return f"{opening}{body}<!-- end -->" if kind == "value" else f"{opening}\n{body.strip()}\n<!-- end -->"

        return MARKER.sub(replaced, text)

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
            runs = self._stored.newest_of_each(replace(selection, machine="gpu"), *TYPE)
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

    def _modeled(self, _: Path, marker: str) -> str:
        return modeled.machine() if marker == "machine" else modeled.instructions()

    def _predicted(self, _: Path, marker: str) -> str:
        rows = json.loads((self.root / "benchmarks" / "arm_predicted.json").read_text(encoding="utf-8"))
        return table(cpu_rung.sheet(cpu_rung.PredictedShare(**row) for row in rows))

    def _files(self, _: Path, marker: str) -> str:
        return modules.listing(self.root, marker)

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
            runs = self._stored.newest_of_each(selection, "case")
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
    "modeled": Documents._modeled,
    "predicted": Documents._predicted,
    "files": Documents._files,
}
MARKER = re.compile(rf"<!-- ({'|'.join(BLOCKS)})(?:: ([^>]*?))? -->(.*?)<!-- end -->", re.DOTALL)


def _value(m: Measurement, what: str, marker: str) -> str:
    known = {
        "rate": f"{numerals.digits(words.reached(m))} {words.rate(m)}",
        "share": numerals.percent(words.share(m)),
        "time": numerals.duration(m.seconds),
    }
    if what in known:
        return known[what]
    if what in m.versus:
        return numerals.times(m.versus[what], m.spread.get(what, 0.0))
    raise ArgumentError(f"marker {marker!r}: {what!r} is not rate, share, time or a rival in that record")


def _provenance(run: Run) -> str:
    """One line: machine, rival libraries, and when it was measured."""
    machine = run.machine
    caches = (f"{name} {numerals.size(size)}" for name, size in words.caches(machine))
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


def documents(root: Path) -> dict[Path, Path]:
    """Return the documents of a checkout, each with the file that has its text.

    That is the document itself, or site_pages/NAME.md for docs/NAME.md, which is built and not under version control.
    """
    kept = (
        *sorted(root.glob("*.md")),
        *sorted((root / "docs").rglob("*.md")),
        *sorted(root.glob("*/README.md")),
        *sorted(root.glob("packages/*/README.md")),
    )
    built = {root / "docs" / file.name: file for file in (root / "site_pages").glob("*.md")}
    return {**{path: path for path in kept}, **built}


def main(root: Path) -> None:
    """Rewrite every document and figure of the checkout at `root`, and remove figures that no document shows."""
    from gemmery.ladder.cpu import CPU
    from gemmery.ladder.cuda import CUDA

    filler = Documents(root, CPU, CUDA)
    for path, source in documents(root).items():
        path.write_text(filler.fill(path, source.read_text(encoding="utf-8")), encoding="utf-8")
    for path in (root / FIGURES).glob("*.svg"):
        if path not in filler.written:
            path.unlink()
    for path, svg in filler.written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg, encoding="utf-8")


def ladder(rungs: Sequence[Rung], runs: Sequence[Run], root: Path, folder: Path) -> str:
    """Return the tree of the rungs, then a section for each; `runs` hold records of the ladder, one run per machine.

    `root` is the checkout, which has docs/published.toml; links are relative to `folder`.
    """
    measured = [(run, groups((m for m in run.measurements if experiments.of(m) is LADDER), rungs)) for run in runs]
    link = os.path.relpath(root / "packages/gemmery/src/gemmery", folder)
    figures = published(root / "docs" / "published.toml")
    sections = [_section(rung, measured, link, figures.get(rung.name, [])) for rung in rungs]
    return "\n\n".join(["```\n" + "\n".join(tree_lines(rungs)) + "\n```", *sections])


def tree_lines(rungs: Sequence[Rung]) -> list[str]:
    """Return lines that show each rung indented below its parent."""
    return [f"{'  ' * depth}{rung.name:{max(28 - 2 * depth, 1)}} {rung.idea}" for depth, rung in walk(tree(rungs))]


def published(file: Path) -> dict[str, list[str]]:
    """Return tables of published figures, by rung; none without the file."""
    tables: dict[str, list[str]] = {}
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["figure"] if file.exists() else []
    for row in rows:
        columns = [(f"{row['by']} = {at}", f"{time:,}") for at, time in row["milliseconds"].items()]
        tables.setdefault(row["rung"], []).append(_row_of_figures(f"Published, {row['source']}", "ms", columns))
    return tables


def _row_of_figures(title: str, unit: str, columns: Sequence[tuple[str, str]]) -> str:
    """A table of one row: heads and their figures."""
    heads, figures = zip(*columns, strict=True)
    return table(Sheet("", (title, *heads), (tuple(map(Cell, (unit, *figures))),))).rstrip()


def parameters(rung: Rung) -> str:
    """Return a table of the parameters of a rung and their values, "" where it has none."""
    if not rung.space:
        return ""
    rows = (f"| `{name}` | {', '.join(map(str, values))} |" for name, values in rung.space.items())
    return "\n".join(["| parameter | values |", "| :--- | :--- |", *rows])


def refusals(rung: Rung) -> tuple[str, ...]:
    """Return the reasons a rung gives for refusing problems, without the limits of this machine."""
    name = rung.dtypes[0]
    plain = Problem(40, 48, 56, name, dtypes.written(name))
    whole = [other for other in rung.dtypes if dtypes.get(other).kind in "iu"]
    problems = [
        plain,
        plain._replace(n=1),
        plain._replace(batch=2),
        plain._replace(out="f32" if name == "f64" else "f64"),
        plain._replace(scaled=True),
        plain._replace(epilogue="bias+relu"),
        plain._replace(epilogue="bias+relu", c_layout="col"),
        plain._replace(b_layout="any"),
        plain._replace(c_layout="any"),
        plain._replace(invariant=True),
        plain._replace(scales="outer"),
        *(plain._replace(dtype=other, out=other, epilogue="gelu") for other in whole[:1]),
    ]
    lacks = "this CPU has no tile unit (Intel AMX): use packed, which runs on vectors"
    with mock.patch.object(target, "without_tiles", return_value=lacks):
        reasons = [rung.refuses(plain)]
    with mock.patch.object(target, "without_tiles", return_value=""):
        reasons += [rung.refuses(problem) for problem in problems]
    return tuple(dict.fromkeys(re.sub(r", here \d+", "", reason) for reason in reasons if reason))


def _section(rung: Rung, measured: Sequence[tuple[Run, Sequence[Group]]], source: str, known: Sequence[str]) -> str:
    types = "all" if set(rung.dtypes) == set(dtypes.NAMES) else ", ".join(rung.dtypes)
    facts = [
        f"Parent: [`{rung.parent}`](#{rung.parent})." if rung.parent else "The first rung.",
        f"Element types: {types}.",
        f"Source: [{rung.source}]({source}/{rung.source})." if rung.source else "",
        "Its error bound is on the norms of A and B, not on each element." if rung.normwise else "",
    ]
    parts = [
        f"## {rung.name}",
        f"**{sentence(rung.idea)}.**".replace(" * ", " \\* "),
        rung.lesson,
        f"```\n{loops}\n```" if (loops := pseudocode(rung.source, rung.name)) else "",
        " ".join(filter(None, facts)),
        parameters(rung),
        "\n".join(f"- Not supported: {reason}." for reason in refusals(rung)),
        *(_step(rung, run, problems) for run, problems in measured),
        *known,
    ]
    return "\n\n".join(filter(None, parts))


def sentence(words: str) -> str:
    """Capitalize, unless the first word is a name: the instruction `mma.sync`, the vector `x`."""
    return words[:1].upper() + words[1:] if re.match(r"a |[a-z]{2,}(?!\.)\b", words) else words


def _step(rung: Rung, run: Run, problems: Sequence[Group]) -> str:
    """A table of what the rung reached on one machine, and how much faster it is than its parent."""
    ran = [(group, m) for group in problems for m in group.rungs if m.kernel == rung.name and m.seconds]
    if not ran:
        return ""
    ran.sort(key=lambda pair: (words.types(pair[1]), pair[1].flops))
    if run.machine.gpu.name:  # one size of each type
        ran = list({words.types(m): (group, m) for group, m in ran}.values())
    gains = [gain(m, rung.parent, group) for group, m in ran]
    where = ", ".join([*words.processor(run.machine), run.started[:10]])
    columns = [
        (where, lambda row: f"{words.shape(row[0])}, {words.types(row[0])}"),
        (words.rate(ran[0][1]), lambda row: rate(row[0])),
        ("% of peak", lambda row: share(row[0])),
        *([("× parent", lambda row: row[1])] if any(gains) else []),
    ]
    return table(tabulate("", columns, zip((m for _, m in ran), gains, strict=True))).rstrip()


if __name__ == "__main__":
    main(Path.cwd())
