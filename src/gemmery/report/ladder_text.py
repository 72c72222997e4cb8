"""The ladder as text, for docs/ladder.md and docs/ladder_gpu.md: each rung's idea, lesson and measurements."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from gemmery import dtypes, experiments
from gemmery.bench.record import Run
from gemmery.experiments import LADDER
from gemmery.ladder.diff import pseudocode
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery.report import words
from gemmery.report.ladder_tables import tree, walk
from gemmery.report.problems import Group, gain, groups
from gemmery.report.sheet import Cell, Sheet, rate, share, tabulate
from gemmery.report.text import table


def ladder(rungs: Sequence[Rung], runs: Sequence[Run], root: Path, folder: Path) -> str:
    """Return the tree of the rungs, then a section for each; `runs` hold records of the ladder, one run per machine.

    `root` is the checkout, which has docs/published.toml; links are relative to `folder`.
    """
    measured = [(run, groups((m for m in run.measurements if experiments.of(m) is LADDER), rungs)) for run in runs]
    link = os.path.relpath(root / "src" / "gemmery", folder)
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
    """Return the reasons a rung gives for refusing problems."""
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
    return tuple(dict.fromkeys(reason for problem in problems if (reason := rung.refuses(problem))))


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
