"""Two rungs side by side: launches, counters and instructions with the differences marked, on a terminal or a page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gemmery.cuda.inspection import Kernel
from gemmery.cuda.sass import arithmetic, is_notable, multiply_adds, ordered
from gemmery.ladder.inspection import Comparison, LineCounts
from gemmery.report import counters, words
from gemmery.report.inspection import configured, launch_of, lesson, where

COUNTS = {
    "instructions": "instructions of warps",
    "bank_conflicts": "bank conflicts",
    "wavefronts": "wavefronts of shared memory",
    "wavefronts_ideal": "wavefronts for the bytes alone",
    "sectors": "sectors of global memory",
    "requests": "accesses to global memory",
    "used": "bytes used of the sectors",
    "divergent_branches": "divergent branches",
    "flops": "flops",
}
COSTS = ("instructions", "bank_conflicts", "wavefronts", "sectors", "divergent_branches")
ROOFS = ("compute", "memory", "shared", "issue", "roof")  # costs, too
FEWER, MORE = "fewer", "more"  # classes of the cells of a cost that differs
LEGEND = (
    "<p class=legend><span class=fewer>Green</span> costs less than the first rung, <span class=more>orange</span> "
    "costs more, <span class=differs>blue</span> differs otherwise.</p>"
)


@dataclass(frozen=True)
class Section:
    """Facts of both; numbers with the second as a multiple of the first."""

    title: str
    rows: tuple[tuple[str, str, str, str], ...]
    costs: bool = False  # less is better
    note: str = ""


def show_comparison(found: Comparison, console: Console) -> None:
    """Print the facts of both, with the differences in colour."""
    console.print(Text(_title(found), style="bold"))
    console.print(Text(where(found.new, config=False), style="dim"))
    for one in (found.old, found.new):
        console.print(Text.assemble((f"{one.rung}: ", "dim"), one.idea))
    if said := glance(found):
        console.print(Text(said))
    for section in sections(found):
        console.print()
        console.print(Text(section.title, style="bold"))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
        numbers = any(row[3] for row in section.rows)
        for name in ("", found.old.rung, found.new.rung, *([""] if numbers else [])):
            table.add_column(name, justify="right" if name and numbers else "left", overflow="fold")
        for name, old, new, ratio in section.rows:
            style = {"": "dim", FEWER: "green", MORE: "yellow"}.get(_differs(section, name, old, new), "bold")
            table.add_row(Text(name, style="dim"), old, Text(new, style=style), *([ratio] if numbers else []))
        console.print(table)
        if section.note:
            console.print(Text(section.note, style="dim"))


def comparison_page(found: Comparison) -> str:
    """The same as one self-contained HTML page, with the pictures of both."""
    from gemmery.report.page import document, figure
    from gemmery.report.pictures import pictures

    both = (found.old, found.new)
    ideas = "".join(
        f"<p><b>{html.escape(one.rung)}</b>: {html.escape(one.idea)}. {html.escape(lesson(one.rung))}</p>"
        for one in both
    )
    head = (
        f"<header><h1>{html.escape(_title(found))}</h1><p class=lead>{html.escape(glance(found))}</p>{ideas}"
        f"<p class=faint>{html.escape(where(found.new, config=False))}</p></header>"
    )
    drawn: dict[str, list[str]] = {}
    explained: frozenset[str] = frozenset()
    for number, one in enumerate(both, 1):
        run = one.emulated
        for plot in pictures(run.chosen, run.source, explained=explained) if run else ():
            named = replace(plot, name=f"{number}-{plot.name}", title=f"{one.rung}: {plot.title}")
            drawn.setdefault(plot.name, []).append(figure(named))
            explained |= {plot.name.partition("-")[0]}
    pairs = [f"<div class=pair>{''.join(plots)}</div>" for plots in drawn.values()]
    first, *others = (_html(section, found) for section in sections(found))
    return document(_title(found), head, LEGEND, first, *pairs, *others)


def glance(found: Comparison) -> str:
    """The costs that differ, in a sentence: "Bank conflicts 12,288 → 0; sectors 8,192 → 6,144, 0.750×."."""
    both = (found.old, found.new)
    before, after = found.old.emulated, found.new.emulated
    if different := _products(found):
        return different
    if not before or not after:
        return ""
    said = []
    for name in COSTS:
        old, new = getattr(before.total, name), getattr(after.total, name)
        if old != new:
            ratio = f", {words.times(new / old)}" if old and new else ""
            said.append(f"{COUNTS[name]} {old:,} → {new:,}{ratio}")
    text = "; ".join(said) or "the counters are the same"
    roofs = [max(limits.values()) for limits in map(counters.limits, both) if limits]
    if len(roofs) == 2:
        first, second = (words.digits(1e6 * roof) for roof in roofs)
        text += f"; roof {first} → {second} µs, {words.times(roofs[1] / roofs[0])}" if first != second else ""
    return f"{text[0].upper()}{text[1:]}."


def _products(found: Comparison) -> str:
    """A warning where the two were inspected for different products."""
    old, new = (
        f"{counters.size(one.problem, one.exhibit)}, {one.problem.precision or one.problem.dtype}"
        for one in (found.old, found.new)
    )
    return "" if old == new else f"Different products, so the counts do not compare: {old}, and {new}."


def sections(found: Comparison) -> tuple[Section, ...]:
    """Counters where both rungs were emulated, launches, instructions."""
    before, after = found.old.emulated, found.new.emulated
    old, new = (dict(launch_of(one)) for one in (found.old, found.new))
    if found.old.config or found.new.config:
        old, new = ({"config": configured(one), **facts} for one, facts in ((found.old, old), (found.new, new)))
    launch = tuple((name, old.get(name, ""), new.get(name, ""), "") for name in dict.fromkeys([*old, *new]))
    made = [*_counted(found), *_roofs(found), Section("Launch", launch)]
    made += _machine(found.old.kernels[-1], found.new.kernels[-1])
    if before and after:
        made.append(Section("Instructions executed, by kind", _numbers(before.kinds, after.kinds)))
    return tuple(made)


def _roofs(found: Comparison) -> list[Section]:
    """The roofs of both in microseconds, and the longest of each."""
    old, new = (
        {name: seconds * 1e6 for name, seconds in counters.limits(one).items()} for one in (found.old, found.new)
    )
    if not old or not new:
        return []
    first, second = (max(times, key=lambda name: times[name]) for times in (old, new))
    rows = _numbers({**old, "roof": old[first]}, {**new, "roof": new[second]})
    named = (*rows, ("limit", first, second, ""))
    return [Section("Roofs of these counts on a full device, µs", named, costs=True, note=counters.ROOFS)]


def _machine(old: Kernel, new: Kernel) -> list[Section]:
    """Machine instructions of both main loops for the same number of multiply-adds, or of the whole kernels."""
    loops = [one.step or one.loop for one in (old, new)]
    done = [multiply_adds(loop) for loop in loops]
    if not all(done):
        whole = Section("Machine instructions of the whole kernel", _numbers(old.counts, new.counts))
        return [whole] if old.counts and new.counts else []
    span = max(done)
    scaled = [{name: n * span / own for name, n in loop.items()} for loop, own in zip(loops, done, strict=True)]
    kinds = [{name: n for name, n in loop.items() if arithmetic({name: 1})} for loop in scaled]
    (name, number), *others = kinds[0].items()
    same = f"{number:,.0f} {name}" if kinds[0] == kinds[1] and not others else f"{span:,} multiply-adds of a warp"
    note = f"Both columns count the main loop over {same}, so that loops of different length compare."
    uncounted = [one.name.partition("<")[0] for one in (old, new) if not one.step]
    note += f" The loop around that of {' and '.join(uncounted)} is left out." if uncounted else ""
    return [
        Section(
            f"Machine instructions of the main loop per {same}", _numbers(*_grouped(scaled[0], scaled[1])), note=note
        )
    ]


def _grouped(old: Mapping[str, float], new: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The kinds that matter in one order for both, and the others together."""
    kinds = [name for name in ordered({**old, **new}) if is_notable(name)]
    first, second = ({name: loop.get(name, 0) for name in kinds} for loop in (old, new))
    return (
        {**first, "others": sum(old.values()) - sum(first.values())},
        {**second, "others": sum(new.values()) - sum(second.values())},
    )


def _counted(found: Comparison) -> list[Section]:
    """The counters of both, or the reason why one of them has none."""
    before, after = found.old.emulated, found.new.emulated
    if before and after:
        old, new = ({said: getattr(run.total, name) for name, said in COUNTS.items()} for run in (before, after))
        each = [(counters.used(run.total), _digits(run.total)) for run in (before, after)]
        means = [
            (name, one, other, "")
            for name, one, other in zip(("bytes used per sector", "sectors per access"), *each, strict=True)
            if one or other
        ]
        return [
            Section(
                f"Counters, {counters.where(before, found.old.exhibit)}",
                (*_numbers(old, new, zeros=True), *means),
                costs=True,
                note=counters.IDEAL if any(run.total.wavefronts for run in (before, after)) else "",
            )
        ]
    missing = [(one.rung, one.not_emulated, "", "") for one in (found.old, found.new) if one.not_emulated]
    return [Section("Not counted", tuple(missing))] if missing else []


def _digits(total: LineCounts) -> str:
    return words.digits(total.sectors / total.requests) if total.requests else ""


def _differs(section: Section, name: str, old: str, new: str) -> str:
    """FEWER or MORE for a cost, "differs" for another fact; "" where both are the same."""
    if old == new:
        return ""
    costs = [*(COUNTS[cost] for cost in COSTS), *ROOFS]
    if not section.costs or name not in costs:
        return "differs"
    return FEWER if float(new.replace(",", "")) < float(old.replace(",", "")) else MORE


def _numbers(
    old: Mapping[str, float], new: Mapping[str, float], zeros: bool = False
) -> tuple[tuple[str, str, str, str], ...]:
    rows = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, 0), new.get(name, 0)
        if zeros or before or after:
            ratio = words.times(after / before) if before and after and after != before else ""
            rows.append((name, _figure(before), _figure(after), ratio))
    return tuple(rows)


def _figure(number: float) -> str:
    return f"{round(number):,}" if number == round(number) else words.digits(number)


def _title(found: Comparison) -> str:
    return f"{found.old.rung} and {found.new.rung}"


def _html(section: Section, found: Comparison) -> str:
    numbers = any(row[3] for row in section.rows)
    names = ("", found.old.rung, found.new.rung, *([""] if numbers else []))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(_row(section, row[: len(names)]) for row in section.rows)
    kind = "figures" if numbers else "words"
    note = f"<p class=note>{html.escape(section.note)}</p>" if section.note else ""
    return (
        f"<section><h2>{html.escape(section.title)}</h2><div class=scroll><table class={kind}><thead><tr>{head}</tr>"
        f"</thead><tbody>{rows}</tbody></table></div>{note}</section>"
    )


def _row(section: Section, row: Sequence[str]) -> str:
    kind = _differs(section, *row[:3])
    name, old, new, *ratio = map(html.escape, row)
    differs = f" class={kind}" if kind else ""
    return f"<tr><td>{name}</td><td>{old}</td><td{differs}>{new}</td>{''.join(f'<td>{x}</td>' for x in ratio)}</tr>"
