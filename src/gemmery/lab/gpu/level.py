"""The rungs at one size on a device: built, checked and timed in turn with cuBLAS on the same operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gemmery.bench import timing
from gemmery.bench.gpu.operands import Resident
from gemmery.bench.gpu.timing import Put
from gemmery.bench.record import Measurement
from gemmery.bench.timing import Contestant, Ratio, Sample, Timing
from gemmery.bench.work import Work
from gemmery.errors import RefusedError
from gemmery.lab import results
from gemmery.lab.gpu import check
from gemmery.lab.gpu.session import NO_RIVAL, GpuSession
from gemmery.ladder.rung import Rung

PILOT = 512  # the side that predicts the time of a rung at its first size: it fills a device
SMALL = 16  # a side that all rungs for matrices take
SHARE = 0.6  # seconds for one comparison of a rung, cuBLAS and the rung's parent
SLOW_PARENT = 0.05  # seconds of a call above which a parent does not take turns


class GpuLevel:
    """The rungs on one product, with common operands, rival and earlier measurements."""

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
        """Run one rung: refused, predicted too slow, or checked and timed in turn with cuBLAS and its parent.

        `before` is its measurement on a smaller product.
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
        self.session.monitor.seen()
        found = timing.compare(contestants, SHARE)
        clock = self.session.monitor.seen()
        self._times[rung.name] = found.timings[rung.name].seconds
        self._keep_rival(rung.name, found.timings, clock)
        versus = self._with_parent(rung, found.versus)
        done = self.session.timed(plain, found.timings[rung.name], self.work, versus, clock)
        return replace(done, error=error, checked=True)

    def rivals(self) -> list[Measurement]:
        """Return cuBLAS's record at this size, or the reason why there is none."""
        return list(self._rivals.values())

    def _place_rival(self) -> None:
        installed = self.session.peers()
        if not installed:
            self._rivals["cublas"] = self.session.blank(self.suite, "cublas", self.work, refused=NO_RIVAL)
        for peer in installed:
            try:
                placed = peer.place(self._resident)
                self._rival = Contestant(peer.name, self.session.rival(placed, self._resident))
            except RefusedError as refused:
                self._rivals[peer.name] = self.session.blank(self.suite, peer.name, self.work, refused=str(refused))
                continue
            note = f"{peer.runs()}, {placed.note}"
            self._rivals[peer.name] = self.session.blank(self.suite, peer.name, self.work, note=note)
            return

    def _keep_rival(self, rung: str, timings: Mapping[str, Timing], clock: int) -> None:
        """Return the rival's times from its turns with the fastest rung: at similar power, clocks are similar."""
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
        """Return the parent, built here if the product is not square and the parent was measured only on squares."""
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
        """Return a reason not to run if, by the rate at a smaller size, one call would exceed the limit."""
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
        """Return the ratios of a comparison; that to a slow parent is of medians, which is as good as a single pair."""
        parent = rung.parent or ""
        if parent in versus or parent not in self._times:
            return versus
        ratio = self._times[parent] / self._times[rung.name]
        return {**versus, parent: Ratio(ratio, ratio / 2, 1)}


def build(rung: Rung, config: Mapping[str, int], resident: Resident) -> Put:
    """Return the rung on the operands of `resident`.

    Raises RefusedError with the reason if it does not take them, or the device cannot run it.
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
    """Return the product for a rung at size n: two squares, or x W' for a rung that refuses even small squares."""
    square, small = (replace(like, m=side, n=side, k=side) for side in (n, SMALL))
    vector = replace(square, m=1, b_layout="col")
    refuses_squares = rung.refuses(replace(small.problem, device=device))
    return vector if refuses_squares and not rung.refuses(replace(vector.problem, device=device)) else square
