"""The rungs at one size: built, checked and timed on the same operands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from gemmery.lab.session import CpuSession
from gemmery.ladder.rung import Kernel, Rung

PILOT = 128  # the side at which a rung's time at its first size is predicted
BATCHED = 16  # side of the products of a batch
MEANT = {
    "direct": (64, 64, 64),
    "streamed": (8, 2048, 2048),
}  # where rungs that lose on large squares are meant to be used
SHARE = 2.0  # seconds for one comparison: 60 rounds of two contestants up to 10 ms each
THREADED_SHARE = 4.0  # the same if each turn begins with a quarter of a second of rest


@dataclass(frozen=True)
class Ready:
    """A rung built for a problem, with its operands."""

    kernel: Kernel
    a: View
    b: View
    c: View
    threads: int

    def run(self) -> None:
        """Run one product."""
        self.kernel(self.a, self.b, self.c, threads=self.threads)


class Level:
    """The rungs at one size, which share operands, NumPy's processes and the measurements so far."""

    def __init__(
        self, session: CpuSession, suite: str, work: Work, threads: int, seconds: float, ladder: Sequence[Rung]
    ) -> None:
        self.session, self.suite, self.work = session, suite, work
        self.threads, self.seconds = threads, seconds
        self._ladder = {rung.name: rung for rung in ladder}
        self._operands = operands(work)
        self._ready: dict[str, Ready] = {}
        self._times: dict[str, float] = {}
        self._numpy: dict[int, Timing] = {}  # by threads
        self._runs: dict[int, str] = {}

    def measure(self, rung: Rung, config: Mapping[str, int], before: Measurement | None) -> Measurement:
        """Check a rung and time it in turn with NumPy and its parent, or record why it does not run.

        `before` is its record for a smaller product.
        """
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
        """NumPy's records at this size, one for each number of threads."""
        made = []
        for threads, found in self._numpy.items():
            plain = results.blank(self.suite, "numpy", self.work, threads, note=self._runs[threads])
            made.append(results.timed(plain, found, self.session.limits(self.work.dtype, threads)))
        return made

    def _too_slow(self, rung: Rung, config: Mapping[str, int], before: Measurement | None) -> str:
        """The reason not to run if one call would exceed the limit, predicted from the rate at a smaller size."""
        flops = self.work.problem.flops
        if before is not None:
            predicted = before.seconds * flops / before.flops
        else:
            small = suited(rung, PILOT, self.work.dtype)
            if flops <= small.problem.flops:
                return ""
            predicted = once(prepare(rung, config, operands(small), 1)) * flops / small.problem.flops
        return results.too_slow(predicted, self.seconds)

    def _error(self, rung: Rung, ready: Ready) -> float:
        """Error over bound of one product, written over NaN (ones for integers) so that unwritten elements show."""
        a, b, c = self._operands
        c.fill(np.nan if dtypes.get(self.work.out).kind in "fc" else 1)
        ready.run()
        return results.error(c, a, b, rung.bound, rung.normwise)

    def _compare(self, rung: Rung, ready: Ready) -> Comparison:
        """Time the rung, NumPy, and the rung's parent if it is fast enough to take turns."""
        threads = ready.threads
        numpy = self.session.rival("numpy", threads)
        numpy.prepare(self.work)
        contestants = [Contestant(rung.name, timing.calls(ready.run)), numpy.contestant]
        parent = self._parent(rung)
        if parent is not None:
            contestants.append(Contestant(rung.parent or "", timing.calls(parent.run)))
        share, rest = (THREADED_SHARE, timing.IDLE_SECONDS) if threads > 1 else (SHARE, 0.0)
        found = timing.compare(contestants, share, rest)
        known = self._numpy.get(threads)
        if known is None or found.timings["numpy"].samples > known.samples:
            self._numpy[threads], self._runs[threads] = found.timings["numpy"], numpy.runs
        return found

    def _parent(self, rung: Rung) -> Ready | None:
        """The rung's parent, ready to take turns; None if it is too slow for that or does not run this product.

        For a product that is not a square of the ladder, the parent is built here.
        """
        row = self._ladder.get(rung.parent or "")
        if row is None or refusal(row, self.work):
            return None
        if row.name not in self._ready:
            if self.work == square(self.work.n, self.work.dtype):
                return None
            self._ready[row.name] = prepare(row, row.default, self._operands, 1)
            self._times[row.name] = once(self._ready[row.name])
        return self._ready[row.name] if self._times[row.name] < SHARE / 10 else None

    def _with_parent(self, rung: Rung, found: Comparison) -> dict[str, Ratio]:
        """The ratios of a comparison; the ratio to a slow parent comes from the medians, and counts as one pair."""
        parent = rung.parent or ""
        if parent in found.versus or parent not in self._times:
            return found.versus
        ratio = self._times[parent] / found.timings[rung.name].seconds
        return {**found.versus, parent: Ratio(ratio, ratio / 2, 1)}


def refusal(rung: Rung, work: Work) -> str:
    """Return the reason why the rung does not run this product, "" if it does."""
    if work.dtype not in rung.dtypes:
        return f"it is written for {', '.join(rung.dtypes)}, not {work.dtype}"
    return rung.refuses(work.problem)


def prepare(rung: Rung, config: Mapping[str, int], given: tuple[Any, Any, Any], threads: int) -> Ready:
    """Build a rung for the operands (a, b, c)."""
    a, b, c = (arrays.view(x if x.ndim == 3 else x[None]) for x in given)
    problem = Work(c.shape[1], c.shape[2], a.shape[2], a.dtype, c.dtype, c.shape[0]).problem
    return Ready(rung.build(problem, config), a, b, c, threads)


def once(ready: Ready) -> float:
    """Return the seconds of one product, after one that compiles."""
    ready.run()
    start = time.perf_counter()
    ready.run()
    return time.perf_counter() - start


def square(n: int, dtype: str) -> Work:
    """Return the product of two squares of side n."""
    return Work(n, n, n, dtype, dtype)


def suited(rung: Rung, n: int, dtype: str) -> Work:
    """Return the product that shows a rung at size n: two squares; a row and a square for a rung that takes vectors; as
    many small products as fill squares of side n for a rung that takes batches.
    """
    many = Work(BATCHED, BATCHED, BATCHED, dtype, dtype, batch=max(1, n // BATCHED) ** 2)
    for work in (square(n, dtype), Work(1, n, n, dtype, dtype), many):
        if not refusal(rung, work):
            return work
    return square(n, dtype)


def meant(rung: Rung, dtype: str) -> Work | None:
    """Return the product that a rung is meant for unless that is a large square; None for other rungs."""
    shape = MEANT.get(rung.name)
    return Work(*shape, dtype, dtype, name="meant for it") if shape else None


def is_threaded(rung: Rung) -> bool:
    """Return True for a rung that runs on more than one core."""
    return rung.name.endswith("_threaded")
