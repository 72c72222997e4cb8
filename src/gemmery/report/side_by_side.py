"""Two rungs side by side: launches, counters and instructions, what differs marked; in a terminal and as a page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.ladder.inspection import Comparison
from gemmery.report import counters, words
from gemmery.report.inspection import configured, launch_of, where

COUNTS = {
    "instructions": "instructions of warps",
    "wavefronts": "wavefronts of shared memory",
    "wavefronts_ideal": "their ideal number",
    "bank_conflicts": "bank conflicts",
    "requests": "requests to global memory",
    "sectors": "sectors",
    "used": "bytes used of them",
    "divergent_branches": "divergent branches",
    "flops": "flops",
}


@dataclass(frozen=True)
class Section:
    """Facts of both; of numbers also the second as a multiple of the first."""

    title: str
    rows: tuple[tuple[str, str, str, str], ...]


def show_comparison(found: Comparison, console: Console) -> None:
    """Print the facts of both, what differs in colour."""
    console.print(Text(_title(found), style="bold"))
    console.print(Text(where(found.new, config=False), style="dim"))
    for section in sections(found):
        console.print()
        console.print(Text(section.title, style="bold"))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
        numbers = any(row[3] for row in section.rows)
        for name in ("", found.old.rung, found.new.rung, *([""] if numbers else [])):
            table.add_column(name, justify="right" if name and numbers else "left", overflow="fold")
        for name, old, new, ratio in section.rows:
            style = "" if old == new else "green"
            table.add_row(Text(name, style="dim"), old, Text(new, style=style), *([ratio] if numbers else []))
        console.print(table)


def comparison_page(found: Comparison) -> str:
    """The same as one HTML page that needs nothing else, with the pictures of both."""
    from gemmery.report.page import document, figure
    from gemmery.report.pictures import pictures

    place = html.escape(where(found.new, config=False))
    parts = [
        f"<header><h1>{html.escape(_title(found))}</h1><p class=faint>{place}</p></header>",
        *(_html(section, found) for section in sections(found)),
    ]
    for number, one in enumerate((found.old, found.new), 1):
        if one.emulated:
            plots = pictures(one.emulated.chosen, one.emulated.source, f"{number}-")
            parts.append(f"<section><h2>{html.escape(one.rung)}</h2>{''.join(map(figure, plots))}</section>")
    return document(_title(found), *parts)


def sections(found: Comparison) -> tuple[Section, ...]:
    """Launches, then counters and instructions where both were run."""
    old, new = (dict(launch_of(one)) for one in (found.old, found.new))
    if found.old.config or found.new.config:
        old, new = ({"config": configured(one), **facts} for one, facts in ((found.old, old), (found.new, new)))
    launch = tuple((name, old.get(name, ""), new.get(name, ""), "") for name in dict.fromkeys([*old, *new]))
    made = [Section("Launch", launch)]
    if found.old.kernels[-1].counts and found.new.kernels[-1].counts:
        each = [one.kernels[-1].loop or one.kernels[-1].counts for one in (found.old, found.new)]
        made.append(Section("Machine instructions of the main loop", _numbers(*each)))
    before, after = found.old.emulated, found.new.emulated
    if before and after:
        totals = [{said: getattr(run.total, name) for name, said in COUNTS.items()} for run in (before, after)]
        made.append(Section(f"Counters, {counters.where(before)}", _numbers(*totals)))
        made.append(Section("Instructions executed, by kind", _numbers(before.kinds, after.kinds)))
    else:
        missing = [(one.rung, one.not_emulated, "", "") for one in (found.old, found.new) if one.not_emulated]
        made += [Section("Not counted", tuple(missing))] if missing else []
    return tuple(made)


def _numbers(old: Mapping[str, int], new: Mapping[str, int]) -> tuple[tuple[str, str, str, str], ...]:
    rows = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, 0), new.get(name, 0)
        if before or after:
            ratio = words.times(after / before) if before and after and after != before else ""
            rows.append((name, f"{before:,}", f"{after:,}", ratio))
    return tuple(rows)


def _title(found: Comparison) -> str:
    return f"{found.old.rung} and {found.new.rung}"


def _html(section: Section, found: Comparison) -> str:
    numbers = any(row[3] for row in section.rows)
    names = ("", found.old.rung, found.new.rung, *([""] if numbers else []))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(_row(row[: len(names)]) for row in section.rows)
    kind = "figures" if numbers else "words"
    return (
        f"<section><h2>{html.escape(section.title)}</h2><div class=scroll><table class={kind}><thead><tr>{head}</tr>"
        f"</thead><tbody>{rows}</tbody></table></div></section>"
    )


def _row(row: Sequence[str]) -> str:
    name, old, new, *ratio = map(html.escape, row)
    differs = "" if old == new else " class=differs"
    return f"<tr><td>{name}</td><td>{old}</td><td{differs}>{new}</td>{''.join(f'<td>{x}</td>' for x in ratio)}</tr>"
