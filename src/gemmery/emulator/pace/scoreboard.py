"""When the registers of a warp are there: the time of one warp that never waits for a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemmery.emulator.pace.demand import WarpDemand

Numbered = tuple[int, WarpDemand]  # with the instruction's number


class Scoreboard:
    """Follows one warp, basic block by basic block.

    Instructions begin as soon as their operands are there, because ptxas arranges them so, across forward branches too.
    They do not move to an earlier turn of a loop, and not across a barrier.
    """

    def __init__(self, latencies: Mapping[str, float]) -> None:
        self._latencies = latencies
        self._ready: dict[str, float] = {}
        self._now = self._horizon = self._since = self._copies = 0.0
        self._groups: list[float] = []  # when the copies of each group of cp.async are there
        self.waits: dict[int, float] = {}  # clocks that the warp waits at an instruction

    def follow(self, demands: Sequence[Numbered], missed: Mapping[int, str], looped: bool) -> bool:
        """Execute a basic block, and return whether it ends at a barrier.

        `missed` names the cache where the latest access of an instruction ended, if not in L1; `looped` says that the
        block begins a new turn of a loop.
        """
        ready, latencies, barrier = self._ready, self._latencies, False
        if looped:
            self._now = self._horizon
        start, horizon = self._now, self._horizon
        for index, demand in demands:
            begin = start
            for name in demand.reads:
                there = ready.get(name, 0.0)
                if there > begin:
                    begin = there
            if 0 <= demand.waits < len(self._groups):
                complete = len(self._groups) - demand.waits
                begin = start = max(begin, *self._groups[:complete])
                del self._groups[:complete]
            end = begin + latencies[missed.get(index, "l1") if demand.latency == "global" else demand.latency]
            for name in demand.writes:
                ready[name] = end
            match demand.role:
                case "copy":
                    self._copies = max(self._copies, begin + latencies["l2"])
                case "commit":
                    self._groups.append(self._copies)
                case "barrier":
                    barrier = True
                case "branch":
                    start = max(start, begin)
            if begin > horizon:
                self.waits[index] = self.waits.get(index, 0.0) + begin - horizon
                horizon = begin
        self._horizon = horizon
        self._now = horizon + latencies["barrier"] if barrier else start
        return barrier

    def since_barrier(self) -> float:
        """Return the clocks since the latest barrier, and begin to count anew."""
        self._horizon = max(self._horizon, self._now)
        clocks, self._since = self._horizon - self._since, self._horizon
        return clocks

    def end(self) -> None:
        """Wait for all results."""
        self._horizon = max(self._horizon, max(self._ready.values(), default=0.0))
