"""What a warp does between two waits, worked out once: how long alone, and when its registers are there.

Instructions begin as soon as their operands are there, because ptxas arranges them so, across forward branches too.
They do not move to an earlier turn of a loop, and not across a barrier or a store. Where a kernel has so few registers
that a multiprocessor is full of its threads, some loads through pointers that move on do not move up either: in the
machine code of simt_naive they stand beside the use of the values before them, while loads at fixed distances from a
pointer (simt_packed) stand in batches of 12. Loads whose addresses are computed beside them stand in batches of ROOM
registers: four pairs of f32, two of f64 (gemv_warp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gemmery_emulator.pace.demand import WarpDemand

Numbered = tuple[int, WarpDemand]  # with the instruction's number
TURN = 64.0  # clocks
ROOM = 8  # registers of values that are under way
SUMS = ("fma", "f64", "multiply")  # latencies of sums and products
SPLITS = ("wgmma_wait", "bulk_wait", "copy_wait")  # roles of instructions before which a part ends


@dataclass(frozen=True)
class Paths:
    """What waits for one register: clocks from when it is there."""

    tail: float  # until the last instruction that needs it begins
    slow: tuple[tuple[str, float], ...]  # until each register that depends on it is there


@dataclass(frozen=True, eq=False)
class ProfilePart:
    """Instructions of a basic block up to the next that may wait; clocks count from its first one."""

    demands: tuple[Numbered, ...]
    latencies: Mapping[str, float]
    missed: Mapping[int, str]  # the cache where an access ended, if not in L1
    begins: float = 0.0  # the last instruction, if all registers are there
    written: frozenset[str] = frozenset()  # registers
    slow: tuple[tuple[str, float], ...] = ()  # when each of them is there
    reads: frozenset[str] = frozenset()  # before the part has written them
    waits: Mapping[int, float] = field(default_factory=dict)  # by instruction, clocks for operands of the part
    role: tuple[str, int] = ("", -1)  # of its first instruction, and how many groups may stay under way
    stores: bool = False  # whether it stores anything
    _paths: dict[str, Paths] = field(default_factory=dict)

    def latency(self, index: int, demand: WarpDemand) -> float:
        """The clocks until the result of an instruction is there."""
        return self.latencies[self.missed.get(index, "l1") if demand.latency == "global" else demand.latency]

    def paths(self, register: str) -> Paths:
        """Return what waits for a register."""
        known = self._paths.get(register)
        if known is None:
            tail, there = 0.0, {register: 0.0}
            for index, demand in self.demands:
                begin = max((there[name] for name in demand.reads if name in there), default=-1.0)
                for name in demand.writes:
                    if begin >= 0:
                        there[name] = begin + self.latency(index, demand)
                    else:
                        there.pop(name, None)
                tail = max(tail, begin)
            slow = tuple((name, path) for name, path in there.items() if name in self.written)
            known = self._paths[register] = Paths(tail, slow)
        return known


def parted(
    demands: Sequence[Numbered], clocks: Callable[[Numbered], float], tight: bool = False
) -> Iterator[tuple[tuple[Numbered, ...], bool]]:
    """Yield the instructions of a basic block in parts, which begin at what may wait.

    Warps take turns from part to part. A part ends when its instructions ask for TURN `clocks`. Of a kernel that is
    `tight` in registers, a part also begins at a load that `held` names. Such a part comes with True: it begins after
    all instructions before.
    """
    part: list[Numbered] = []
    clocks_of_part, follows = 0.0, False
    stay = held_back(demands) if tight else frozenset()
    for each in demands:
        index, demand = each
        if part and (demand.role in SPLITS or clocks_of_part >= TURN or index in stay):
            yield tuple(part), follows
            part, clocks_of_part, follows = [], 0.0, index in stay
        part.append(each)
        clocks_of_part += clocks(each)
    if part:
        yield tuple(part), follows


def held_back(demands: Sequence[Numbered]) -> frozenset[int]:
    """Return the loads of a basic block that stand after the use of the values loaded before them.

    They are those through a pointer that moves on from load to load, and that is stepped once more as a whole, for what
    remains after the loop: both take registers. Of values that are converted first two pairs are under way. Others are
    those for whose values no registers are left.
    """
    pointers: dict[str, int] = {}  # where the block has loaded, and how many addresses are computed from it
    moved: set[str] = set()
    loaded: set[str] = set()
    converted: set[str] = set()  # values of those
    computed: set[str] = set()
    stay: set[int] = set()
    full: set[int] = set()
    used, spent, under_way = 0.0, False, 0
    for index, demand in demands:
        words = sum(2 if name.startswith(("%rd", "%fd")) else 1 for name in demand.writes)
        if demand.latency == "global":
            if used >= 1 and not moved.isdisjoint(demand.reads):
                stay.add(index)
                used = 0.0
            if spent and under_way + words > ROOM and not computed.isdisjoint(demand.reads):
                full.add(index)
                spent, under_way = False, 0
            under_way += words
            for name in demand.reads:
                pointers.setdefault(name, 0)
            loaded.update(demand.writes)
            continue
        under_way += words if demand.latency == "shared" else 0
        computed.update(demand.writes)
        sums = demand.latency in SUMS and not loaded.isdisjoint(demand.reads)
        spent = spent or sums
        if demand.latency not in SUMS:
            if not (loaded | converted).isdisjoint(demand.reads):
                converted.update(demand.writes)
        elif sums or not converted.isdisjoint(demand.reads):
            used += 1.0 if sums else 0.5
        for name in pointers.keys() & set(demand.reads):
            pointers[name] += 1
            moved.update(demand.writes)
    return frozenset(stay if max(pointers.values(), default=0) > 1 else full)


def part_of(
    demands: tuple[Numbered, ...], latencies: Mapping[str, float], missed: Mapping[int, str], issued: float = 0.0
) -> ProfilePart:
    """Follow a part whose registers are all there; units serve it in no less than `issued` clocks."""
    plain = ProfilePart(demands, latencies, missed)
    ready: dict[str, float] = {}
    reads: set[str] = set()
    waits: dict[int, float] = {}
    last = 0.0
    for index, demand in demands:
        reads.update(name for name in demand.reads if name not in ready)
        begin = max((ready.get(name, 0.0) for name in demand.reads), default=0.0)
        for name in demand.writes:
            ready[name] = begin + plain.latency(index, demand)
        if begin > last:
            waits[index] = begin - last
            last = begin
    stores = any(demand.role == "store" for _, demand in demands)
    head, slow = demands[0][1], tuple((name, there) for name, there in ready.items() if there > issued)
    role = (head.role, head.waits) if head.role in SPLITS else ("", -1)
    return ProfilePart(demands, latencies, missed, last, frozenset(ready), slow, frozenset(reads), waits, role, stores)
