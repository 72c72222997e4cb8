"""The ladder in words, for docs/ladder.md: what each rung is and teaches, and what it gave where it was measured."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gemmery import dtypes
from gemmery.bench.record import Measurement, Run
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery.report import words
from gemmery.report.sheet import Group, groups, speedup

OTHER = {"f16": "f64", "f32": "f64", "f64": "f32"}  # another type of result for the first type of a rung


def ladder(rungs: Sequence[Rung], runs: Sequence[Run], root: Path, folder: Path) -> str:
    """The tree of the rungs, then a section for each; `runs` hold records of the ladder, one run a machine.

    `root` is the checkout, which has docs/published.toml; links lead from `folder`.
    """
    measured = [(run, groups((m for m in run.measurements if m.suite == "ladder"), rungs)) for run in runs]
    link = os.path.relpath(root / "src" / "gemmery", folder)
    figures = published(root / "docs" / "published.toml")
    sections = [_section(rung, measured, link, figures.get(rung.name, [])) for rung in rungs]
    return "\n\n".join(["```\n" + "\n".join(tree(rungs)) + "\n```", *sections])


def tree(rungs: Sequence[Rung], parent: str | None = None, indent: str = "") -> list[str]:
    """Lines that show which rung grew from which."""
    lines = []
    for rung in rungs:
        if rung.parent == parent:
            lines += [
                f"{indent}{rung.name:{max(28 - len(indent), 1)}} {rung.idea}",
                *tree(rungs, rung.name, indent + "  "),
            ]
    return lines


def published(file: Path) -> dict[str, list[str]]:
    """The sentences on a rung's published figures; none without the file."""
    found: dict[str, list[str]] = {}
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["figure"] if file.exists() else []
    for row in rows:
        figures = ", ".join(f"{taken:,} ms at {row['by']} = {at}" for at, taken in row["milliseconds"].items())
        found.setdefault(row["rung"], []).append(f"On {row['source']}: {figures}.")
    return found


def refusals(rung: Rung) -> tuple[str, ...]:
    """The reasons, in its own words, for which a rung refuses some of the problems there are."""
    name = rung.dtypes[0]
    plain = Problem(40, 48, 56, name, name)
    whole = [other for other in rung.dtypes if dtypes.get(other).kind in "iu"]
    asked = [
        plain,
        replace(plain, n=1),
        replace(plain, batch=2),
        replace(plain, out=OTHER[name]),
        replace(plain, scaled=True),
        replace(plain, epilogue="bias+relu"),
        replace(plain, epilogue="bias+relu", c_layout="col"),
        replace(plain, b_layout="any"),
        replace(plain, c_layout="any"),
        *(replace(plain, dtype=other, out=other, epilogue="gelu") for other in whole[:1]),
    ]
    return tuple(dict.fromkeys(reason for problem in asked if (reason := rung.refuses(problem))))


def _section(rung: Rung, measured: Sequence[tuple[Run, Sequence[Group]]], source: str, known: Sequence[str]) -> str:
    types = "every one" if set(rung.dtypes) == set(dtypes.NAMES) else ", ".join(rung.dtypes)
    facts = [
        f"grew from [`{rung.parent}`](#{rung.parent})" if rung.parent else "is where the ladder begins",
        f"element types: {types}",
        f"source: [{rung.source}]({source}/{rung.source})" if rung.source else "",
        "its error is bounded by the norms of A and B, not element by element" if rung.normwise else "",
    ]
    parts = [
        f"## {rung.name}",
        f"**{sentence(rung.idea)}.**".replace(" * ", " \\* "),
        rung.lesson,
        f"It {'; '.join(filter(None, facts))}.",
        "\n".join(f"- It varies `{name}`: {', '.join(map(str, values))}." for name, values in rung.space.items()),
        "\n".join(f"- It refuses: {reason}." for reason in refusals(rung)),
        "\n".join(filter(None, (_step(rung, run, found) for run, found in measured))),
        "\n".join(f"- Published. {sentence}" for sentence in known),
    ]
    return "\n\n".join(filter(None, parts))


def sentence(words: str) -> str:
    """With a capital, unless it begins with a name: `mma.sync` of an instruction, `x` of a vector."""
    return words[:1].upper() + words[1:] if re.match(r"a |[a-z]{2,}(?!\.)\b", words) else words


def _step(rung: Rung, run: Run, found: Sequence[Group]) -> str:
    """What the rung gave on one machine: its rate, and how much faster than its parent."""
    said = []
    for group in found:
        for m in group.rungs:
            if m.kernel == rung.name and m.seconds:
                over = speedup(m, rung.parent, group) if rung.parent else None
                gain = f", {words.times(*over)} its parent" if over else ""
                said.append(f"{_rate(m)} at {words.shape(m)}, {words.types(m)}{gain}")
    where = ", ".join([*words.processor(run.machine), run.started[:10]])
    return f"- Measured on {where}: {'; '.join(said)}." if said else ""


def _rate(measurement: Measurement) -> str:
    part = words.share(measurement)
    of_peak = f" ({words.percent(part)} of the peak)" if part is not None else ""
    return f"{words.digits(words.reached(measurement))} {words.rate(measurement)}{of_peak}"
