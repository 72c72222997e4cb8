"""Measurements by problem, the rungs of the ladder and their rivals on the same product, and unreliable figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gemmery import load
from gemmery.bench.record import Measurement, Run
from gemmery.ladder.rung import Rung
from gemmery.pages import numerals
from gemmery.report import words

ANY = "*"  # among the spreads of a record: the spread of every ratio, as a share of it
BUSY = 0.25  # share of a ratio by which it varies at least where the figures are unreliable
SHARED = 0.98  # two threads may share one core, so their peak may be this much of the peak of one


@dataclass(frozen=True)
class Group:
    """Measurements of one problem: the rungs in the order of the ladder, then the rivals."""

    rungs: tuple[Measurement, ...]
    rivals: tuple[Measurement, ...]

    @property
    def every(self) -> tuple[Measurement, ...]:
        """Rungs and rivals."""
        return (*self.rungs, *self.rivals)

    @property
    def all(self) -> tuple[Measurement, ...]:
        """Rungs and rivals that ran."""
        return tuple(m for m in self.every if m.seconds)

    @property
    def first(self) -> Measurement:
        """Any of them, for what they have in common."""
        return self.every[0]


def groups(measurements: Iterable[Measurement], rungs: Sequence[Rung]) -> tuple[Group, ...]:
    """Group measurements by problem: squares first, the smallest first."""
    order = {rung.name: index for index, rung in enumerate(rungs)}
    problems: dict[tuple[object, ...], list[Measurement]] = {}
    for m in measurements:
        problems.setdefault((not is_square(m), m.flops, m.m, m.n, m.k, m.dtype, m.out, m.precision), []).append(m)
    return tuple(
        Group(
            tuple(sorted((m for m in same if m.kernel in order), key=lambda m: order[m.kernel])),
            tuple(m for m in same if m.kernel not in order),
        )
        for _, same in sorted(problems.items())
    )


def largest(problems: Sequence[Group]) -> Group:
    """Return the group with the most operations, of squares if there are any: the one a summary is about."""
    squares = [group for group in problems if is_square(group.first)]
    return max(squares or problems, key=lambda group: group.first.flops)


def fullest(problems: Sequence[Group]) -> Group:
    """Return the group in which most rungs ran, and the largest of these: it shows the whole ladder."""
    return max(problems, key=lambda group: (sum(m.seconds > 0 for m in group.rungs), group.first.flops))


def is_square(measurement: Measurement) -> bool:
    """Return True for one product of squares, unless it shows the use that one rung is meant for."""
    return measurement.m == measurement.n == measurement.k and measurement.batch == 1 and not measurement.case


def speedup(measurement: Measurement, rival: str | None, group: Group) -> tuple[float, float] | None:
    """Return (speed-up over `rival`, spread): the ratio of the rates that a table shows of both.

    The spread is that of pairs of measurements, and reaches at least to the median of their ratios.
    """
    if not rival or not measurement.seconds or measurement.kernel == rival:
        return None
    paired, spread = measurement.versus.get(rival), measurement.spread.get(rival, 0.0)
    same = sorted((m for m in group.all if m.kernel == rival), key=lambda m: m.threads != measurement.threads)
    if not same:
        return (paired, spread) if paired else None
    ratio = same[0].seconds / measurement.seconds
    reach = abs(ratio - paired) if paired else 0.0
    return ratio, max(spread, reach, measurement.spread.get(ANY, 0.0) * ratio)


def gain(measurement: Measurement, rival: str | None, group: Group) -> str:
    """Return the speed-up over a rival or a parent as text, "" where there is none."""
    return numerals.times(*(speedup(measurement, rival, group) or (None,)))


def gains(rungs: Sequence[Rung], problems: Sequence[Group]) -> dict[str, str]:
    """Return the gain of each rung over its parent as text, in the problem that most of them ran."""
    group = fullest(problems)
    own = {m.kernel: m for m in group.rungs}
    return {rung.name: gain(own[rung.name], rung.parent, group) for rung in rungs if rung.name in own}


def rival(group: Group) -> str:
    """Return the rival to compare with: the first that ran, else one that could not."""
    names = [m.kernel for m in group.rivals if m.seconds] + [m.kernel for m in group.rivals]
    return names[0] if names else "cublas" if group.first.unit else "numpy"


def label(measurement: Measurement, group: Group) -> str:
    """Return the name of a rung or a rival; with the threads if the rival ran with several numbers of them."""
    same = {m.threads for m in group.rivals if m.kernel == measurement.kernel}
    name = words.versioned(measurement.kernel, [measurement])
    return name + (f", {words.cores(measurement.threads)}" if len(same) > 1 else "")


def doubts(run: Run) -> tuple[str, ...]:
    """Return the reasons why the figures of a run are unreliable, one sentence each.

    >>> doubts(run)  # doctest: +SKIP
    ('Other processes used up to 1.7 of the 2 cores during the measurement.',)
    """
    busy = max((m.load for m in run.measurements), default=0.0)
    reasons = []
    if busy > load.limit(run.machine.cores):
        there = numerals.plural(run.machine.cores, "core")
        reasons.append(f"Other processes used up to {busy:.1f} of the {there} during the measurement.")
    peaks = {(m.dtype, m.threads): m for m in run.measurements if m.peak_gflops and not m.unit}
    for (dtype, threads), m in sorted(peaks.items()):
        fewer = [peak for (name, count), peak in peaks.items() if name == dtype and count < threads]
        higher = max(fewer, key=lambda peak: peak.peak_gflops, default=m)
        if m.peak_gflops < SHARED * higher.peak_gflops:
            own, other = (
                f"{words.cores(peak.threads)}, {numerals.digits(peak.peak_gflops)} {words.rate(peak)}"
                for peak in (m, higher)
            )
            reasons.append(f"The measured {dtype} peak of {own}, is below that of {other}: impossible.")
    return tuple(reasons)


def banner(run: Run) -> str:
    """Return the warning to show with unreliable figures, "" for reliable ones."""
    reasons = doubts(run)
    if not reasons:
        return ""
    return f"Unreliable figures: {' '.join(reasons)} Ratios are shown as ranges. Measure again on an idle machine."


def weighed(run: Run) -> Run:
    """Return the run with a wide spread of all ratios if the figures are unreliable."""
    if not doubts(run):
        return run

    def wide(m: Measurement) -> dict[str, float]:
        return {ANY: BUSY, **{name: max(m.spread.get(name, 0.0), BUSY * ratio) for name, ratio in m.versus.items()}}

    return replace(run, measurements=tuple(replace(m, spread=wide(m)) for m in run.measurements))
