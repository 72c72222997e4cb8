"""What the blocks that one multiprocessor runs side by side ask of it, and how long their warps wait.

A `Scoreboard` tells when the registers of a warp are there that never waits for a pipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gemmery import banks
from gemmery.errors import EmulationError
from gemmery_emulator.counters import SHARED
from gemmery_emulator.counters.merging import Merge
from gemmery_emulator.machine import Access, Machine, Observer
from gemmery_emulator.op import Flags, Indices
from gemmery_emulator.pace.demand import KINDS, PLACE, WarpDemand, demand_of

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


# Which kinds share a unit. A multiply-add that waits for its operands keeps its issue slot. Shared memory and the L1
# cache are one memory.
UNITS: Mapping[str, tuple[str, ...]] = {
    "issue": ("issue", "operands"),
    "fma": ("fma", "half", "operands"),
    "integer": ("integer",),
    "multiply": ("multiply", "fma"),
    "f64": ("f64", "operands_f64"),
    "special": ("special", "convert"),
    "tensor": ("tensor", "tensor_tf32", "tensor_8", "tensor_f64", "small_f64", "warp_tensor"),
    "barrier": ("barrier",),
    "L1 requests": ("access", "shuffle"),
    "L1 lines": ("wavefronts", "lines"),
    "L1 bytes": ("wavefronts", "sectors"),
    "L2": ("l2", "bulk", "stored", "atomics"),
}
_MEMBERS = np.array([[kind in kinds for kind in KINDS] for kinds in UNITS.values()], float)
_WITHOUT_MEMORY = {"global": 0.0, "l1": 0.0, "l2": 0.0, "barrier": 0.0}


def shares(clocks: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the clocks of each of UNITS (rows) for one of each of KINDS, from the clocks of each kind."""
    by_kind: NDArray[np.float64] = np.array([clocks[kind] for kind in KINDS])
    return _MEMBERS * by_kind


@dataclass(frozen=True)
class Paced:
    """What blocks asked for that ran side by side on one multiprocessor."""

    amounts: NDArray[np.float64]  # (instructions, KINDS), of all blocks together
    waits: NDArray[np.float64]  # clocks that a warp waited at each instruction
    clocks: float  # until the last block ends, if all blocks wait at the same time
    busy: float  # clocks of the busiest unit
    blocks: int
    loaded: float  # distinct bytes of global memory
    written: float
    barriers: int
    apart: bool  # whether most instructions were of less than half of the warps: warps have roles
    spills: bool


class Pace(Observer):
    """Follows one chunk of blocks: all that a multiprocessor runs at once, or the blocks of one cluster.

    `clocks` are those of one of each of KINDS, `latencies` those of results in clocks, and `l1` is the size of the
    cache in bytes, in which the sector that was not used for the longest time is replaced.
    """

    def __init__(
        self, merges: Mapping[int, Merge], clocks: Mapping[str, float], latencies: Mapping[str, float], l1: int
    ) -> None:
        self._merges = merges
        self._shares = shares(clocks)
        self._latencies = latencies
        self._capacity = l1 // banks.SECTOR

    def start(self, machine: Machine) -> None:
        demands = [demand_of(each) for each in machine.kernel.instructions]
        for index, merge in self._merges.items():
            if merge.first != index:  # one access moves the data of both
                demands[index] = replace(demands[index], amounts=())
        self._demands = demands
        self._apart = machine.launch.together  # the blocks of a cluster are on as many multiprocessors
        self._amounts = np.zeros((len(demands), len(KINDS)))
        self._recent = np.zeros(len(KINDS))  # since the latest barrier
        sectors = machine.memory.data.size // banks.SECTOR + 1
        self._used = np.zeros(sectors, np.int64)  # by sector, when it was last loaded
        self._loaded, self._written = (np.zeros(sectors, np.bool_) for _ in range(2))
        self._bulk = 0.0
        self._time = self._capacity + 1  # in sectors loaded
        self._missed: dict[int, str] = {}
        self._pending: tuple[int, int] | None = None
        self._boards = Scoreboard(self._latencies), Scoreboard({**self._latencies, **_WITHOUT_MEMORY})
        self._latest, self._barriers, self._clocks = -1, 0, 0.0
        self._executed = self._together = 0
        self._spills = False
        self._blocks: dict[tuple[int, int], tuple[NDArray[np.float64], list[Numbered]]] = {}
        self._served: dict[tuple[int, int, int], int] = {}

    def executed(self, machine: Machine, first: int, last: int, warps: int, threads: int) -> None:
        self._follow()
        whole, demands = self._block(first, last)
        for index, demand in demands:
            for place, amount in demand.amounts:
                self._amounts[index, place] += amount * warps
        self._recent += whole * warps
        self._executed += warps * (last - first)
        if 2 * warps >= machine.warps:
            self._together += warps * (last - first)
            self._pending = first, last
        self._missed = {}

    def access(self, machine: Machine, event: Access) -> None:
        merge = self._merges.get(event.index)
        if merge is not None:
            if merge.first != event.index:
                return
            event = replace(event, addresses=event.addresses + merge.offset, width=merge.width)
        if event.space == "shared":
            if event.kind in SHARED:
                self._add(event.index, "wavefronts", self._wavefronts(machine, event))
        elif event.space == "local":
            self._spills = True
        elif event.space != "global":
            return  # the shared memory of another block
        elif event.kind == "bulk":
            copies = machine.threads if event.mask is None else int(np.count_nonzero(event.mask))
            self._add(event.index, "bulk", copies * event.width)
            self._bulk += copies * event.width
        else:
            self._through_l1(machine, event)

    def _through_l1(self, machine: Machine, event: Access) -> None:
        index, lanes = event.index, machine.spread(event.addresses).reshape(-1, banks.WARP)
        if event.mask is not None:  # idle lanes access what the first active one does
            mask = event.mask.reshape(-1, banks.WARP)
            active = mask.any(axis=1)
            lanes, mask = lanes[active], mask[active]
            lanes = np.where(mask, lanes, np.take_along_axis(lanes, mask.argmax(axis=1)[:, None], 1))
        if not lanes.size:
            return
        self._add(index, "lines", _distinct(lanes >> 7))
        sectors = lanes >> 5
        self._add(index, "sectors", _distinct(sectors))
        distinct = np.unique(sectors)
        if event.kind != "ld" and event.kind != "cp.async":
            kind = "stored" if event.kind == "st" else "atomics"
            self._add(index, kind, banks.SECTOR * _distinct(sectors))
            self._written[distinct] = True
            return
        self._loaded[distinct] = True
        bypasses = event.kind == "cp.async" and "cg" in machine.kernel.instructions[index].opcode.modifiers
        missing = self._time - self._used[distinct] > self._capacity
        misses = len(distinct) if bypasses else int(np.count_nonzero(missing))
        self._time += len(distinct)
        self._used[distinct] = self._time
        self._add(index, "l2", misses * banks.SECTOR)
        if misses:
            self._missed[index] = "l2"

    def _wavefronts(self, machine: Machine, event: Access) -> float:
        """Those of the first block times the number of blocks, which are alike in shared memory."""
        lanes = machine.spread(event.addresses).reshape(machine.blocks, -1, banks.WARP)
        mask = None if event.mask is None else event.mask.reshape(lanes.shape)
        active = None if mask is None else mask.any(axis=(1, 2))
        if active is not None and not active.any():
            return 0
        first = 0 if active is None else int(active.argmax())
        some = None if mask is None else mask[first]
        key = event.index, event.width, hash((lanes[first].tobytes(), None if some is None else some.tobytes()))
        cost = self._served.get(key)
        if cost is None:
            kind = "st" if event.kind == "cp.async" else event.kind
            cost = self._served[key] = banks.served(lanes[first], some, event.width, kind).wavefronts
        return cost * (machine.blocks if active is None else int(active.sum()))

    def _add(self, index: int, kind: str, amount: float) -> None:
        self._amounts[index, PLACE[kind]] += amount
        self._recent[PLACE[kind]] += amount

    def _block(self, first: int, last: int) -> tuple[NDArray[np.float64], list[Numbered]]:
        known = self._blocks.get((first, last))
        if known is None:
            demands = [(index, self._demands[index]) for index in range(first, last)]
            whole = np.zeros(len(KINDS))
            for _, demand in demands:
                for place, amount in demand.amounts:
                    whole[place] += amount
            known = self._blocks[first, last] = whole, demands
        return known

    def _follow(self) -> None:
        """Let the warp execute the latest basic block, whose accesses are known by now."""
        if self._pending is None:
            return
        (first, last), self._pending = self._pending, None
        looped, self._latest = first <= self._latest, first
        demands = self._block(first, last)[1]
        barriers = [board.follow(demands, self._missed, looped) for board in self._boards]
        if any(barriers):
            self._barriers += 1
            self._close()

    def _close(self) -> None:
        """A barrier, or the end: blocks that begin together and get equal shares wait at the same time."""
        waiting, computing = (board.since_barrier() for board in self._boards)
        busy = float((self._shares @ self._recent).max()) / self._apart
        self._clocks += max(busy, computing) + waiting - computing
        self._recent[:] = 0

    def deadlock(self, machine: Machine, index: int, mask: Flags, members: NDArray[np.uint32] | None) -> None:
        line = machine.kernel.instructions[index].line
        raise EmulationError(f"{line}: threads wait for something that no thread of these blocks can do")

    def finish(self, machine: Machine) -> None:
        self._follow()
        for board in self._boards:
            board.end()
        self._close()
        waits = np.zeros(len(self._amounts))
        for index, clocks in self._boards[0].waits.items():
            waits[index] = clocks
        self.paced = Paced(
            amounts=self._amounts / self._apart,
            waits=waits,
            clocks=self._clocks,
            busy=float((self._shares @ self._amounts.sum(axis=0)).max()) / self._apart,
            blocks=machine.blocks // self._apart,
            loaded=(float(np.count_nonzero(self._loaded)) * banks.SECTOR + self._bulk) / self._apart,
            written=float(np.count_nonzero(self._written)) * banks.SECTOR / self._apart,
            barriers=self._barriers,
            apart=2 * self._together < self._executed,
            spills=self._spills,
        )


def _distinct(rows: Indices) -> int:
    """The number of distinct values in each row, added up."""
    ordered = np.sort(rows, axis=1)
    return len(ordered) + int(np.count_nonzero(ordered[:, 1:] != ordered[:, :-1]))
