"""What a rung reached on each machine, as bars of HTML: itself, its parent, the rival and the peak of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from gemmery.ladder.rung import Rung
from gemmery_emulator.pages import numerals
from gemmery_lab import experiments
from gemmery_lab.experiments import LADDER
from gemmery_lab.measure.record import Measurement, Run
from gemmery_lab.report import words
from gemmery_lab.report.words import Group, gain, groups
from site_pages.documents import published
from site_pages.stored import TYPE, Stored, query

FLOAT8 = "hopper_fp8"  # the suite of products that the ladder has none of


@dataclass(frozen=True)
class Bar:
    """A bar of a chart; `kind` is "own", "parent", "rival" or "peak"."""

    name: str
    value: float
    kind: str
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """The bars of one product on one machine, in the unit of their rates."""

    machine: str
    title: str
    unit: str
    bars: tuple[Bar, ...]

    @property
    def html(self) -> str:
        """A list whose entries are as long as their rates."""
        longest = max(bar.value for bar in self.bars)
        rows = [
            f'<li class="{bar.kind}"><span>{escape(bar.name)}</span>'
            f'<i style="--length:{100 * bar.value / longest:.1f}%"></i>'
            f"<b>{numerals.digits(bar.value)}<small>{escape(bar.note)}</small></b></li>"
            for bar in self.bars
        ]
        head = f"<figcaption>{escape(self.title)}, {escape(self.unit)}</figcaption>"
        return f'<figure class="bars">{head}<ul>{"".join(rows)}</ul></figure>'


class Records:
    """The records of the ladders in a checkout: the newest of every element type on each machine."""

    def __init__(self, root: Path) -> None:
        stored = Stored(root)
        self.published = published(root / "docs" / "published.toml")
        self._others = stored.newest(query(f"{FLOAT8} machine=gpu"))
        self._runs = {kind: stored.newest_of_each(query(f"ladder machine={kind}"), *TYPE) for kind in ("cpu", "gpu")}

    def charts(self, rung: Rung, rungs: Sequence[Rung]) -> list[tuple[str, list[Chart]]]:
        """Return (machine and date, a chart for each element type at the largest size measured)."""
        by_machine = []
        for run in self._runs["gpu" if rung.geometry else "cpu"]:
            charts = _charts(rung, run, groups((m for m in run.measurements if experiments.of(m) is LADDER), rungs))
            if charts:
                by_machine.append((_measured(run), charts))
        return by_machine or [
            (_measured(run), charts)
            for run in self._others
            if (charts := _charts(rung, run, groups(_served(rung, run), rungs)))
        ]


def _measured(run: Run) -> str:
    return ", ".join([*words.processor(run.machine), f"measured {run.started[:10]}"])


def _served(rung: Rung, run: Run) -> list[Measurement]:
    """Return the largest square that gm.matmul had this rung multiply, under its name, and the records of rivals."""
    own = [m for m in run.measurements if m.note == rung.name and m.m == m.n == m.k]
    largest = max(own, key=lambda m: (m.flops, -len(m.case)), default=None)  # the plain case, not the sustained one
    return [
        replace(m, kernel=rung.name) if m is largest else m
        for m in run.measurements
        if largest and (m.flops, m.case) == (largest.flops, largest.case)
    ]


def _charts(rung: Rung, run: Run, problems: Sequence[Group]) -> list[Chart]:
    largest: dict[str, tuple[Group, Measurement]] = {}
    for group in problems:
        for m in group.rungs:
            if m.kernel == rung.name and m.seconds:
                known = largest.get(words.types(m))
                if known is None or _telling(rung, group, m) >= _telling(rung, *known):
                    largest[words.types(m)] = group, m
    return [
        Chart(
            run.machine.name,
            f"{words.shape(own)}, {name}",
            words.rate(own),
            tuple(_bars(rung, group, own)),
        )
        for name, (group, own) in sorted(largest.items())
    ]


def _telling(rung: Rung, group: Group, own: Measurement) -> tuple[bool, int]:
    """What makes a problem the one to show: its parent ran too, and it is large."""
    return any(m.kernel == rung.parent for m in group.all), own.flops


def _bars(rung: Rung, group: Group, own: Measurement) -> list[Bar]:
    parents = [m for m in group.rungs if m.kernel == rung.parent and m.seconds]
    same = [m for m in group.rivals if m.seconds and m.threads == own.threads]
    rivals = sorted(same, key=lambda m: m.seconds)[:1]
    step = gain(own, rung.parent, group)
    bars = [Bar(m.kernel, words.reached(m), "parent") for m in parents]
    bars.append(Bar(rung.name, words.reached(own), "own", f" {step}" if step else ""))
    bars += [Bar(words.versioned(m.kernel, [m]), words.reached(m), "rival") for m in rivals]
    peaks = {words.place(m): m for m in (*rivals, own) if m.peak_gflops}
    for place, m in reversed(peaks.items()):  # a rival may use another unit
        share = words.share(own) if m is own else None
        note = f" {numerals.percent(share)} reached" if share else ""
        bars.append(Bar(f"peak, {place}", words.reached(m, m.peak_gflops), "peak", note))
    return bars
