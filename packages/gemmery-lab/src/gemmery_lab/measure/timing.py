"""The timing protocol: contestants take turns in one run, and ratios are computed pair by pair.

A machine's speed drifts (clocks, other processes) by more than the differences of interest. Two contestants measured
in the same round, moments apart, drift together. So each round yields one ratio, and the report gives the median of
the ratios with half their interquartile range. A smaller difference is a tie.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from timeit import Timer
from typing import TypeVar

from gemmery.errors import ArgumentError

SAMPLE_NS = 5_000_000  # a sample repeats calls until it lasts this long; reading the clock takes < 0.1 us
LONG_CALL_NS = 50_000_000  # a call this long needs no untimed call before it: its first milliseconds hardly count
MAX_INNER = 1 << 20
MIN_ROUNDS, MAX_ROUNDS = 3, 60  # fewer than three ratios have no quartiles
IDLE_SECONDS = 0.25  # idle workers of a threaded BLAS spin for up to 200 ms before they sleep

Sample = Callable[[int, int], int]
"""(inner, warm) -> nanoseconds that `inner` calls took, after `warm` calls outside the clock."""
Pause = Callable[[float], None]  # waits for so many seconds
Draw = random.Random | None  # what draws the order of turns


@dataclass(frozen=True)
class Contestant:
    """Something that can run its product any number of times and return how long that took."""

    name: str
    sample: Sample


@dataclass(frozen=True)
class Timing:
    """Seconds per call over all samples of one contestant."""

    seconds: float  # median
    best: float
    p95: float
    samples: int


@dataclass(frozen=True)
class Ratio:
    """Time of a rival divided by the time of the first contestant: above 1 if the first is faster."""

    median: float
    spread: float  # half the interquartile range over the rounds
    pairs: int


@dataclass(frozen=True)
class Comparison:
    """Results of `compare`: a timing for each contestant, and a ratio for all but the first."""

    timings: dict[str, Timing]
    versus: dict[str, Ratio]
    seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict, repr=False)  # by name and round

    def ratios(self, name: str) -> dict[str, Ratio]:
        """Return the ratios of all other contestants to the one called `name`."""
        return {rival: _ratio(self.seconds[name], rounds) for rival, rounds in self.seconds.items() if rival != name}


def calls(function: Callable[[], object]) -> Sample:
    """Return a sampler of `function()`."""
    return expression("function()", {"function": function})


def products(function: Callable[..., object], a: object, b: object, c: object | None) -> Sample:
    """Return a sampler of `function(a, b, out=c)`, or of `function(a, b)` if `c` is None, including call overhead.

    The loop contains the call as a user would write it: a closure costs 20 ns, a product of 4x4 matrices 130 ns.
    """
    call = "function(a, b)" if c is None else "function(a, b, out=c)"
    return expression(call, {"function": function, "a": a, "b": b, "c": c})


def expression(text: str, names: Mapping[str, object]) -> Sample:
    """Return a sampler of a Python expression, written into the loop as a user would write it; `names` are its names.

    The garbage collector is off in the loop.

    >>> expression("len(x)", {"x": [1, 2]})(10, 1) > 0
    True
    """
    timer = Timer(text, timer=time.perf_counter_ns, globals={**names})

    def sample(inner: int, warm: int) -> int:
        if warm:
            timer.timeit(warm)
        return int(timer.timeit(inner))

    return sample


@dataclass(frozen=True)
class _Plan:
    """How one contestant is sampled, and in how many rounds."""

    inner: int
    warm: int
    rounds: int
    first: float | None  # seconds of the calibrating call, kept if there is no time for another


def _plan(sample: Sample, share_ns: float, rest_ns: float) -> _Plan:
    """Calibrate: repetitions until a sample lasts SAMPLE_NS, rounds until they fill `share_ns`."""
    elapsed = sample(1, 0)  # the first call also compiles, loads and touches pages
    if elapsed > share_ns:
        return _Plan(1, 0, 1, elapsed / 1e9)
    inner = 1
    elapsed = sample(1, 0)
    while elapsed < SAMPLE_NS and inner < MAX_INNER:
        enough = -(-inner * SAMPLE_NS // max(elapsed, 1))
        inner = min(max(enough, 2 * inner), 16 * inner, MAX_INNER)
        elapsed = sample(inner, 0)
    each = max(elapsed, 1) / inner
    warm = 0 if each >= LONG_CALL_NS else max(1, inner // 8)
    turn = (inner + warm) * each + rest_ns
    return _Plan(inner, warm, min(max(int(share_ns / turn), MIN_ROUNDS), MAX_ROUNDS), None)


def _rounds(
    contestants: Sequence[Contestant], plans: Mapping[str, _Plan], rest: float, pause: Pause, draw: Draw
) -> dict[str, dict[int, float]]:
    """Seconds per call, by contestant and round."""
    rounds = plans[contestants[0].name].rounds
    seconds: dict[str, dict[int, float]] = {contestant.name: {} for contestant in contestants}
    for index in range(rounds):
        shift = index % len(contestants)
        order = [*contestants[shift:], *contestants[:shift]]
        for contestant in draw.sample(order, len(order)) if draw else order:
            plan = plans[contestant.name]
            turns = min(plan.rounds, rounds)  # evenly spread over the rounds, including the first
            if index and index * turns // rounds == (index - 1) * turns // rounds:
                continue
            if plan.first is not None:
                seconds[contestant.name][index] = plan.first
                continue
            pause(rest)
            elapsed = max(contestant.sample(plan.inner, plan.warm), 1)
            seconds[contestant.name][index] = elapsed / plan.inner / 1e9
    return seconds


def _ratio(first: Mapping[int, float], rival: Mapping[int, float]) -> Ratio:
    """The median ratio over the rounds in which both ran."""
    ratios = [rival[index] / first[index] for index in rival if index in first]
    median = statistics.median(ratios)
    if len(ratios) < 3:
        return Ratio(median, median / 2, len(ratios))  # too few for a spread: only a factor of two counts
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, (high - low) / 2, len(ratios))


def compare(
    contestants: Sequence[Contestant], seconds: float, rest: float = 0.0, pause: Pause = time.sleep, draw: Draw = None
) -> Comparison:
    """Time the contestants in turn for about `seconds`, and compare the first with each of the others.

    Each round runs each contestant once, and rotates their order by one, or draws it by `draw`. The first takes part
    in every round; a slow rival takes part in fewer, evenly spaced, but at least once. `rest` is a pause in seconds
    before each turn: IDLE_SECONDS if there is more than one thread.

    >>> a, b = Contestant("a", lambda inner, warm: 1000 * inner), Contestant("b", lambda inner, warm: 2000 * inner)
    >>> compare([a, b], seconds=0.1).versus["b"].median
    2.0

    Raises ArgumentError for no contestants, two with the same name, or `seconds` that is not positive.
    """
    names = [contestant.name for contestant in contestants]
    if not names or len(set(names)) < len(names):
        raise ArgumentError(f"contestants {names}: give at least one, each with its own name")
    if not seconds > 0:
        raise ArgumentError(f"seconds={seconds}: the time for a comparison must be above 0")
    share_ns = seconds * 1e9 / len(contestants)
    plans = {}
    for contestant in contestants:
        pause(rest)
        plans[contestant.name] = _plan(contestant.sample, share_ns, rest * 1e9)
    return tally(_rounds(contestants, plans, rest, pause, draw))


def tally(seconds: Mapping[str, Mapping[int, float]]) -> Comparison:
    """Return the statistics of times per call, by contestant and round; ratios are to the first contestant.

    >>> tally({"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 4.0}}).versus["b"].median
    2.0
    """
    timings = {}
    for name, rounds in seconds.items():
        samples = list(rounds.values())
        p95 = statistics.quantiles(samples, n=20, method="inclusive")[-1] if len(samples) > 1 else samples[0]
        timings[name] = Timing(statistics.median(samples), min(samples), p95, len(samples))
    first, *others = seconds
    return Comparison(timings, {name: _ratio(seconds[first], seconds[name]) for name in others}, seconds)


@dataclass(frozen=True)
class Rival:
    """A library to compare with: its name, why it cannot run here, and what it is."""

    name: str
    missing: Callable[[], str]  # "" or why it cannot run here
    describe: Callable[[], str]

    @property
    def runs(self) -> str:
        """The library, its version and its kernels."""
        return self.describe()


R = TypeVar("R", bound=Rival)


def by_name(rivals: Sequence[R], name: str, where: str = "") -> R:
    """Return the rival called `name`. Raises ArgumentError for an unknown one; `where` is " on a GPU"."""
    for rival in rivals:
        if rival.name == name:
            return rival
    known = ", ".join(rival.name for rival in rivals)
    raise ArgumentError(f"rival {name!r} is not known{where}; known: {known}")


def not_found(package: str) -> str:
    """Return "" for a package that is installed, else why there is no rival."""
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"
