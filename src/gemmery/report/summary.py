"""A ladder in one line: the fastest rung, how it compares with the fastest rival, and the largest step."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.bench.record import Measurement, Run
from gemmery.ladder.rung import Rung
from gemmery.report import words
from gemmery.report.doubts import ANY, doubts
from gemmery.report.sheet import Group, is_square, largest, named, speedup
from gemmery.report.tables import ladder_groups


def over_fastest(measurement: Measurement, group: Group) -> tuple[Measurement, tuple[float, float]] | None:
    """Return the fastest rival of a problem and (speed-up over it, spread); None if no rival ran.

    A rival that ran with several numbers of threads may be faster with fewer of them. Then the medians are compared,
    and the spread is the one of the turns that the rung and the rival took with the same number of threads.
    """
    ran = [m for m in group.rivals if m.seconds]
    if not ran or not measurement.seconds:
        return None
    fastest = min(ran, key=lambda m: m.seconds)
    spread = measurement.spread.get(fastest.kernel, measurement.spread.get(ANY, 0.0))
    if fastest.threads == measurement.threads and fastest.kernel in measurement.versus:
        return fastest, (measurement.versus[fastest.kernel], spread)
    return fastest, (fastest.seconds / measurement.seconds, spread)


def summary(run: Run, rungs: Sequence[Rung]) -> str:
    """Return the largest square of a ladder in one line; "" for other runs and for unreliable figures.

    >>> summary(run, CPU)  # doctest: +SKIP
    'n = 2048, f32: packed_threaded reaches 351 GFLOP/s, 78.0% of the peak, 0.94× NumPy; largest step: packed, 7.5×'
    """
    found = [g for g in ladder_groups(run, rungs) if is_square(g.one)]
    ran = [m for m in largest(found).rungs if m.seconds] if found else []
    if not ran or doubts(run):
        return ""
    group, by_name = largest(found), {rung.name: rung for rung in rungs}
    best = max(ran, key=lambda m: m.gflops)
    said = f"{words.shape(best)}, {words.types(best)}: {best.kernel} reaches "
    said += f"{words.digits(words.reached(best))} {words.rate(best)}"
    if part := words.share(best):
        said += f", {words.percent(part)} of the peak"
    if headline := over_fastest(best, group):
        said += f", {words.times(*headline[1])} {named(headline[0], group)}"
    steps = [(over[0], m) for m in ran if (over := speedup(m, by_name[m.kernel].parent or "", group))]
    if steps:
        gain, m = max(steps, key=lambda step: step[0])
        said += f"; largest step: {m.kernel}, {words.times(gain)} {by_name[m.kernel].parent}"
    return said
