"""A clock for each warp: where it runs, what it waits for, and when what it waits for is there.

Each unit of a multiprocessor serves what warps ask of it in the order of their clocks; pipes are those of a quadrant,
memory that of all. A warp goes on when its instructions have been issued; at a wait, when what it waits for is there:
registers, its own copies or products, all warps of a barrier, or the arrivals and bytes of a phase of an mbarrier.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemmery_emulator.pace.profile import ProfilePart

ClockKey = tuple[object, ...]  # of a barrier's round, or a phase of an mbarrier
Asked = tuple[tuple[int, float], ...]  # units of a multiprocessor, and clocks of each
QUARTERS = 4
FEW = 8  # registers of a warp; of more, those that are there are forgotten


@dataclass(frozen=True, slots=True)
class StepRuns:
    """A warp executes a part; `asks` are clocks of units besides those of its instructions."""

    part: ProfilePart
    units: Asked  # of its instructions
    asks: Asked
    tensor: float  # clocks of the tensor cores of a quadrant, of products that go on while the warp does
    copies: bool  # whether it starts cp.async
    commits: tuple[str, ...]  # what it commits, of "wgmma", "bulk" and "copy"
    follows: bool  # whether it begins after all instructions before, as in a new turn of a loop


@dataclass(frozen=True, slots=True)
class Arrives:
    """A warp arrives, and goes on."""

    key: ClockKey
    after: float = 0.0  # clocks until others see it


@dataclass(frozen=True, slots=True)
class Awaits:
    """A warp waits for all arrivals of a key."""

    key: ClockKey
    what: str
    index: int  # of the instruction


@dataclass(frozen=True, slots=True)
class BulkCopies:
    """A warp starts a bulk copy: to shared memory, whose bytes arrive at keys, or from there if it has none."""

    keys: tuple[ClockKey, ...]
    bytes: float
    index: int


ClockEvent = StepRuns | Arrives | Awaits | BulkCopies


@dataclass(frozen=True, slots=True)
class WarpSpan:
    """What a warp, or the memory behind it, does for a while."""

    warp: int  # of the chunk
    begin: float  # clocks
    end: float
    what: str  # "runs", "waits for registers", "waits at a barrier", "waits at an mbarrier", ...
    index: int = -1  # of the instruction


@dataclass(frozen=True)
class PathRates:
    """What clocks need of a multiprocessor besides the clocks of what warps ask for."""

    latencies: Mapping[str, float]
    quartered: frozenset[int]  # units of which each quarter has its own
    l2: int  # the unit of bytes from L2
    stores: int  # and of those to it
    loaded: float  # clocks of a byte of a bulk copy to shared memory
    stored: float  # and from there


@dataclass
class _Warp:
    """The clock of a warp, and what is under way for it."""

    number: int
    block: int
    now: float = 0.0
    horizon: float = 0.0  # when the latest of its instructions has begun
    at: int = 0  # the next of its events
    round: int = 0  # how many blocks before have ended in its place
    pending: dict[str, float] = field(default_factory=dict)  # registers that are not there
    groups: dict[str, list[float]] = field(default_factory=lambda: {"wgmma": [], "bulk": [], "copy": []})
    under_way: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("wgmma", "bulk", "copy"), 0.0))


_WAITED = {"wgmma_wait": "wgmma", "bulk_wait": "bulk", "copy_wait": "copy"}
_WORDS = {"wgmma": "waits for products", "bulk": "waits for its stores", "copy": "waits for its copies"}


@dataclass(frozen=True)
class Simulated:
    """The clocks of some blocks that begin together."""

    rounds: tuple[float, ...]  # when the last block of each round ends
    waits: Mapping[int, float]  # by instruction, clocks that warps waited there, on average
    spans: tuple[WarpSpan, ...]  # if they were asked for


class WarpClocks:
    """Follows the events of all warps of a chunk."""

    def __init__(
        self, events: Sequence[Sequence[ClockEvent]], each: int, rates: PathRates, units: int, apart: bool, *,
        rounds: int = 1, spans: bool = False,
    ) -> None:  # fmt: skip
        """`each` is the number of warps of a block; `apart` says that each block has a multiprocessor of its own.

        In the place of a block that ends another one begins, which does the same, until there were so many `rounds`.
        """
        self._events, self._each, self._rates, self._apart = events, each, rates, apart
        blocks = len(events) // each
        places = blocks if apart else 1
        together = each if apart else len(events)  # warps of a multiprocessor
        quarter = -(-together // QUARTERS)
        self._others = [(quarter if unit in rates.quartered else together) - 1 for unit in range(units)]
        self._free = [[[0.0] * QUARTERS for _ in range(units)] for _ in range(places)]
        self._tensor = [[0.0] * QUARTERS for _ in range(places)]
        self._fetched = [0.0] * places  # when the last bulk copy of a multiprocessor has left L2
        self._ends = [[0.0] * rounds for _ in range(blocks)]
        self._running = [each] * blocks  # warps
        self._missing: dict[ClockKey, int] = {}
        self._there: dict[ClockKey, float] = {}
        self._waiting: dict[ClockKey, list[tuple[_Warp, Awaits]]] = {}
        for stream in events:
            for event in stream:
                keys = (
                    (event.key,) if isinstance(event, Arrives) else event.keys if isinstance(event, BulkCopies) else ()
                )
                for key in keys:
                    self._missing[key] = self._missing.get(key, 0) + 1
        self._missing = {(*key, turn): count for key, count in self._missing.items() for turn in range(rounds)}
        self._warps = [_Warp(number, number // each) for number in range(len(events))]
        self._heap: list[tuple[float, int]] = []
        self._waits: dict[int, float] = {}
        self._spans: list[WarpSpan] | None = [] if spans else None

    def run(self) -> Simulated:
        """Follow all warps to their ends."""
        heap = self._heap = [(0.0, warp.number) for warp in self._warps]
        warps, streams = self._warps, self._events
        while heap or self._waiting:
            if not heap:  # what is missing arrived in an order that the emulator did not take: go on
                self._complete(min(self._waiting, key=lambda key: self._there.get(key, 0.0)))
                continue
            number = heap[0][1]
            warp, stream = warps[number], streams[number]
            if warp.at == len(stream):
                heapq.heappop(heap)
                self._end(warp)
                continue
            event = stream[warp.at]
            warp.at += 1
            if isinstance(event, StepRuns):
                self._runs(warp, event)
                heapq.heapreplace(heap, (warp.now, number))
                continue
            heapq.heappop(heap)  # others may be pushed meanwhile
            if self._execute(warp, event):
                heapq.heappush(heap, (warp.now, number))
        waits = {index: clocks / len(self._warps) for index, clocks in self._waits.items()}
        return Simulated(tuple(map(max, zip(*self._ends, strict=True))), waits, tuple(self._spans or ()))

    def _end(self, warp: _Warp) -> None:
        """A warp has ended; with the last one of a block the next block begins."""
        now = max(warp.now, warp.horizon, *warp.pending.values(), *warp.under_way.values())
        ends, block = self._ends[warp.block], warp.block
        ends[warp.round] = max(ends[warp.round], now)
        self._running[block] -= 1
        if self._running[block] or warp.round + 1 == len(ends):
            return
        self._running[block] = self._each
        begin = ends[warp.round] + self._rates.latencies["begin"]
        for number in range(block * self._each, (block + 1) * self._each):
            self._warps[number] = _Warp(number, block, begin, begin, round=warp.round + 1)
            heapq.heappush(self._heap, (begin, number))

    def _execute(self, warp: _Warp, event: Arrives | Awaits | BulkCopies) -> bool:
        """Execute an event; False if the warp waits."""
        warp.now = warp.horizon = max(warp.now, warp.horizon)
        if isinstance(event, BulkCopies):
            self._copies(warp, event)
        elif isinstance(event, Arrives):
            self._arrive((*event.key, warp.round), warp.now + event.after)
        elif self._missing.get((*event.key, warp.round), 0):
            self._waiting.setdefault((*event.key, warp.round), []).append((warp, event))
            return False
        else:
            self._resume(warp, event)
        return True

    def _resume(self, warp: _Warp, event: Awaits) -> None:
        there = self._there.get((*event.key, warp.round), 0.0)
        if there > warp.now:
            self._wait(warp, there, event.what, event.index)
            warp.now = there
        warp.horizon = warp.now

    def _wait(self, warp: _Warp, until: float, what: str, index: int) -> None:
        self._waits[index] = self._waits.get(index, 0.0) + until - warp.now
        if self._spans is not None:
            self._spans.append(WarpSpan(warp.number, warp.now, until, what, index))

    def _arrive(self, key: ClockKey, time: float) -> None:
        self._there[key] = max(self._there.get(key, 0.0), time)
        self._missing[key] -= 1
        if not self._missing[key]:
            self._complete(key)

    def _complete(self, key: ClockKey) -> None:
        self._missing[key] = 0
        for warp, event in self._waiting.pop(key, ()):
            self._resume(warp, event)
            heapq.heappush(self._heap, (warp.now, warp.number))

    def _copies(self, warp: _Warp, event: BulkCopies) -> None:
        place = warp.block if self._apart else 0
        rates = self._rates
        unit, each = (rates.l2, rates.loaded) if event.keys else (rates.stores, rates.stored)
        free = self._free[place][unit]
        end = free[0] = max(warp.now, free[0]) + event.bytes * each
        if not event.keys:
            warp.under_way["bulk"] = max(warp.under_way["bulk"], end + self._rates.latencies["bulk_store"])
            return
        lands = max(end, warp.now) + self._rates.latencies["bulk"]
        if self._spans is not None:
            self._spans.append(WarpSpan(warp.number, warp.now, lands, "bulk copy", event.index))
        for key in event.keys:
            self._arrive((*key, warp.round), lands)

    def _runs(self, warp: _Warp, event: StepRuns) -> None:
        part = event.part
        if part.role[0] or event.follows:
            self._begin(warp, part)
        start = warp.now
        served, delay = self._serve(warp, event, start)
        last = start + delay + part.begins
        late = self._late(warp, part) if warp.pending else []
        pending = warp.pending
        for name, own in part.slow:  # there later than their part has been issued
            if start + delay + own > served:
                pending[name] = start + delay + own
        for name, there in late:
            paths = part.paths(name)
            if there + paths.tail > last:
                last = there + paths.tail
            for written, path in paths.slow:
                if there + path > served and there + path > pending.get(written, 0.0):
                    pending[written] = there + path
        if part.stores and last > served:  # later instructions do not come before a store
            served = last
        if not warp.number % self._each:
            self._note(part, last - start - delay - part.begins)
        warp.now, warp.horizon = served, max(warp.horizon, last)
        if event.copies or event.commits:
            self._commit(warp, event, served)
        if self._spans is not None:
            self._span(warp, event, start, last)

    @staticmethod
    def _late(warp: _Warp, part: ProfilePart) -> list[tuple[str, float]]:
        """The registers that a part reads and that are not there yet; those that it writes are pending no longer."""
        pending, start = warp.pending, warp.now
        if len(pending) > FEW:
            pending = warp.pending = {name: there for name, there in pending.items() if there > start}
        late = [(name, there) for name, there in pending.items() if there > start and name in part.reads]
        for name in part.written.intersection(pending):
            del pending[name]
        return late

    def _begin(self, warp: _Warp, part: ProfilePart) -> None:
        """Begin after all instructions before, and when few enough of the warp's own copies or products are left."""
        warp.now = max(warp.now, warp.horizon)
        if not part.role[0]:
            return
        of, stay = _WAITED[part.role[0]], part.role[1]
        groups = warp.groups[of]
        done = groups[: max(len(groups) - stay, 0)]
        del groups[: len(done)]
        until = max(done, default=0.0)
        if until > warp.now:
            self._wait(warp, until, _WORDS[of], part.demands[0][0])
            warp.now = warp.horizon = until

    def _commit(self, warp: _Warp, event: StepRuns, served: float) -> None:
        """Note when what the part has started is there, and the groups that it commits."""
        if event.copies:
            latencies = self._rates.latencies
            slowest = max((latencies[cache] for cache in event.part.missed.values()), default=latencies["l2"])
            warp.under_way["copy"] = max(warp.under_way["copy"], served + slowest)
        for of in event.commits:
            warp.groups[of].append(warp.under_way[of])

    def _note(self, part: ProfilePart, late: float) -> None:
        """Count the waits for registers of the first warp of a block."""
        for index, clocks in part.waits.items():
            self._waits[index] = self._waits.get(index, 0.0) + clocks * self._each
        if late > 0:
            first = part.demands[0][0]
            self._waits[first] = self._waits.get(first, 0.0) + late * self._each

    def _serve(self, warp: _Warp, event: StepRuns, start: float) -> tuple[float, float]:
        """Let units serve a part, and return when the last of it has been served; products go on.

        Units serve warps in turn, instruction by instruction: while a part waits, each of the `others` gets no more of
        a unit than the part does. A load of few clocks does not wait for all that other warps have asked for.
        Also returns how much later than without other warps its results are there: those of memory when it has
        been served, the others as it is issued.
        """
        place, quarter = (warp.block if self._apart else 0), warp.number % QUARTERS
        units, quartered, served, later = self._free[place], self._rates.quartered, start, start
        others = self._others
        for unit, clocks in event.units:
            free = units[unit]
            own = quarter if unit in quartered else 0
            begin = free[own] if free[own] > start else start
            free[own] = begin + clocks
            in_turn = start + clocks * others[unit]
            if in_turn < begin:
                begin = in_turn
            end = begin + clocks
            if end > served:
                served = end
            if begin > later:
                later = begin
        served = max(served, later)
        for unit, clocks in event.asks:
            free = units[unit]
            begin = free[0] if free[0] > start else start
            free[0] = begin + clocks
            in_turn = start + clocks * others[unit]
            if in_turn < begin:
                begin = in_turn
            end = begin + clocks
            if event.copies and unit == self._rates.l2:  # whose copies go on while the warp does
                slowest = max((self._rates.latencies[cache] for cache in event.part.missed.values()), default=0.0)
                warp.under_way["copy"] = max(warp.under_way["copy"], end + slowest)
                continue
            if end > later:
                later = end
            if end > served:
                served = end
        if event.tensor:
            free = self._tensor[place]
            begin = max(free[quarter], start)
            free[quarter] = begin + event.tensor
            warp.under_way["wgmma"] = max(warp.under_way["wgmma"], free[quarter] + self._rates.latencies["wgmma"])
        return served, later - start

    def _span(self, warp: _Warp, event: StepRuns, start: float, last: float) -> None:
        assert self._spans is not None
        index = event.part.demands[0][0]
        if warp.now > start:
            self._spans.append(WarpSpan(warp.number, start, warp.now, "multiplies" if event.tensor else "runs", index))
        if last > warp.now:
            self._spans.append(WarpSpan(warp.number, warp.now, last, "waits for registers", index))
