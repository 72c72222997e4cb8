"""Contestants on a GPU without rests between their turns, as in training: power decides their speed there."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from gemmery.bench import timing
from gemmery.bench.timing import Contestant
from gemmery.cuda.nvml import Monitor
from gemmery.lab.backend import TURNS, Race

BURST = 0.025  # seconds of a sample, in the middle of which clock and power are read
SETTLING = 1 / 3  # of a turn that does not count: the power is still that of the contestant before


def race(
    contestants: Sequence[Contestant],
    monitor: Monitor,
    turn: float,
    rounds: int = TURNS,
    now: Callable[[], float] = time.monotonic,
) -> Race:
    """Let contestants take turns of `turn` seconds, in an order drawn in each round; the start of each does not count.

    The first turn heats the device up and is not counted either.
    """
    inner = {each.name: _calls(each) for each in contestants}
    seconds: dict[str, dict[int, float]] = {each.name: {} for each in contestants}
    watts: dict[str, list[float]] = {each.name: [] for each in contestants}
    clocks: dict[str, list[int]] = {each.name: [] for each in contestants}
    draw = random.Random(0)
    monitor.reads_power = True
    try:
        _turn(contestants[0], inner[contestants[0].name], turn, monitor, now)
        for index in range(rounds):
            for each in draw.sample(list(contestants), len(contestants)):
                seconds[each.name][index] = _turn(each, inner[each.name], turn, monitor, now)
                watts[each.name].append(monitor.power())
                clocks[each.name].append(monitor.clock())
    finally:
        monitor.reads_power = False
    return Race(
        timing.tally(seconds),
        {name: round(statistics.fmean(values), 1) for name, values in watts.items()},
        {name: round(statistics.median(values)) for name, values in clocks.items()},
    )


def _calls(contestant: Contestant) -> int:
    """Return the calls that take about BURST seconds."""
    each = contestant.sample(4, 1) / 4e9
    return max(1, round(BURST / max(each, 1e-7)))


def _turn(contestant: Contestant, inner: int, turn: float, monitor: Monitor, now: Callable[[], float]) -> float:
    """Return the seconds of a call in a turn after its beginning, during which clock and power are recorded."""
    start, total, count = now(), 0, 0
    counts = False
    while now() - start < turn:
        if not counts and now() - start >= turn * SETTLING:
            counts = True
            monitor.forget()
        elapsed = contestant.sample(inner, 0)
        if counts:
            total, count = total + elapsed, count + inner
    if not count:  # a call longer than most of the turn
        total, count = contestant.sample(inner, 0), inner
    return total / count / 1e9
