"""The rungs at one size: built, checked and timed on the same operands."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.arrays import View
from gemmery.bench import timing
from gemmery.bench.record import Measurement
from gemmery.bench.timing import Comparison, Contestant, Ratio, Timing
from gemmery.bench.work import Work, operands
from gemmery.lab import results
from gemmery.lab.session import Session
from gemmery.ladder.rung import Kernel, Rung

PILOT = 128  # the size whose time predicts that of a rung at its first size
SHARE = 2.0  # seconds for one comparison: 60 rounds of two contestants up to 10 ms each


def is_threaded(rung: Rung) -> bool:
    """True for a rung that runs on more than one core."""
    return rung.name.endswith("_threaded")


@dataclass(frozen=True)
class Ready:
    """A rung built for a problem, on operands of its own."""

    kernel: Kernel
    a: View
    b: View
    c: View
    threads: int

    def run(self) -> None:
        """One product."""
        self.kernel(self.a, self.b, self.c, threads=self.threads)


class Level:
    """The rungs at one size: they share operands, NumPy's processes, and what was measured so far."""

    def __init__(self, session: Session, suite: str, work: Work, threads: int, seconds: float) -> None:
        self.session, self.suite, self.work = session, suite, work
        self.threads, self.seconds = threads, seconds
        self._operands = operands(work)
        self._ready: dict[str, Ready] = {}
        self._times: dict[str, float] = {}
        self._numpy: dict[int, Timing] = {}  # by threads
        self._runs: dict[int, str] = {}

    def measure(self, rung: Rung, config: Mapping[str, int], before: tuple[int, float] | None) -> Measurement:
        """One rung: refused, predicted too slow, or checked and timed beside NumPy and its parent."""
        threads = self.threads if is_threaded(rung) else 1
        full = {**rung.default, **config}
        plain = results.blank(self.suite, rung.name, self.work, threads, config=full)
        reason = refusal(rung, self.work) or self._too_slow(rung, full, before)
        if reason:
            return replace(plain, refused=reason)
        ready = prepare(rung, full, self._operands, threads)
        error = self._error(rung, ready)
        found = self._compare(rung, ready)
        self._ready[rung.name] = ready
        self._times[rung.name] = found.timings[rung.name].seconds
        limits = self.session.limits(self.work.dtype, threads)
        done = results.timed(plain, found.timings[rung.name], limits, self._with_parent(rung, found))
        return replace(done, error=error, checked=True)

    def rivals(self) -> list[Measurement]:
        """NumPy's own records at this size, one for each number of threads it was given."""
        made = []
        for threads, found in self._numpy.items():
            plain = results.blank(self.suite, "numpy", self.work, threads, note=self._runs[threads])
            made.append(results.timed(plain, found, self.session.limits(self.work.dtype, threads)))
        return made

    def _too_slow(self, rung: Rung, config: Mapping[str, int], before: tuple[int, float] | None) -> str:
        """A reason not to run when one call would take longer than the limit, by the time at a smaller size."""
        n, power = self.work.n, 2 if self.work.m == 1 else 3
        if before is None:
            if n <= PILOT:
                return ""
            small = replace(self.work, m=min(self.work.m, PILOT), n=PILOT, k=PILOT)
            before = PILOT, pilot(rung, config, small)
        predicted = before[1] * (n / before[0]) ** power
        if predicted <= self.seconds:
            return ""
        return f"would take about {predicted:.2g} s; --seconds raises the limit of {self.seconds:g} s"

    def _error(self, rung: Rung, ready: Ready) -> float:
        """Error over bound of one product into memory full of NaN (of ones, for integers): none may shine through."""
        a, b, c = self._operands
        c.fill(np.nan if dtypes.get(self.work.out).kind in "fc" else 1)
        ready.run()
        return results.error(c, a, b, rung.bound, rung.normwise)

    def _compare(self, rung: Rung, ready: Ready) -> Comparison:
        """Time the rung, NumPy, and the rung's parent where that is quick enough to take turns."""
        threads = ready.threads
        numpy = self.session.rival("numpy", threads)
        numpy.prepare(self.work)
        contestants = [Contestant(rung.name, timing.calls(ready.run)), numpy.contestant]
        parent = rung.parent or ""
        if self._times.get(parent, SHARE) < SHARE / 10:
            contestants.append(Contestant(parent, timing.calls(self._ready[parent].run)))
        found = timing.compare(contestants, SHARE, timing.IDLE_SECONDS if threads > 1 else 0.0)
        known = self._numpy.get(threads)
        if known is None or found.timings["numpy"].samples > known.samples:
            self._numpy[threads], self._runs[threads] = found.timings["numpy"], numpy.runs
        return found

    def _with_parent(self, rung: Rung, found: Comparison) -> dict[str, Ratio]:
        """The ratios of a comparison, that to a slow parent from the medians: as little as one pair would say."""
        parent = rung.parent or ""
        if parent in found.versus or parent not in self._times:
            return found.versus
        ratio = self._times[parent] / found.timings[rung.name].seconds
        return {**found.versus, parent: Ratio(ratio, ratio / 2, 1)}


def refusal(rung: Rung, work: Work) -> str:
    """Why the rung does not run this product, "" when it does."""
    if work.dtype not in rung.dtypes:
        return f"it is written for {', '.join(rung.dtypes)}, not {work.dtype}"
    return rung.refuses(work.problem)


def prepare(rung: Rung, config: Mapping[str, int], given: tuple[Any, Any, Any], threads: int) -> Ready:
    """Build a rung for the operands (a, b, c)."""
    a, b, c = (arrays.view(x if x.ndim == 3 else x[None]) for x in given)
    problem = Work(c.shape[1], c.shape[2], a.shape[2], a.dtype, c.dtype, c.shape[0]).problem
    return Ready(rung.build(problem, config), a, b, c, threads)


def pilot(rung: Rung, config: Mapping[str, int], work: Work) -> float:
    """Seconds of one product; the first, which compiles, does not count."""
    ready = prepare(rung, config, operands(work), 1)
    ready.run()
    start = time.perf_counter()
    ready.run()
    return time.perf_counter() - start
