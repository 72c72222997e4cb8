"""What the blocks that one multiprocessor runs side by side ask of it, and how long their warps wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gemmery import banks
from gemmery.errors import EmulationError
from gemmery_emulator.counters import SHARED
from gemmery_emulator.counters.merging import Merge
from gemmery_emulator.hopper.cluster import BARRIER
from gemmery_emulator.machine import Access, BarrierEvent, CopyEvent, Machine, Observer
from gemmery_emulator.op import Flags, Indices, Mask
from gemmery_emulator.pace.clocks import QUARTERS, Asked, PathRates, StepRuns, WarpClocks, WarpSpan
from gemmery_emulator.pace.demand import KINDS, PLACE, demand_of
from gemmery_emulator.pace.profile import Numbered, part_of, parted
from gemmery_emulator.pace.streams import WarpStreams

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
    "L2": ("l2", "bulk"),
    "L2 stores": ("stored", "atomics"),
    "cluster": ("remote",),
}
_MEMBERS = np.array([[kind in kinds for kind in KINDS] for kinds in UNITS.values()], float)
Missed = tuple[tuple[int, str], ...]  # accesses, with the cache where they ended
AskedAt = tuple[tuple[int, tuple[tuple[int, float], ...]], ...]  # accesses, with amounts by kind

# Units of which each quarter of a multiprocessor has its own.
QUARTERED = ("issue", "fma", "integer", "multiply", "f64", "special", "tensor")
_QUARTERED = frozenset(list(UNITS).index(name) for name in QUARTERED)
_PARTS = np.where(np.isin(np.arange(len(UNITS)), list(_QUARTERED)), float(QUARTERS), 1.0)
_L2, _STORES, _TENSOR = (list(UNITS).index(name) for name in ("L2", "L2 stores", "tensor"))
WORD, PIECE = 4, 16  # bytes of a lane that L1 serves in one pass, and of the largest cp.async
HITS = 0.84  # of a load a clock that L1 serves; 108 of 128 bytes on a V100 (Jia et al., arXiv 1804.06826)
NARROW = 1.48  # passes of a load of less than a word; simt_packed in bf16, whose loads hit L1
PART_OF_SECTOR = 0.7  # of the time of a whole sector that a store of a part of one takes; benchmarks/memory_paths.py


def shares(clocks: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the clocks of each of UNITS (rows) for one of each of KINDS, from the clocks of each kind."""
    by_kind: NDArray[np.float64] = np.array([clocks[kind] for kind in KINDS])
    return _MEMBERS * by_kind


@dataclass(frozen=True)
class Paced:
    """What blocks asked for that ran side by side on one multiprocessor."""

    amounts: NDArray[np.float64]  # (instructions, KINDS), of all blocks together
    waits: NDArray[np.float64]  # clocks that a warp waited at each instruction
    rounds: tuple[float, ...]  # clocks until the last block of each round ends
    busy: float  # clocks of the busiest unit
    blocks: int
    loaded: float  # distinct bytes of global memory
    written: float
    turns: int  # of loops, that the first warp begins
    spills: bool
    spans: tuple[WarpSpan, ...] = ()  # what each warp did, if it was demands_at for

    def clocks(self, rounds: float) -> float:
        """The clocks of so many rounds of blocks, which overlap from the second on."""
        first, last = self.rounds[0], self.rounds[-1]
        return first + (rounds - 1) * (last - first) / max(len(self.rounds) - 1, 1)


class Executes(NamedTuple):
    """Warps execute a basic block."""

    first: int
    last: int
    missed: Missed
    demands_at: AskedAt
    turns: bool


class Pace(Observer):
    """Follows one chunk of blocks: all that a multiprocessor runs at once, or the blocks of one cluster.

    `clocks` are those of one of each of KINDS, `latencies` those of results in clocks, and `l1` is the size of the
    cache in bytes, in which the sector that was not used for the longest time is replaced. `new` says which share of
    the bytes that a block loads comes from memory, of so many bytes; the others are in L2. `tight` says that the kernel
    has so few registers that a multiprocessor is full of its threads.
    """

    def __init__(
        self, merges: Mapping[int, Merge], clocks: Mapping[str, float], latencies: Mapping[str, float], l1: int,
        *, rounds: int = 1, spans: bool = False, new: Callable[[float], float] = lambda _: 1.0, tight: bool = False,
    ) -> None:  # fmt: skip
        self._merges = merges
        self._shares = shares(clocks)
        self._rates = PathRates(latencies, _QUARTERED, _L2, _STORES, clocks["bulk"], clocks["stored"])
        self._capacity = l1 // banks.SECTOR
        self._of_rounds, self._with_spans, self._new, self._tight = rounds, spans, new, tight

    def start(self, machine: Machine) -> None:
        demands = [demand_of(each) for each in machine.kernel.instructions]
        for index, merge in self._merges.items():
            if merge.first != index:  # one access moves the data of both
                demands[index] = replace(demands[index], amounts=())
        self._demands = demands
        self._copies = ["bulk" in each.opcode.spelling for each in machine.kernel.instructions]
        self._apart = machine.launch.together  # the blocks of a cluster are on as many multiprocessors
        self._amounts = np.zeros((len(demands), len(KINDS)))
        sectors = machine.memory.data.size // banks.SECTOR + 1
        self._used = np.zeros(sectors, np.int64)  # by sector, when it was last loaded
        self._loaded, self._written = (np.zeros(sectors, np.bool_) for _ in range(2))
        self._bulk = 0.0
        self._time = self._capacity + 1  # in sectors loaded
        self._missed: dict[int, str] = {}
        self._asked: dict[int, dict[int, float]] = {}  # by access of the latest basic block, amounts by kind
        self._pending: tuple[int, int, list[int]] | None = None
        self._streams = WarpStreams(machine, self._rates.latencies)
        self._spills = False
        self._blocks: dict[tuple[int, int], list[Numbered]] = {}
        self._parts: dict[tuple[int, int, Missed], StepRuns] = {}
        self._runs: dict[Executes, tuple[StepRuns, ...]] = {}
        self._served: dict[tuple[int, int, int], int] = {}

    def executed(self, machine: Machine, first: int, last: int, warps: int, threads: int) -> None:
        self._follow()
        demands = self._block(first, last)
        for index, demand in demands:
            for place, amount in demand.amounts:
                self._amounts[index, place] += amount * warps
        some = (
            range(machine.warps)
            if machine.ran is None
            else np.flatnonzero(machine.ran.reshape(-1, banks.WARP).any(axis=1))
        )
        self._pending = first, last, list(map(int, some))
        self._missed = {}

    def access(self, machine: Machine, event: Access) -> None:
        merge = self._merges.get(event.index)
        if merge is not None:
            if merge.first != event.index:
                return
            event = replace(event, addresses=event.addresses + merge.offset, width=merge.width)
        if event.space == "shared":
            if event.kind in SHARED and (event.kind, event.width) != ("cp.async", PIECE):  # which come past the loads
                self._add(event.index, "wavefronts", self._wavefronts(machine, event))
        elif event.space == "local":
            self._spills = True
        elif event.space != "global":  # the shared memory of another block
            self._add(event.index, "remote", event.width * _threads(machine, event))
        elif event.kind == "bulk":
            size = event.width * _threads(machine, event)
            stores = "global.shared" in machine.kernel.instructions[event.index].opcode.spelling
            self._add(event.index, "stored" if stores else "bulk", size)
            self._bulk += 0 if stores else size
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
        each = NARROW if event.width < WORD else max(event.width // WORD, 1 / HITS)  # of 8 bytes each half apart
        passes = len(lanes) * each if event.kind == "ld" else 0
        self._add(index, "lines", max(_distinct(lanes >> 7), passes))
        sectors = lanes >> 5
        self._add(index, "sectors", _distinct(sectors))
        distinct = np.unique(sectors)
        if event.kind != "ld" and event.kind != "cp.async":
            count = _distinct(sectors)
            size = max(
                min(_threads(machine, event) * event.width, count * banks.SECTOR), PART_OF_SECTOR * count * banks.SECTOR
            )
            self._add(index, "stored" if event.kind == "st" else "atomics", size)
            self._written[distinct] = True
            return
        first = not self._loaded[distinct].all()
        self._loaded[distinct] = True
        bypasses = event.kind == "cp.async" and "cg" in machine.kernel.instructions[index].opcode.modifiers
        missing = self._time - self._used[distinct] > self._capacity
        misses = len(distinct) if bypasses else int(np.count_nonzero(missing))
        self._time += len(distinct)
        self._used[distinct] = self._time
        self._add(index, "l2", misses * banks.SECTOR)
        if misses:
            self._missed[index] = "memory" if first or self._missed.get(index) == "memory" else "l2"

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
        if kind != "bulk" and not self._copies[index]:  # whose time is that of copies
            demands_at = self._asked.setdefault(index, {})
            demands_at[PLACE[kind]] = demands_at.get(PLACE[kind], 0.0) + amount

    def _block(self, first: int, last: int) -> list[Numbered]:
        known = self._blocks.get((first, last))
        if known is None:
            known = self._blocks[first, last] = [(index, self._demands[index]) for index in range(first, last)]
        return known

    def _follow(self) -> None:
        """Let the warps execute the latest basic block, whose accesses are known by now."""
        if self._pending is not None:
            (first, last, warps), self._pending = self._pending, None
            demands_at = tuple(
                (index, tuple((place, amount / len(warps)) for place, amount in sorted(kinds.items())))
                for index, kinds in sorted(self._asked.items())
            )
            self._asked.clear()
            if self._demands[first].role != "phase":  # which stands once, when it passes
                missed = tuple(sorted(self._missed.items()))
                for warp, turns in zip(warps, self._streams.turns(warps, first), strict=True):
                    self._streams.events[warp].append(Executes(first, last, missed, demands_at, turns))
        self._streams.settle()

    def _runs_of(self, key: Executes) -> tuple[StepRuns, ...]:
        known = self._runs.get(key)
        if known is None:
            first, last, missed, demands_at, turns = key
            amounts = dict(demands_at)
            dynamic = {index: self._clocks_of(each) for index, each in amounts.items()}

            def clocks(each: Numbered) -> float:
                whole = self._clocks_of(each[1].amounts) if each[1].role != "wgmma" else 0.0
                return float(np.max(whole + dynamic.get(each[0], 0.0)))

            parts = list[StepRuns]()
            for demands, follows in parted(self._block(first, last), clocks, self._tight):
                asks = sum((dynamic[index] for index, _ in demands if index in dynamic), np.zeros(len(UNITS)))
                part = self._parts.get((demands[0][0], demands[-1][0], missed))
                if part is None:
                    part = self._plain(demands, dict(missed))
                    self._parts[demands[0][0], demands[-1][0], missed] = part
                parts.append(replace(part, asks=self._asks(asks), follows=follows or (turns and not parts)))
            known = self._runs[key] = tuple(parts)
        return known

    def _clocks_of(self, amounts: tuple[tuple[int, float], ...]) -> NDArray[np.float64]:
        """The clocks of each unit for some amounts, by kind."""
        clocks = np.zeros(len(UNITS))
        for place, amount in amounts:
            clocks += self._shares[:, place] * amount
        return clocks * _PARTS

    def _plain(self, demands: tuple[Numbered, ...], missed: Mapping[int, str]) -> StepRuns:
        amounts, tensor = np.zeros(len(KINDS)), np.zeros(len(KINDS))
        for _, demand in demands:
            for place, amount in demand.amounts:
                (tensor if demand.role == "wgmma" and place != PLACE["issue"] else amounts)[place] += amount
        roles = {demand.role for _, demand in demands}
        commits = tuple(of for of in ("wgmma", "bulk", "copy") if f"{of}_commit" in roles)
        products = float((self._shares @ tensor)[_TENSOR]) * QUARTERS
        clocks = self._shares @ amounts * _PARTS
        part = part_of(demands, self._rates.latencies, missed, float(clocks.max()))
        return StepRuns(part, self._asks(clocks), (), products, "copy" in roles, commits, False)

    @staticmethod
    def _asks(clocks: NDArray[np.float64]) -> Asked:
        """The clocks of units that a warp asks for; of a quadrant's own, its warps alone."""
        return tuple((unit, float(each)) for unit, each in enumerate(clocks) if each)

    def barrier(self, machine: Machine, index: int, barrier: int, mask: Mask) -> None:
        if barrier >= 0:
            self._streams.barrier(machine, index, barrier, mask)

    def mbarrier(self, machine: Machine, event: BarrierEvent) -> None:
        self._streams.mbarrier(event)

    def ordered(self, machine: Machine, index: int, threads: Indices, addresses: Indices, acquired: bool) -> None:
        if len(addresses) and addresses[0] == BARRIER:
            self._streams.cluster(machine, index, acquired)

    def copied(self, machine: Machine, event: CopyEvent) -> None:
        self._streams.copied(event)

    def bulk(self, machine: Machine, index: int, threads: Indices, addresses: Indices, what: str) -> None:
        if what == "reads" and "bulk_group" in machine.kernel.instructions[index].opcode.modifiers:
            self._streams.stored(index, threads, addresses)

    def deadlock(self, machine: Machine, index: int, mask: Flags, members: NDArray[np.uint32] | None) -> None:
        line = machine.kernel.instructions[index].line
        raise EmulationError(f"{line}: threads wait for something that no thread of these blocks can do")

    def finish(self, machine: Machine) -> None:
        self._follow()
        each = machine.warps // machine.blocks
        bytes_loaded = (float(np.count_nonzero(self._loaded)) * banks.SECTOR + self._bulk) / machine.blocks
        further = self._new(bytes_loaded) * (self._rates.latencies["memory"] - self._rates.latencies["l2"])
        latencies = dict(self._rates.latencies)
        latencies |= {"memory": latencies["l2"] + further, "bulk": latencies["bulk"] + further}
        self._rates = replace(self._rates, latencies=latencies)
        events = [
            [each for event in stream for each in (self._runs_of(event) if isinstance(event, Executes) else (event,))]
            for stream in self._streams.events
        ]
        clocks = WarpClocks(
            events, each, self._rates, len(UNITS), self._apart > 1,
            rounds=self._of_rounds, spans=self._with_spans,
        ).run()  # fmt: skip
        waits = np.zeros(len(self._amounts))
        for index, waited in clocks.waits.items():
            waits[index] = waited
        self.paced = Paced(
            amounts=self._amounts / self._apart,
            waits=waits,
            rounds=clocks.rounds,
            busy=float((self._shares @ self._amounts.sum(axis=0)).max()) / self._apart,
            blocks=machine.blocks // self._apart,
            loaded=(float(np.count_nonzero(self._loaded)) * banks.SECTOR + self._bulk) / self._apart,
            written=float(np.count_nonzero(self._written)) * banks.SECTOR / self._apart,
            turns=self._streams.turned,
            spills=self._spills,
            spans=clocks.spans,
        )


def _threads(machine: Machine, event: Access) -> int:
    """The number of threads that access memory."""
    return machine.threads if event.mask is None else int(np.count_nonzero(event.mask))


def _distinct(rows: Indices) -> int:
    """The number of distinct values in each row, added up."""
    ordered = np.sort(rows, axis=1)
    return len(ordered) + int(np.count_nonzero(ordered[:, 1:] != ordered[:, :-1]))
