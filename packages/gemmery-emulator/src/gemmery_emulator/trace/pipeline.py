"""The data for pictures of tensor copies and mbarriers: the first block's tiles, and its barriers over time.

Time is the order in which the emulator ran, in basic blocks: a copy lands when a thread waits for it, as late as the
rules allow, and threads take turns at barriers and waits. What waits for what is the kernel's; how long is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gemmery_emulator.machine import BarrierEvent, CopyEvent, Machine, Observer
from gemmery_emulator.op import Indices
from gemmery_emulator.ptx import PtxKernel

WARPGROUP = 128
MOST = 4096  # events that are recorded; all are counted
ADDED_UP = frozenset(("multiplies", "copies", "lands", "stores"))  # events that one step has many of
TOGETHER = 8  # the latest events, among which an equal one is looked for
# Waits of warpgroups, those of them that found a phase under way, arrivals of threads, phases that ended, tensor copies
# and their bytes, products of warpgroups.
COUNTED = ("waits", "slept", "arrivals", "phases", "copies", "bytes", "products")
MOST_READS = 8  # products whose reads of a tile are recorded
NOBODY = -1  # phases end, and copies land, by no thread


@dataclass(frozen=True)
class BarrierStep:
    """One event of the first block.

    `what` is "waits", "passes", "arrives", "expects", "ends" of a phase, "copies" to shared memory, "lands", "stores"
    for copies out of it, "multiplies", or "retires" for a wait for products. `amount` is the number of threads; bytes
    of "expects" and of copies; instructions of "multiplies"; groups that may be under way after "retires".
    """

    step: int
    what: str
    who: int  # the number of a warpgroup of the block, or NOBODY
    barrier: int  # offset in shared memory; -1 for products
    amount: int


@dataclass(frozen=True)
class CopiedTile:
    """A box that a tensor copy brought to shared memory, in pieces of 16 bytes, and which of them products read."""

    array: str  # "A"
    box: tuple[int, int]  # elements: along the row that is contiguous in memory, and the number of rows
    size: int  # bytes of an element
    corner: tuple[int, ...]  # coordinates of its first element, from the innermost dimension
    swizzle: int  # bytes
    places: tuple[int, ...]  # the offset in shared memory of each piece, in the order of the box
    reads: tuple[frozenset[int], ...] = ()  # for each of the first products: the offsets of the pieces that it reads
    opcode: str = ""  # of the products


@dataclass(frozen=True)
class Timeline:
    """The barriers of a block over time."""

    events: tuple[BarrierStep, ...]
    full: tuple[int, ...]  # of each stage the barrier at which its copies complete
    empty: tuple[int, ...]  # of each stage the one that the copying thread waits for; -1 where it waits for none
    counts: Mapping[str, int]  # of all events, by COUNTED


@dataclass
class _Record:
    """What is recorded of one kernel."""

    events: list[BarrierStep] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    tiles: dict[str, CopiedTile] = field(default_factory=dict)
    waiting: set[tuple[int, int]] = field(default_factory=set)  # warpgroups and the barriers they sleep at
    stores: set[tuple[int, int]] = field(default_factory=set)  # threads and the first bytes of what they copy out
    barriers: dict[int, int] = field(default_factory=dict)  # first byte of a copy's tile -> its barrier


class PipelineTrace(Observer):
    """Records the first block of the last kernel that has bulk copies."""

    def __init__(self) -> None:
        self._kernel: PtxKernel | None = None
        self._record = _Record()
        self._watching = False
        self._step = 0

    @property
    def tiles(self) -> tuple[CopiedTile, ...]:
        """The first tile of each array."""
        return tuple(self._record.tiles.values())

    @property
    def timeline(self) -> Timeline | None:
        """The block's barriers over time; None where no copy completes at one."""
        record = self._record
        full = tuple(dict.fromkeys(event.barrier for event in record.events if event.what == "copies"))
        if not full:
            return None
        empty = tuple(_awaited(record.events, barrier) for barrier in full)
        return Timeline(tuple(record.events), full, empty, dict(record.counts))

    def start(self, machine: Machine) -> None:
        copies = any(each.opcode.is_bulk for each in machine.kernel.instructions)
        self._watching = copies and machine.kernel is not self._kernel
        if self._watching:
            self._kernel, self._record, self._step = machine.kernel, _Record(), 0

    def finish(self, machine: Machine) -> None:
        self._watching = False

    def executed(self, machine: Machine, first: int, last: int, warps: int, threads: int) -> None:
        self._step += 1

    def mbarrier(self, machine: Machine, event: BarrierEvent) -> None:
        own = event.blocks == 0
        if not self._watching or not own.any():
            return
        if event.what == "ends":
            for barrier, times in zip(event.addresses[own].tolist(), event.amounts[own].tolist(), strict=True):
                self._record.counts["phases"] += times
                self._add("ends", NOBODY, barrier, times)
            return
        threads, barriers, amounts = event.threads[own], event.addresses[own], event.amounts[own]
        who = np.where(threads < machine.block_threads, threads // WARPGROUP, NOBODY)  # another block's threads arrive
        for group, barrier in sorted(set(zip(who.tolist(), barriers.tolist(), strict=True))):
            these = (who == group) & (barriers == barrier)
            self._at_barrier(event.what, group, barrier, int(amounts[these].sum()), int(these.sum()))

    def _at_barrier(self, what: str, who: int, barrier: int, amount: int, threads: int) -> None:
        record, key = self._record, (who, barrier)
        if what == "waits":
            if key in record.waiting:
                return
            record.waiting.add(key)
        elif what == "passes":
            record.counts["waits"] += 1
            record.counts["slept"] += key in record.waiting
            record.waiting.discard(key)
        else:
            record.counts["arrivals"] += amount if what == "arrives" else threads
        self._add(what, who, barrier, amount)

    def copied(self, machine: Machine, event: CopyEvent) -> None:
        if not self._watching:
            return
        for copy in np.flatnonzero(event.blocks == 0).tolist():
            places, barrier = event.addresses[copy], int(event.barriers[copy])
            self._record.barriers[int(places.min())] = barrier
            self._record.counts["copies"] += 1
            self._record.counts["bytes"] += 16 * len(places)
            thread = int(event.threads[copy])
            who = thread // WARPGROUP if thread < machine.block_threads else NOBODY
            self._add("copies", who, barrier, 16 * len(places))
            array = machine.memory.nearest(event.source)
            if array is not None and array.name not in self._record.tiles and len(event.box) > 1:
                corner = tuple(event.coordinates[copy].tolist())
                box = event.box[0], len(places) * 16 // (event.box[0] * event.size)
                tile = CopiedTile(array.name, box, event.size, corner, event.swizzle, tuple(places.tolist()))
                self._record.tiles[array.name] = tile

    def bulk(self, machine: Machine, index: int, threads: Indices, addresses: Indices, what: str) -> None:
        if not self._watching or what == "begins":
            return
        own = threads < machine.block_threads
        if not own.any():
            return
        if what == "lands":
            for places in addresses[own]:
                self._add("lands", NOBODY, self._record.barriers.get(int(places.min()), -1), 16 * len(places))
            return
        opcode = machine.kernel.instructions[index].opcode
        if "bulk_group" in opcode.modifiers:
            self._stored(threads[own], addresses[own])
        if opcode.family == "wgmma":
            read = frozenset(addresses[own][0].tolist())
            for name, tile in self._record.tiles.items():
                inside = read.intersection(tile.places)
                if inside and inside not in tile.reads and len(tile.reads) < MOST_READS:
                    self._record.tiles[name] = replace(tile, reads=(*tile.reads, inside), opcode=opcode.spelling)

    def _stored(self, threads: Indices, addresses: Indices) -> None:
        """Copies out of shared memory, which are told of when they start and when they read it."""
        under_way = self._record.stores
        for thread, places in zip(threads.tolist(), addresses, strict=True):
            store = thread, int(places.min())
            if store in under_way:
                under_way.remove(store)
            else:
                under_way.add(store)
                self._add("stores", thread // WARPGROUP, -1, 16 * len(places))

    def multiplied(self, machine: Machine, index: int, threads: Indices) -> None:
        self._of_groups(machine, threads, "multiplies", 1)

    def warpgroup(self, machine: Machine, index: int, threads: Indices) -> None:
        pending = getattr(machine.kernel.instructions[index].operands[0], "bits", 0)
        self._of_groups(machine, threads, "retires", pending)

    def _of_groups(self, machine: Machine, threads: Indices, what: str, amount: int) -> None:
        for thread in threads[threads < machine.block_threads].tolist() if self._watching else ():
            self._record.counts["products"] += what == "multiplies"
            self._add(what, thread // WARPGROUP, -1, amount)

    def _add(self, what: str, who: int, barrier: int, amount: int) -> None:
        """Record an event; products and copies of one step are added up."""
        events = self._record.events
        for at in range(len(events) - 1, max(len(events) - 1 - TOGETHER, -1), -1):
            before = events[at]
            if before.step != self._step:
                break
            if (before.what, before.who, before.barrier) == (what, who, barrier) and what in ADDED_UP:
                events[at] = replace(before, amount=before.amount + amount)
                return
        if len(events) < MOST:
            events.append(BarrierStep(self._step, what, who, barrier, amount))


def _awaited(events: list[BarrierStep], full: int) -> int:
    """The barrier that the threads which expect bytes at `full` pass just before; -1 where they pass none."""
    before: Counter[int] = Counter()
    passed: dict[int, int] = {}  # warpgroup -> the barrier that it passed last
    for event in events:
        if event.what == "passes":
            passed[event.who] = event.barrier
        elif event.what == "expects":
            if event.barrier == full and passed.get(event.who, full) != full:
                before[passed[event.who]] += 1
            passed.pop(event.who, None)
    return before.most_common(1)[0][0] if before else -1
