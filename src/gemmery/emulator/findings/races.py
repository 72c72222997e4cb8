"""Races in shared memory: accesses that no barrier orders.

Each granule of shared memory remembers its last write and its last two readers, each as the clock of the warp, the
thread and the instruction in one integer; clocks.py tells what each warp has seen. This is FastTrack (Flanagan and
Freund, PLDI 2009) with warps instead of threads.

While all blocks of a chunk do the same, one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gemmery.emulator.findings.clocks import Clocks, Words
from gemmery.emulator.op import Flags

# A stamp: bits 0-9 the thread in its block, 10 an atomic, 11-31 the instruction, 32-60 the clock, 61 not yet landed.
THREAD, ATOMIC, INDEX_AT, INDEX, CLOCK_AT, UNDER_WAY = 1023, 1 << 10, 11, (1 << 21) - 1, 32, 1 << 61

FEW = 1 << 11  # threads whose reads are checked together, up to so many
TOGETHER = 1 << 12

# A conflict: its kind ("clash" is a race of threads that execute one instruction together), the instruction, its
# threads, the byte addresses, the stamps of the other accesses.
ReportConflict = Callable[[str, int, Words, Words, Words], None]


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
        self._stamps = self._known_by = self._written
        self._new = 0  # every warp has seen every access below it
        self._later: list[tuple[int, Words, Words, int]] = []  # reads of one width that are not checked yet
        self._of_later = 0  # their threads
        clocks.before.append(self.settle)
        self._lanes = np.arange(threads)

    @property
    def granule(self) -> int:
        """Bytes of a granule."""
        return 1 << self._shift

    def spread(self, blocks: int) -> None:
        """Follow each block from now on, and not one for all."""
        self.settle()
        self._written, self._read, self._read_too, self._stored = (
            np.tile(stamps, blocks) for stamps in (self._written, self._read, self._read_too, self._stored)
        )

    def reads(self, index: int, addresses: Words, threads: Words, width: int, stores: Flags | None = None) -> None:
        """Threads load `width` bytes each; `threads` are numbered through the blocks.

        With `stores`, a flag for each instruction by which threads store, asynchronous units read for the threads.
        """
        if stores is None and threads.size <= FEW:
            if self._later and self._later[0][3] != width:
                self.settle()
            self._later.append((index, addresses, threads, width))
            self._of_later += threads.size
            if self._of_later >= TOGETHER:
                self.settle()
            return
        self.settle()
        self._read_now(index, addresses, threads, width, stores)

    def forget(self) -> None:
        """Free the memory of all accesses, at the end of the chunk."""
        self._written = self._read = self._read_too = self._stored = self._stamps = np.zeros(0, np.int64)

    def settle(self) -> None:
        """Check the reads that wait, before anything is written or the clocks change: together if none conflicts."""
        later, self._later, self._of_later = self._later, [], 0
        if len(later) > 1:
            width = later[0][3]
            threads = np.concatenate([each for _, _, each, _ in later])
            indices = np.repeat([index for index, *_ in later], [len(each) for _, _, each, _ in later])
            places, threads = self._places(np.concatenate([each for _, each, _, _ in later]), threads, width)
            written = self._written[places]
            if written.min() > 0 and written.max() < self._new:
                indices = np.repeat(indices, len(places) // len(indices))
                self._keep_read(places, self._stamps[threads] | indices << INDEX_AT)
                return
        for read in later:
            self._read_now(*read)

    def _read_now(self, index: int, addresses: Words, threads: Words, width: int, stores: Flags | None = None) -> None:
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        if stores is not None:
            written = self._written[places]
            fenced = self._clocks.fenced.reshape(-1)[threads // self._threads * self._threads + (written & THREAD)]
            unfenced = stores[written >> INDEX_AT & INDEX] & (written >> CLOCK_AT > fenced) & (written & UNDER_WAY == 0)
            if unfenced.any():
                self._emit("unfenced", index, unfenced, places, threads, written)
        self._check_read(index, places, threads, stamps)
        self._keep_read(places, stamps)

    def writes(self, index: int, addresses: Words, threads: Words, width: int, asynchronous: bool = False) -> None:
        """Threads store, or start an asynchronous copy."""
        self.settle()
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        self._check_write(index, places, threads, stamps)
        self._written[places] = stamps | UNDER_WAY if asynchronous else stamps
        last = self._written[places]
        lost = ((last ^ stamps) & THREAD) != 0
        if lost.any():
            self._emit("clash", index, lost, places, threads, last & ~UNDER_WAY)

    def updates(self, index: int, addresses: Words, threads: Words, width: int) -> None:
        """Threads update atomically; such accesses do not race with each other."""
        self.settle()
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT | ATOMIC
        written = self._written[places]
        if not written.min():
            self._emit("uninitialised", index, written == 0, places, threads, written)
        self._check_write(index, places, threads, stamps)
        stored = np.where(written & ATOMIC != 0, self._stored[places], 0)
        if stored.max(initial=0) >= self._new:
            race = self._unordered(stored, threads, stamps) & (stored != 0)
            if race.any():
                self._emit("race", index, race, places, threads, stored & ~UNDER_WAY)
        self._stored[places] = np.where(written & ATOMIC != 0, stored, written)
        self._keep_read(places, stamps)
        self._written[places] = stamps

    def receives(self, index: int, addresses: Words, threads: Words, width: int) -> None:
        """Another block stores here; what orders it is not followed, so that it races with nothing."""
        self.settle()
        places, threads = self._places(addresses, threads, width)
        self._written[places] = index << INDEX_AT | np.maximum(threads % self._threads, 1)

    def lands(self, index: int, addresses: Words, threads: Words, width: int, then: bool = False) -> None:
        """Copies have landed: they count as written now, or with `then` when they were started."""
        self.settle()
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        written = self._written[places]
        still = (written & UNDER_WAY != 0) & ((written ^ stamps) & (THREAD | INDEX << INDEX_AT) == 0)
        self._written[places[still]] = written[still] & ~UNDER_WAY if then else stamps[still]

    def _places(self, addresses: Words, threads: Words, width: int) -> tuple[Words, Words]:
        """The granules of an access, with the thread of each."""
        if self._ticks != self._clocks.ticks:
            self._update()
        while width < 1 << self._shift:
            self._halve()
        places = addresses >> self._shift
        if self._clocks.blocks > 1:
            places = places + threads // self._threads * self._granules
        count = width >> self._shift
        if count == 1:
            return places, threads
        return (places[:, None] + np.arange(count)).ravel(), np.repeat(threads, count)

    def _update(self) -> None:
        """Compute what depends on the clocks."""
        clocks = self._clocks
        self._ticks = clocks.ticks
        self._stamps = (np.repeat(clocks.clock << CLOCK_AT, 32, axis=1) | self._lanes).ravel()
        self._known_by = clocks.known.reshape(-1)
        self._new = (int(clocks.known.min()) + 1) << CLOCK_AT

    def _halve(self) -> None:
        self._shift -= 1
        self._granules *= 2
        self._written, self._read, self._read_too, self._stored = (
            np.repeat(stamps, 2) for stamps in (self._written, self._read, self._read_too, self._stored)
        )

    def _unordered(self, then: Words, threads: Words, stamps: Words) -> Flags:
        """Which earlier accesses belong to other threads and have not been seen by this thread's warp."""
        known = self._known_by[(threads >> 5) * self._warps + ((then & THREAD) >> 5)]
        clock = (then & ~UNDER_WAY) >> CLOCK_AT
        unordered: Flags = (clock > known) & ((then ^ stamps) & THREAD != 0)
        if self._clocks.lanes is not None:
            unordered &= ~self._clocks.lanes_have_met(threads, then & THREAD, clock)
        return unordered

    def _racing(self, then: Words, threads: Words, stamps: Words) -> Flags:
        """Which earlier accesses nothing orders before these, unless both are atomic."""
        racing: Flags = then & stamps & ATOMIC == 0
        return self._unordered(then, threads, stamps) & racing if racing.any() else racing

    def _check_read(self, index: int, places: Words, threads: Words, stamps: Words) -> None:
        written = self._written[places]
        if written.min() > 0 and written.max() < self._new:
            return
        never, under_way = written == 0, written & UNDER_WAY != 0
        race = self._unordered(written, threads, stamps) & ~under_way
        for kind, faulty in (("uninitialised", never), ("not landed", under_way), ("race", race)):
            if faulty.any():
                self._emit(kind, index, faulty, places, threads, written & ~UNDER_WAY)

    def _check_write(self, index: int, places: Words, threads: Words, stamps: Words) -> None:
        written = self._written[places]
        if written.max() >= self._new:
            race = self._racing(written, threads, stamps)
            race |= written & UNDER_WAY != 0  # the thread's own copy may land later, too
            if race.any():
                self._emit("race", index, race, places, threads, written & ~UNDER_WAY)
        for read in (self._read[places], self._read_too[places]):
            if read.max() >= self._new:
                race = self._racing(read, threads, stamps)
                if race.any():
                    self._emit("race", index, race, places, threads, read)

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
        self._report(kind, index, threads[faulty], places[faulty] % self._granules << self._shift, others[faulty])
