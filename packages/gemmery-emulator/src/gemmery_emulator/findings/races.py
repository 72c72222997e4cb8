"""Races in shared memory: accesses that no barrier orders.

Each granule of shared memory remembers its last write and its last two readers, each as the clock of the warp, the
thread and the instruction in one integer; orders.py tells what each warp has seen. This is FastTrack (Flanagan and
Freund, PLDI 2009) with warps instead of threads.

While all blocks of a chunk do the same, one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gemmery_emulator.findings.orders import Clocks, Words
from gemmery_emulator.machine import Access
from gemmery_emulator.op import Flags

# A stamp: bits 0-9 the thread in its block, 10 an atomic, 11-31 the instruction, 32-60 the clock, 61 not yet landed.
THREAD, ATOMIC, INDEX_AT, INDEX, CLOCK_AT, UNDER_WAY = 1023, 1 << 10, 11, (1 << 21) - 1, 32, 1 << 61

# A conflict: its kind ("clash" is a race of threads that execute one instruction together), the instruction, its
# threads, the byte addresses, the stamps of the other accesses.
ReportConflict = Callable[[str, int, Words, Words, Words], None]


class SharedTables(NamedTuple):
    """The arrays of a `History`, and how an address leads to a place in them."""

    written: Words
    read: Words
    read_too: Words
    granules: int  # of a block
    shift: int


class History:
    """The accesses of a chunk's blocks to their shared memory, whose warps have these clocks.

    `threads` and `size` are the threads of a block, in whole warps, and its bytes.
    """

    def __init__(self, clocks: Clocks, threads: int, size: int, report: ReportConflict, zeroed: int = 0) -> None:
        """`zeroed` bytes at the end of `size` count as written."""
        self._clocks, self._threads, self._report = clocks, threads, report
        self._warps = threads // 32
        self._shift = 4  # granules start at the widest access and are halved for a narrower one
        self._granules = -(-max(size, 1) // 16)
        self._written, self._read, self._read_too = np.zeros((3, clocks.blocks * self._granules), np.int64)
        self._written.reshape(clocks.blocks, -1)[:, self._granules - zeroed // 16 :] = 1
        self._stored = np.zeros_like(self._written)  # the last plain write, where atomics have come since
        self._ticks = -1  # those of the clocks that the following were made from
        self._every_stamp = self._written
        self._new = 0  # every warp has seen every access below it
        self.event: Access | None = None  # the access being checked, for reports; set before it is passed
        self._lanes = np.arange(threads)

    @property
    def granule(self) -> int:
        """Bytes of a granule."""
        return 1 << self._shift

    def tables(self) -> SharedTables:
        """The arrays in which accesses are kept, for code that checks and keeps them itself."""
        return SharedTables(self._written, self._read, self._read_too, self._granules, self._shift)

    def spread(self, blocks: int) -> None:
        """Follow each block from now on, and not one for all."""
        self._written, self._read, self._read_too, self._stored = (
            np.tile(stamps, blocks) for stamps in (self._written, self._read, self._read_too, self._stored)
        )

    def forget(self) -> None:
        """Free the memory of all accesses, at the end of the chunk."""
        self._written = self._read = self._read_too = self._stored = self._every_stamp = np.zeros(0, np.int64)

    def reads(self, index: int, addresses: Words, threads: Words, width: int, stores: Flags | None = None) -> None:
        """Threads load `width` bytes each; `threads` are numbered through the blocks.

        With `stores`, a flag for each instruction by which threads store, asynchronous units read for the threads.
        """
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps(threads) | index << INDEX_AT
        written = self._written[places]
        if stores is not None:
            lanes = threads // self._threads * self._threads + (written & THREAD)
            fenced = self._clocks.fenced["shared"].reshape(-1)[lanes]
            unfenced = stores[written >> INDEX_AT & INDEX] & (written >> CLOCK_AT > fenced) & (written & UNDER_WAY == 0)
            self._emit("unfenced", index, unfenced, places, threads, written)
        if written.min() <= 0 or written.max() >= self._new:
            never, under_way = written == 0, written & UNDER_WAY != 0
            race = self._unordered(written, threads, stamps) & ~under_way
            for kind, faulty in (("uninitialized", never), ("not landed", under_way), ("race", race)):
                self._emit(kind, index, faulty, places, threads, written)
        self._keep_read(places, stamps)

    def writes(self, index: int, addresses: Words, threads: Words, width: int, asynchronous: bool = False) -> None:
        """Threads store, or start an asynchronous copy."""
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps(threads) | index << INDEX_AT
        self._check_write(index, places, threads, stamps)
        self._written[places] = stamps | UNDER_WAY if asynchronous else stamps
        last = self._written[places]
        lost = ((last ^ stamps) & THREAD) != 0
        self._emit("clash", index, lost, places, threads, last)

    def updates(self, index: int, addresses: Words, threads: Words, width: int) -> None:
        """Threads update atomically; such accesses do not race with each other."""
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps(threads) | index << INDEX_AT | ATOMIC
        written = self._written[places]
        self._emit("uninitialized", index, written == 0, places, threads, written)
        self._check_write(index, places, threads, stamps)
        stored = np.where(written & ATOMIC != 0, self._stored[places], 0)
        if stored.max(initial=0) >= self._new:
            race = self._unordered(stored, threads, stamps) & (stored != 0)
            self._emit("race", index, race, places, threads, stored)
        self._stored[places] = np.where(written & ATOMIC != 0, stored, written)
        self._keep_read(places, stamps)
        self._written[places] = stamps

    def receives(self, index: int, addresses: Words, threads: Words, width: int) -> None:
        """Another block stores here; what orders it is not followed, so that it races with nothing."""
        places, threads = self._places(addresses, threads, width)
        self._written[places] = index << INDEX_AT | np.maximum(threads % self._threads, 1)

    def lands(self, index: int, addresses: Words, threads: Words, width: int, then: bool = False) -> None:
        """Copies have landed: they count as written now, or with `then` when they were started."""
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps(threads) | index << INDEX_AT
        written = self._written[places]
        still = (written & UNDER_WAY != 0) & ((written ^ stamps) & (THREAD | INDEX << INDEX_AT) == 0)
        self._written[places[still]] = written[still] & ~UNDER_WAY if then else stamps[still]

    def _places(self, addresses: Words, threads: Words, width: int) -> tuple[Words, Words]:
        """The granules of an access, with the thread of each."""
        self._split(width)
        places = addresses >> self._shift
        if self._clocks.blocks > 1:
            places = places + threads // self._threads * self._granules
        count = width >> self._shift
        if count == 1:
            return places, threads
        return (places[:, None] + np.arange(count)).ravel(), np.repeat(threads, count)

    def _stamps(self, threads: Words) -> Words:
        """The stamps of threads now, without an instruction."""
        clocks = self._clocks
        if self._ticks != clocks.ticks:
            self._ticks = clocks.ticks
            self._every_stamp = (np.repeat(clocks.clock << CLOCK_AT, 32, axis=1) | self._lanes).ravel()
            self._new = 0 if clocks.publishing.releases.partial else (int(clocks.known.min()) + 1) << CLOCK_AT
        return self._every_stamp[threads]

    def _split(self, width: int) -> None:
        """Split granules wider than an access."""
        while width < self.granule:
            self._shift -= 1
            self._granules *= 2
            self._written, self._read, self._read_too, self._stored = (
                np.repeat(stamps, 2) for stamps in (self._written, self._read, self._read_too, self._stored)
            )

    def _unordered(self, then: Words, threads: Words, stamps: Words) -> Flags:
        """Which earlier accesses belong to other threads and have not been seen by this thread's warp."""
        known = self._clocks.known.reshape(-1)[(threads >> 5) * self._warps + ((then & THREAD) >> 5)]
        clock = (then & ~UNDER_WAY) >> CLOCK_AT
        unordered: Flags = (clock > known) & ((then ^ stamps) & THREAD != 0)
        if (publishing := self._clocks.publishing).releases.partial:
            own, second = threads >> 5, then & THREAD
            warps = own - own % self._warps + (second >> 5)
            lanes = np.where(warps == own, -1, publishing.lanes(second, then >> INDEX_AT & INDEX))
            unordered |= publishing.releases.left_out(publishing.first + warps, known, lanes, clock)
        if self._clocks.lanes is not None:
            unordered &= ~self._clocks.lanes_have_met(threads, then & THREAD, clock)
        return unordered

    def _racing(self, then: Words, threads: Words, stamps: Words) -> Flags:
        """Which earlier accesses nothing orders before these, unless both are atomic."""
        racing: Flags = then & stamps & ATOMIC == 0
        return self._unordered(then, threads, stamps) & racing if racing.any() else racing

    def _check_write(self, index: int, places: Words, threads: Words, stamps: Words) -> None:
        written = self._written[places]
        if written.max() >= self._new:
            race = self._racing(written, threads, stamps)
            race |= written & UNDER_WAY != 0  # the thread's own copy may land later, too
            self._emit("race", index, race, places, threads, written)
        for read in (self._read[places], self._read_too[places]):
            if read.max() >= self._new:
                self._emit("race", index, self._racing(read, threads, stamps), places, threads, read)

    def _keep_read(self, places: Words, stamps: Words) -> None:
        """Keep two threads that read a place: a thread that writes it differs from at least one of them."""
        before = self._read[places]
        self._read[places] = stamps
        last = self._read[places]
        other = ((before ^ last) & THREAD) != 0
        self._read_too[places[other]] = before[other]
        lost = ((stamps ^ last) & THREAD) != 0  # lanes whose place a later lane reads too
        self._read_too[places[lost]] = stamps[lost]

    def _emit(self, kind: str, index: int, faulty: Flags, places: Words, threads: Words, others: Words) -> None:
        """Report accesses that are faulty, if there are any."""
        if not faulty.any():
            return
        others = others[faulty] & ~UNDER_WAY
        self._report(kind, index, threads[faulty], places[faulty] % self._granules << self._shift, others)
