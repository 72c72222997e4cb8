"""Figures in documents, from the records in benchmarks/results: what stands between two markers is generated.

| marker | what follows it, up to the marker `<!-- end -->` |
| --- | --- |
| `<!-- rungs -->` | every rung, its parent and its idea |
| `<!-- table: MACHINE SUITE -->` | the tables of a suite |
| `<!-- figure: MACHINE SUITE PLOT -->` | a figure, written to docs/figures/ |
| `<!-- value: MACHINE SUITE WHAT -->` | one value: `rate`, `share`, `time`, or the speed-up over a rival of that name |

MACHINE is the stem of a file of records. Fields of a measurement narrow what is taken: `n=1024 dtype=f32 threads=1`.
`python -m gemmery.report.documents` in a checkout rewrites every document; a test holds that nothing would change.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmery.bench import record
from gemmery.bench.record import Measurement, Run
from gemmery.errors import ArgumentError
from gemmery.ladder.rung import Rung
from gemmery.report import words
from gemmery.report.figures import figures
from gemmery.report.sheet import is_own, sheets
from gemmery.report.svg import standalone
from gemmery.report.text import machine, table

MARKER = re.compile(r"<!-- (rungs|table|figure|value)(?:: ([^>]*?))? -->(.*?)<!-- end -->", re.DOTALL)


@dataclass
class Documents:
    """Fills documents from the records of one checkout; `written` collects the files of its figures."""

    root: Path
    rungs: Sequence[Rung]
    written: dict[Path, str] = field(default_factory=dict)

    def fill(self, path: Path) -> str:
        """The text of the document at `path` with everything between markers made anew.

        >>> Documents(Path("."), CPU).fill(Path("README.md"))  # doctest: +SKIP
        '# gemmery...'

        Raises ArgumentError for a machine without records, an unknown field, or a value that is not one.
        """

        def replaced(found: re.Match[str]) -> str:
            kind, said = found[1], found[2] or ""
            made = {"rungs": self._rungs, "table": self._table, "figure": self._figure, "value": self._value}[kind]
            opening = f"<!-- {kind}{': ' if said else ''}{said} -->"
            body = made(path, said.split())
            return f"{opening}{body}<!-- end -->" if kind == "value" else f"{opening}\n{body.strip()}\n<!-- end -->"

        return MARKER.sub(replaced, path.read_text(encoding="utf-8"))

    def _run(self, said: Sequence[str]) -> tuple[Run, list[str]]:
        """The newest records that `MACHINE SUITE [WORD...] [field=value...]` names, and the further words."""
        fields = dict(word.split("=", 1) for word in said if "=" in word)
        name, suite, *others = (word for word in said if "=" not in word)
        unknown = [one for one in fields if one not in Measurement.__dataclass_fields__]
        if unknown:
            raise ArgumentError(f"marker {' '.join(said)!r}: {unknown[0]!r} is no field of a measurement")
        runs = record.read(record.path(self.root / "benchmarks" / "results", name))
        chosen = tuple(
            m
            for m in record.latest(runs)
            if m.suite == suite and all(str(getattr(m, one)) == wanted for one, wanted in fields.items())
        )
        if not chosen:
            raise ArgumentError(f"marker {' '.join(said)!r}: there are no such records; measure them with --store")
        newest = max(runs, key=lambda run: run.started)
        return Run(newest.machine, newest.started, chosen), others

    def _rungs(self, _: Path, __: Sequence[str]) -> str:
        lines = ["| rung | grew from | what it changed | types |", "| :--- | :--- | :--- | :--- |"]
        for rung in self.rungs:
            parent = f"`{rung.parent}`" if rung.parent else ""
            idea = rung.idea.replace("|", "\\|").replace("*", "\\*")
            lines.append(f"| `{rung.name}` | {parent} | {idea} | {', '.join(rung.dtypes)} |")
        return "\n".join(lines)

    def _table(self, _: Path, said: Sequence[str]) -> str:
        run, _others = self._run(said)
        parts = [f"**{sheet.title}**\n\n{table(sheet)}" for sheet in sheets(run, self.rungs)]
        return "\n".join([*parts, f"{machine(run.machine)}. Measured {words.when(run)}."])

    def _figure(self, path: Path, said: Sequence[str]) -> str:
        run, (name, *_others) = self._run(said)
        found = next((plot for plot in figures(run, self.rungs) if plot.name == name), None)
        if found is None:
            raise ArgumentError(f"marker {' '.join(said)!r}: these records make no figure {name!r}")
        stem = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).lower() for word in said)
        file = self.root / "docs" / "figures" / f"{stem}.svg"
        self.written[file] = standalone(found.svg)
        link = os.path.relpath(file, path.parent)
        return f'<img src="{link}" alt="{html.escape(found.title)}" width="100%">\n\n{found.caption}'

    def _value(self, _: Path, said: Sequence[str]) -> str:
        run, (what, *_others) = self._run(said)
        chosen = (
            run.measurements if any("kernel=" in word for word in said) else tuple(filter(is_own, run.measurements))
        )
        if len(chosen) != 1:
            raise ArgumentError(f"marker {' '.join(said)!r}: it names {len(chosen)} records; narrow it down to one")
        (m,) = chosen
        if what == "rate":
            return f"{words.digits(m.gflops)} {words.rate(m)}"
        if what == "share":
            return words.percent(words.share(m))
        if what == "time":
            return words.duration(m.seconds)
        if what in m.versus:
            return words.times(m.versus[what], m.spread.get(what, 0.0))
        raise ArgumentError(
            f"marker {' '.join(said)!r}: {what!r} is neither rate, share, time nor a rival measured with it"
        )


def documents(root: Path) -> tuple[Path, ...]:
    """The documents of a checkout."""
    return (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md")), *sorted(root.glob("*/README.md")))


def main(root: Path) -> None:
    """Write every document and figure of the checkout at `root` anew."""
    from gemmery.ladder.cpu import CPU

    filler = Documents(root, CPU)
    for path in documents(root):
        path.write_text(filler.fill(path), encoding="utf-8")
    for path, svg in filler.written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(Path.cwd())
