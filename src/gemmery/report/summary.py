"""A ladder in one line: the fastest rung, how it compares with the fastest rival, and the largest step."""

from __future__ import annotations

from gemmery.bench.record import Measurement
from gemmery.report import words
from gemmery.report.doubts import doubts
from gemmery.report.problems import Group, is_square, label, largest, speedup
from gemmery.report.tables import Results


def over_fastest(measurement: Measurement, group: Group) -> tuple[Measurement, tuple[float, float]] | None:
    """Return the fastest rival of a problem and (speed-up over it, spread); None if no rival ran.

    A rival that ran with several numbers of threads may be faster with fewer of them. The spread is the one of the
    turns that the rung and the rival took with the same number of threads.
    """
    ran = [m for m in group.rivals if m.seconds]
    if not ran or not measurement.seconds:
        return None
    fastest = min(ran, key=lambda m: m.seconds)
    spread = (speedup(measurement, fastest.kernel, group) or (0.0, 0.0))[1]
    return fastest, (fastest.seconds / measurement.seconds, spread)


def summary(results: Results) -> str:
    """Return the largest square of a ladder in one line; "" for other runs and for unreliable figures.

    >>> summary(results(run, CPU))  # doctest: +SKIP
    'n = 2048, f32: packed_threaded reaches 351 GFLOP/s, 78.0% of the peak, 0.94× NumPy; largest step: packed, 7.5×'
    """
    squares = [group for group in results.problems if is_square(group.first)]
    ran = [m for m in largest(squares).rungs if m.seconds] if squares else []
    if not ran or doubts(results.run):
        return ""
    group, parents = largest(squares), {rung.name: rung.parent or "" for rung in results.rungs}
    best = max(ran, key=lambda m: m.gflops)
    line = f"{words.shape(best)}, {words.types(best)}: {best.kernel} reaches "
    line += f"{words.digits(words.reached(best))} {words.rate(best)}"
    if part := words.share(best):
        line += f", {words.percent(part)} of the peak"
    if over := over_fastest(best, group):
        line += f", {words.times(*over[1])} {label(over[0], group)}"
    if steps := [(gain[0], m) for m in ran if (gain := speedup(m, parents[m.kernel], group))]:
        step, m = max(steps, key=lambda pair: pair[0])
        line += f"; largest step: {m.kernel}, {words.times(step)} {parents[m.kernel]}"
    return line
