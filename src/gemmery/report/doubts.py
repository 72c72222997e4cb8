"""Unreliable figures: measured on a busy machine, or contradicting each other."""

from __future__ import annotations

from dataclasses import replace

from gemmery.bench import load
from gemmery.bench.record import Measurement, Run
from gemmery.report import words

ANY = "*"  # among the spreads of a record: the spread of every ratio, as a share of it
BUSY = 0.25  # share of a ratio by which it varies at least where the figures are unreliable
SHARED = 0.98  # two threads may share one core, so their peak may be this much of the peak of one


def doubts(run: Run) -> tuple[str, ...]:
    """Return the reasons why the figures of a run are unreliable, one sentence each.

    >>> doubts(run)  # doctest: +SKIP
    ('Other processes used up to 1.7 of the 2 cores during the measurement.',)
    """
    busy = max((m.load for m in run.measurements), default=0.0)
    reasons = []
    if busy > load.limit(run.machine.cores):
        there = words.plural(run.machine.cores, "core")
        reasons.append(f"Other processes used up to {busy:.1f} of the {there} during the measurement.")
    peaks = {(m.dtype, m.threads): m for m in run.measurements if m.peak_gflops and not m.unit}
    for (dtype, threads), m in sorted(peaks.items()):
        fewer = [peak for (name, count), peak in peaks.items() if name == dtype and count < threads]
        higher = max(fewer, key=lambda peak: peak.peak_gflops, default=m)
        if m.peak_gflops < SHARED * higher.peak_gflops:
            own, other = (
                f"{words.cores(peak.threads)}, {words.digits(peak.peak_gflops)} {words.rate(peak)}"
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
