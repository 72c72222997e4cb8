"""Races in global memory: accesses that nothing orders, by threads of one block or of different blocks.

Each granule of global memory remembers its last plain write, two readers, and two threads that updated it atomically,
of different blocks if possible. Within a block the clocks of its warps decide, as in races.py. Between blocks only
atomics order accesses, with fences on both sides or with release and acquire; handover.py tracks those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.findings.handover import Handover
from gemmery_emulator.findings.orders import Clocks, Words
from gemmery_emulator.findings.stamps import LatestReads, ReadPlaces, Stamps
from gemmery_emulator.op import Flags, highest, lowest


class StampFields:
    """The fields of a stamp, from bit 0: the access, the atomic flag, the thread in its block, the block, a clock.

    Accesses are instructions, numbered among those that are followed; blocks are numbered from 1 in the order in which
    they run. The fields are the narrowest for a launch of so many threads and blocks.
    """

    def __init__(self, accesses: tuple[int, ...], threads: int, blocks: int) -> None:
        self.accesses = accesses  # the instructions
        self.thread_at = len(accesses).bit_length() + 1  # the first bit of each
        self.block_at = self.thread_at + (threads - 1).bit_length()
        self.clock_at = self.block_at + blocks.bit_length()
        self.atomic = 1 << self.thread_at - 1  # the bit that marks an atomic
        self.someone = (1 << self.clock_at) - (1 << self.thread_at)  # the bits that say which thread of which block
        self.same_block = (1 << self.clock_at) - (1 << self.block_at)  # those that say which block
        self.last_clock = (1 << 62 - self.clock_at) - 1  # the last clock that fits
        self.narrow_clock = (1 << max(32 - self.clock_at, 0)) - 1  # the last one with which a stamp is less than 2^32

    def instructions(self, stamps: Words) -> Words:
        """The instruction of each stamp."""
        instructions: Words = np.array(self.accesses, np.int64)[stamps & self.atomic - 1]
        return instructions

    def threads(self, stamps: Words) -> Words:
        """The thread of each stamp, in its block."""
        return (stamps & self.someone & ~self.same_block) >> self.thread_at

    def blocks(self, stamps: Words) -> Words:
        """The block of each stamp."""
        return (stamps & self.same_block) >> self.block_at


# The instruction, its threads, the byte addresses, the stamps of the other accesses, and whether both are one event.
ReportGridConflict = Callable[[int, Words, Words, Words, bool], None]


@dataclass(frozen=True)
class Touch(ReadPlaces):
    """Threads of a chunk access places, one element for each place of each thread."""

    index: int  # of the instruction
    threads: Words


class Two:
    """Two threads that accessed each place, of two blocks if possible: any other thread differs from at least one."""

    def __init__(self, size: int, fields: StampFields, narrow: bool) -> None:
        self.last, self.other = Stamps(size, narrow), Stamps(size, narrow)
        self._fields = fields

    def keep(self, places: Words, stamps: Words, low: int, high: int) -> None:
        """These threads access these places, from `low` to `high`, now."""
        touched = self.last.touches(low, high)
        table = self.last.written_at(places, low, high)
        atomic, before = self._fields.atomic, table[places] if touched else np.zeros_like(stamps)
        if stamps.size and stamps[0] & atomic:  # a plain read stays, because it races with more
            some = (before == 0) | (before & atomic != 0)
            places, stamps, before = places[some], stamps[some], before[some]
        table[places] = stamps
        stays = table[places] == stamps
        if np.count_nonzero(stays) == stays.size:
            if np.count_nonzero(before):
                self._replace(places, before, stamps)
            return
        latest = np.flatnonzero(stays)  # one access of each place
        table[places[::-1]] = stamps[::-1]
        once, last = places[latest], stamps[latest]
        first = table[once]  # of another block if any thread is, since threads come in the order of their blocks
        table[once] = last
        self._replace(once, before[latest], last)
        self._replace(once, first, last)

    def keep_earlier(self, places: Words, stamps: Words) -> None:
        """These threads have accessed these places before what the tables know."""
        low, high = lowest(places), highest(places)
        table = self.last.written_at(places, low, high)
        before = table[places]
        others = ((before ^ stamps) & self._fields.someone != 0) & (before != 0)
        first = before == 0
        table[places[first]] = stamps[first]
        if np.count_nonzero(others):
            places, stamps = places[others], stamps[others]
            table = self.other.written_at(places, low, high)
            table[places] = np.where(table[places] == 0, stamps, table[places])

    def _replace(self, places: Words, candidates: Words, last: Words) -> None:
        fields = self._fields
        differs = ((candidates ^ last) & fields.someone != 0) & (candidates != 0)
        if not np.count_nonzero(differs):
            return
        places, candidates, last = places[differs], candidates[differs], last[differs]
        table = self.other.written_at(places, lowest(places), highest(places))
        other = table[places]
        # Threads of another block take precedence.
        replaced = (other == 0) | ((other ^ last) & fields.same_block == 0)
        if np.count_nonzero(replaced) < replaced.size:
            replaced |= (candidates ^ last) & fields.same_block != 0
        atomic = candidates & fields.atomic
        if np.count_nonzero(atomic):
            replaced &= (other == 0) | (other & fields.atomic != 0) | (atomic == 0)
        table[places[replaced]] = candidates[replaced]

    def move(self, times: int, narrow: bool) -> None:
        """Split each place in `times`; stamps have 8 bytes if they are not narrow."""
        self.last, self.other = self.last.moved(times, narrow), self.other.moved(times, narrow)


@dataclass(frozen=True)
class GridTables:
    """The arrays of a `GridHistory` and the fields of its stamps, by name; and the last clock that fits in a stamp."""

    numbers: dict[str, Any]
    clock_limit: int


class GridHistory:
    """The accesses of a launch to global memory of `size` bytes.

    The stamp of a plain write with the atomic flag stands also for the read before it, which stamps.py knows.
    """

    def __init__(self, size: int, fields: StampFields, report: ReportGridConflict) -> None:
        self.fields, self._report = fields, report
        self._size = size
        self._shift = 4  # granules start at the widest access and are halved for a narrower one
        self._narrow = fields.narrow_clock > 0  # until a later clock comes
        self._written = Stamps(-(-size // 16), self._narrow)
        self._reads: Two | None = None  # None until something is read
        self._updates: Two | None = None  # the same for atomic updates
        self._access = {index: number for number, index in enumerate(fields.accesses)}
        self._latest = LatestReads(self._keep_read)
        self._reads_before = np.full(fields.atomic, -1)  # the access that reads before each one that writes
        self._someone, self._block = fields.someone, fields.same_block
        self.first = 1  # the number of the chunk's first block
        self._blocks = 0

    @property
    def granule(self) -> int:
        """Bytes of a granule."""
        return 1 << self._shift

    def start(self, blocks: int, threads: int, clocks: Clocks, handover: Handover, cluster: int) -> None:
        """Start a chunk of `blocks` blocks of `threads` threads in whole warps, with `cluster` blocks per cluster."""
        self._latest.settle_all()
        self.first += self._blocks
        self._blocks, self._threads, self._cluster = blocks, threads, cluster
        self._clocks, self._handover = clocks, handover
        self._ticks = -1

    def _own(self) -> Words:
        """The stamp of each thread of the chunk, without the instruction."""
        if self._ticks != self._clocks.ticks:
            self._ticks = self._clocks.ticks
            clocks = np.broadcast_to(self._clocks.clock, (self._blocks, self._threads // 32))
            numbers = np.arange(self.first, self.first + self._blocks)
            stamps = np.repeat(clocks << self.fields.clock_at, 32, axis=1)
            stamps += (numbers << self.fields.block_at)[:, None]
            stamps += np.arange(self._threads) << self.fields.thread_at
            self._stamps = stamps.ravel()
            latest = int(clocks.max())
            self._full = latest > self.fields.last_clock
            if self._narrow and latest > self.fields.narrow_clock:
                self._narrow = False
                self._move(1)
        return self._stamps

    def access(self, index: int) -> int:
        """The number of an instruction among those that are followed."""
        return self._access[index]

    @property
    def packed(self) -> bool:
        """Whether rows of places may be packed, as with large arrays."""
        return self._written.data is None

    def tables(self) -> GridTables | None:
        """The arrays in which accesses are kept, for code that checks and keeps them; None if packed."""
        self._latest.settle_all()
        self._own()
        if self._full or self._written.data is None:
            return None
        self._reads = self._reads or Two(self._written.size, self.fields, self._narrow)
        fields, updates = self.fields, self._updates
        pairs = [(self._reads.last, self._reads.other), (updates.last, updates.other) if updates else (None, None)]
        (last, other), (updated, updated_too) = ([0 if each is None else each.data for each in pair] for pair in pairs)
        numbers = {
            "grid": self._written.data,
            "narrow": self._narrow,
            "grid_shift": self._shift,
            "last": last,
            "other": other,
            "updated": updated,
            "updated_too": updated_too,
            "thread_at": fields.thread_at,
            "clock_at": fields.clock_at,
            "someone": fields.someone,
            "one_block": fields.same_block,
            "atomic": fields.atomic,
            "written_low": self._written.low,
            "written_high": self._written.high,
            "read_low": self._reads.last.low,
            "read_high": self._reads.last.high,
        }
        return GridTables(numbers, fields.narrow_clock if self._narrow else fields.last_clock)

    def widen(self, written_low: int, written_high: int, read_low: int, read_high: int) -> None:
        """Places in these ranges may have stamps now."""
        self._written.low, self._written.high = written_low, written_high
        if self._reads is not None:
            for table in (self._reads.last, self._reads.other):
                table.low, table.high = min(table.low, read_low), max(table.high, read_high)

    def unwritten(self, start: int, stop: int) -> int:
        """The bytes from `start` to before `stop` that no thread has written, if some are; 0 after atomic updates."""
        low, high = -(-start >> self._shift), stop >> self._shift
        if not self._written.touches(low, high - 1) or (self._updates and self._updates.last.touches(low, high - 1)):
            return 0
        return self._written.empty(low, high) << self._shift

    def ordered_writes(self, index: int, addresses: Words, threads: Words, width: int) -> tuple[Words, Words, Words]:
        """The plain writes that are ordered before these reads: their stamps, and the reads' threads and addresses."""
        read = self._touch(index, addresses, threads, width, atomic=False)
        if self._full or not self._written.touches(read.low, read.high):
            return threads[:0], threads[:0], threads[:0]
        then = self._written.at(read.places, read.low, read.high)[read.places].astype(np.int64) & ~self.fields.atomic
        some = then.nonzero()[0]
        own = (then[some] ^ read.stamps[some]) & self._someone == 0
        some = some[own | ~self._unordered(read.threads[some], read.stamps[some], then[some])]
        return then[some], read.threads[some], read.places[some] << self._shift

    def reads(self, index: int, addresses: Words, threads: Words, width: int, atomic: bool) -> None:
        """Threads of the chunk load `width` bytes each."""
        read = self._touch(index, addresses, threads, width, atomic)
        if self._full:
            return
        self._check_written(read, writes=False)
        if atomic:
            self._latest.settle(read.low, read.high)
            self._keep_read(read)
            return
        self._check_two(read, self._updates)
        self._latest.add(read)

    def writes(self, index: int, addresses: Words, threads: Words, width: int, atomic: bool) -> None:
        """Threads store, or update atomically."""
        write = self._touch(index, addresses, threads, width, atomic)
        if self._full:
            return
        some, reads = self._check_written(write, writes=True)
        read = None if atomic else self._read_before(write)
        flag = 0 if read is None else self.fields.atomic
        self._latest.settle(write.low, write.high, read)
        if atomic:
            self._check_two(write, self._reads)
            self._updates = self._keep(self._updates, write)
            return
        self._check_two(write, self._updates)
        places, stamps = write.places, write.stamps
        table = self._written.written_at(places, write.low, write.high)
        table[places] = stamps | flag
        last = table[places]
        lost = (last != stamps | flag).nonzero()[0]
        lost = lost[(last[lost] ^ stamps[lost]) & self._someone != 0]
        if lost.size:
            self._latest.settle_all()  # one thread writes what another one has read
            table[places] = last ^ flag
            self._emit(write, lost, last.astype(np.int64) ^ flag, together=True)
        if read is not None:
            self._latest.drop(read)
        self._check_two(write, self._reads)
        if flag:  # a later read of the same thread takes the place of its read before
            apart = (reads ^ stamps[some]) & self._someone != 0
            some, reads = some[apart], reads[apart]
        if some.size:
            self._reads = self._reads or Two(self._written.size, self.fields, self._narrow)
            self._reads.keep_earlier(places[some], reads)

    def _read_before(self, write: ReadPlaces) -> ReadPlaces | None:
        """The read that the stamp of a write may stand for."""
        read = self._latest.before(write, self.fields.thread_at)
        if read is not None and self._reads_before[write.access] < 0:
            self._reads_before[write.access] = read.access
        return read if read is not None and self._reads_before[write.access] == read.access else None

    def _keep_read(self, read: ReadPlaces) -> None:
        self._reads = self._keep(self._reads, read)

    def _touch(self, index: int, addresses: Words, threads: Words, width: int, atomic: bool) -> Touch:
        while width < 1 << self._shift:
            self._shift -= 1
            self._move(2)
        access = self._access[index]
        stamps = self._own()[threads] | (access | (self.fields.atomic if atomic else 0))
        places, count = addresses >> self._shift, width >> self._shift
        if count > 1:
            places = (places[:, None] + np.arange(count)).ravel()
            threads, stamps = np.repeat(threads, count), np.repeat(stamps, count)
        return Touch(access, places, stamps, lowest(places), highest(places), index, threads)

    def _move(self, times: int) -> None:
        """Move all stamps to tables where each granule is `times` granules."""
        self._latest.settle_all()
        self._written = self._written.moved(times, self._narrow)
        for two in (self._reads, self._updates):
            if two is not None:
                two.move(times, self._narrow)

    def _keep(self, two: Two | None, touch: ReadPlaces) -> Two:
        two = two or Two(self._written.size, self.fields, self._narrow)
        two.keep(touch.places, touch.stamps, touch.low, touch.high)
        return two

    def _check_two(self, touch: Touch, two: Two | None) -> None:
        for table in (two.last, two.other) if two is not None else ():
            if table.touches(touch.low, touch.high):
                then = table.at(touch.places, touch.low, touch.high)[touch.places].astype(np.int64, copy=False)
                self._check(touch, then)

    def _check_written(self, touch: Touch, *, writes: bool) -> tuple[Words, Words]:
        """Check the latest writes, and for an access that `writes` the reads that they stand for.

        Returns which of the places have such reads, and their stamps.
        """
        none = np.zeros(0, np.int64)
        if not self._written.touches(touch.low, touch.high):
            return none, none
        then = self._written.at(touch.places, touch.low, touch.high)[touch.places].astype(np.int64, copy=False)
        flags = then & self.fields.atomic
        then ^= flags
        self._check(touch, then)
        if not writes or not np.count_nonzero(flags):
            return none, none
        some = flags.nonzero()[0]
        reads = then[some] & -self.fields.atomic | self._reads_before[then[some] & self.fields.atomic - 1]
        places, stamps, threads = (each[some] for each in (touch.places, touch.stamps, touch.threads))
        self._check(replace(touch, places=places, stamps=stamps, threads=threads), reads)
        return some, reads

    def _check(self, touch: Touch, then: Words) -> None:
        """Report earlier accesses of other threads that nothing orders before these."""
        threads, stamps = touch.threads, touch.stamps
        differs = ((then ^ stamps) & self._someone != 0) & (then != 0) & (then & stamps & self.fields.atomic == 0)
        if not np.count_nonzero(differs):
            return
        some = np.flatnonzero(differs)
        some = some[self._unordered(threads[some], stamps[some], then[some])]
        if some.size:
            self._emit(touch, some, then, together=False)

    def _unordered(self, threads: Words, stamps: Words, then: Words) -> Flags:
        fields, warps = self.fields, self._threads // 32
        own_block, own_warp = threads // self._threads, threads % self._threads >> 5
        second, clock = fields.threads(then), then >> fields.clock_at
        other, lanes = second >> 5, np.full_like(then, -1)
        inside = (then ^ stamps) & self._block == 0
        known = self._clocks.known
        rows = own_block if len(known) > 1 else np.zeros_like(own_block)
        known = known[rows, own_warp, np.where(inside, other, 0)]
        unordered: Flags = ~inside | (clock > known)
        if (publishing := self._clocks.publishing).releases.partial:
            lanes = publishing.lanes(second, fields.instructions(then))
            apart = np.where(inside & (own_warp != other), lanes, -1)
            unordered |= publishing.releases.left_out(publishing.first + rows * warps + other, known, apart, clock)
        if self._clocks.lanes is not None:
            in_one = rows * self._threads + threads % self._threads
            unordered &= ~(inside & self._clocks.lanes_have_met(in_one, second, clock))
        if self._cluster > 1:  # within a cluster its barriers may order blocks
            mate = (fields.blocks(then) - 1) // self._cluster == (own_block + self.first - 1) // self._cluster
            unordered &= inside | ~mate
        if self._handover.knows_any and unordered.any():
            some = np.flatnonzero(unordered)
            numbers = fields.blocks(then[some]) * warps + other[some]
            unordered[some] = ~self._handover.known(own_block[some], numbers, lanes[some], clock[some], warps)
        return unordered

    def _emit(self, touch: Touch, some: Words, others: Words, together: bool) -> None:
        addresses = touch.places[some] << self._shift
        self._report(touch.index, touch.threads[some], addresses, others[some], together)


def stored(event: Any, machine: Any, threads: Words, addresses: Words, size: int) -> NDArray[np.uint8]:
    """The `size` bytes that each of these threads of the chunk stores at its address."""
    rows = np.ascontiguousarray(np.stack([machine.spread(value)[threads] for value in event.values], axis=1))
    from_start = addresses - machine.spread(event.addresses)[threads]
    columns = from_start[:, None] + np.arange(size)
    values: NDArray[np.uint8] = np.take_along_axis(rows.view(np.uint8), columns, axis=1)
    return values
