"""The rungs at one size on a device: built, checked and timed on the same operands as cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gemmery.bench import timing
from gemmery.bench.record import Measurement
from gemmery.bench.replays import Put
from gemmery.bench.resident import Resident
from gemmery.bench.timing import Contestant, Ratio, Sample, Timing
from gemmery.bench.work import Work
from gemmery.errors import RefusedError
from gemmery.lab import results
from gemmery.lab.gpu import check
from gemmery.lab.gpu.session import NO_RIVAL, GpuSession
from gemmery.ladder.rung import Rung

PILOT = 512  # the side at which a rung's time at its first size is predicted; it fills a device
SMALL = 16  # a side that every rung for matrices takes
SHARE = 0.6  # seconds for one comparison of a rung, cuBLAS and the rung's parent
SLOW_PARENT = 0.05  # seconds per call from which a parent takes no turns


class GpuLevel:
    """The rungs on one product, which share operands, the rival and the measurements so far."""

    def __init__(self, session: GpuSession, suite: str, work: Work, seconds: float, ladder: Sequence[Rung]) -> None:
        self.session, self.suite, self.work, self.seconds = session, suite, work, seconds
        self._ladder = {rung.name: rung for rung in ladder}
        self._resident = session.resident(work)
        self._samples: dict[str, Sample] = {}
        self._times: dict[str, float] = {}
        self._rival: Contestant | None = None
        self._rivals: dict[str, Measurement] = {}
        self._place_rival()

    def measure(self, rung: Rung, config: Mapping[str, int], before: Measurement | None) -> Measurement:
        """Check a rung and time it in turn with cuBLAS and its parent, or record why it does not run.

        `before` is its record for a smaller product.
        """
        full = {**rung.default, **config}
        plain = self.session.blank(self.suite, rung.name, self.work, config=full)
        try:
            put = build(rung, full, self._resident)
            reason = self._too_slow(rung, full, before)
        except RefusedError as refused:
            reason = str(refused)
        if reason:
            return replace(plain, refused=reason)
        error = check.error(self._resident, lambda: put(0), rung.bound)
        own = self._samples[rung.name] = self.session.sampler(put, len(self._resident.sets))
        contestants = [Contestant(rung.name, own), *self._others(rung)]
        self.session.monitor.clock()
        found = timing.compare(contestants, SHARE)
        clock = self.session.monitor.clock()
        self._times[rung.name] = found.timings[rung.name].seconds
        self._keep_rival(rung.name, found.timings, clock)
        versus = self._with_parent(rung, found.versus)
        done = self.session.timed(plain, found.timings[rung.name], self.work, versus, clock)
        return replace(done, error=error, checked=True)

    def rivals(self) -> list[Measurement]:
        """The record of cuBLAS at this size, or the reason why there is none."""
        return list(self._rivals.values())

    def _place_rival(self) -> None:
        installed = self.session.installed()
        if not installed:
            self._rivals["cublas"] = self.session.blank(self.suite, "cublas", self.work, refused=NO_RIVAL)
        for rival in installed:
            try:
                placed = rival.place(self._resident)
                self._rival = Contestant(rival.name, self.session.rival(placed, self._resident))
            except RefusedError as refused:
                self._rivals[rival.name] = self.session.blank(self.suite, rival.name, self.work, refused=str(refused))
                continue
            note = f"{rival.runs()}, {placed.note}"
            self._rivals[rival.name] = self.session.blank(self.suite, rival.name, self.work, note=note)
            return

    def _keep_rival(self, rung: str, timings: Mapping[str, Timing], clock: int) -> None:
        """Keep the rival's times of its turns with the fastest rung: both run at similar power and clocks."""
        name = self._rival.name if self._rival else ""
        if name not in timings:
            return
        if not self._rivals[name].seconds or self._times[rung] == min(self._times.values()):
            self._rivals[name] = self.session.timed(self._rivals[name], timings[name], self.work, clock=clock)

    def _others(self, rung: Rung) -> list[Contestant]:
        """Return the rival, and the parent unless it is too slow to take turns."""
        parent = rung.parent or ""
        self._meet(parent)
        quick = parent in self._samples and self._times[parent] < SLOW_PARENT
        return [
            *([self._rival] if self._rival else []),
            *([Contestant(parent, self._samples[parent])] if quick else []),
        ]

    def _meet(self, parent: str) -> None:
        """Build the parent for a product that is not square, if it was measured on squares only."""
        rung = self._ladder.get(parent)
        if rung is None or parent in self._samples or self.work.m == self.work.n:
            return
        try:
            put = build(rung, rung.default, self._resident)
        except RefusedError:
            return
        sample = self.session.sampler(put, len(self._resident.sets))
        self._samples[parent], self._times[parent] = sample, sample(1, 1) / 1e9

    def _too_slow(self, rung: Rung, config: Mapping[str, int], before: Measurement | None) -> str:
        """The reason not to run if one call would exceed the limit, predicted from the rate at a smaller size."""
        flops, small = self.work.problem.flops, suited(rung, PILOT, self.work, self.session.device)
        if flops <= small.problem.flops:
            return ""
        if before is not None and before.flops >= small.problem.flops:
            predicted = before.seconds * flops / before.flops
        else:
            resident = self.session.resident(small)
            sample = self.session.sampler(build(rung, config, resident), len(resident.sets))
            predicted = sample(1, 1) / 1e9 * flops / small.problem.flops
        return results.too_slow(predicted, self.seconds)

    def _with_parent(self, rung: Rung, versus: Mapping[str, Ratio]) -> Mapping[str, Ratio]:
        """The ratios of a comparison; the ratio to a slow parent comes from the medians, and counts as one pair."""
        parent = rung.parent or ""
        if parent in versus or parent not in self._times:
            return versus
        ratio = self._times[parent] / self._times[rung.name]
        return {**versus, parent: Ratio(ratio, ratio / 2, 1)}


def build(rung: Rung, config: Mapping[str, int], resident: Resident) -> Put:
    """Return what launches the rung on the operands of `resident`.

    Raises RefusedError with the reason if it does not take them or the device cannot run it.
    """
    problem = resident.problem
    if problem.dtype not in rung.dtypes:
        raise RefusedError(f"it is written for {', '.join(rung.dtypes)}, not {problem.dtype}")
    reason = rung.refuses(problem)
    if reason:
        raise RefusedError(reason)
    kernel, sets = rung.build(problem, config), resident.sets

    def put(index: int) -> None:
        one = sets[index]
        kernel(one.a, one.b, one.c)

    return put


def suited(rung: Rung, n: int, like: Work, device: str) -> Work:
    """Return the product that shows a rung at size n: two squares, or x W' for a rung that refuses small squares."""
    square, small = (replace(like, m=side, n=side, k=side) for side in (n, SMALL))
    vector = replace(square, m=1, b_layout="col")
    refuses_squares = rung.refuses(small.problem._replace(device=device))
    return vector if refuses_squares and not rung.refuses(vector.problem._replace(device=device)) else square
