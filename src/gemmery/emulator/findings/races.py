"""Races in shared memory: accesses that no barrier orders.

Each granule of shared memory remembers its last write and its last two readers, each as the clock of the warp, the
thread and the instruction in one integer. Each warp has a vector of the other warps' clocks that it has seen. This is
FastTrack (Flanagan and Freund, PLDI 2009) with warps instead of threads. __syncwarp() and barriers order the lanes of
a warp; lock step does not, which PTX has not guaranteed since sm_70.

While all blocks of a chunk do the same, one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]
Flags = NDArray[np.bool_]

# A stamp: bits 0-9 the thread in its block, 10 an atomic, 11-31 the instruction, 32-60 the clock, 61 not yet landed.
THREAD, ATOMIC, INDEX_AT, INDEX, CLOCK_AT, UNDER_WAY = 1023, 1 << 10, 11, (1 << 21) - 1, 32, 1 << 61

# A conflict: its kind ("clash" is a race of threads that execute one instruction together), the instruction, its
# threads, the byte addresses, the stamps of the other accesses.
Report = Callable[[str, int, Words, Words, Words], None]


class History:
    """The accesses of a chunk's blocks to their shared memory, and the clocks that their warps have seen.

    `blocks` is the number of blocks that are followed; `threads` and `size` are the threads of a block, in whole warps,
    and its bytes.
    """

    def __init__(self, blocks: int, threads: int, size: int, report: Report) -> None:
        self.blocks, self.threads, self.report = blocks, threads, report
        self._warps = threads // 32
        self._shift = 4  # granules start at the widest access and are halved for a narrower one
        self._granules = -(-max(size, 1) // 16)
        self._written, self._read, self._read_too = np.zeros((3, blocks * self._granules), np.int64)
        self._stored = np.zeros_like(self._written)  # the last plain write, where atomics have come since
        self._clock = np.ones((blocks, self._warps), np.int64)
        self._seen = np.zeros((blocks, self._warps, self._warps), np.int64)
        self._told: dict[Any, NDArray[np.int64]] = {}
        # For each warp: the clocks seen at its last fence, and those that its atomics have received since.
        self._at_fence, self._heard = np.zeros((2, blocks, self._warps, self._warps), np.int64)
        self.ticks = 0  # how often a clock has changed
        self._fenced = np.zeros_like(self._clock)  # the latest clock of each warp that a fence.proxy.async has seen
        self._tick()

    @property
    def granule(self) -> int:
        """Bytes of a granule."""
        return 1 << self._shift

    @property
    def clock(self) -> NDArray[np.int64]:
        """The clock of each warp of each block that is followed."""
        return self._clock

    @property
    def seen(self) -> NDArray[np.int64]:
        """The latest clock of every warp of the block that each warp has seen: (blocks, warps, others)."""
        return self._seen

    def vouched(self) -> NDArray[np.int64]:
        """`seen` with each warp's own clock: what a release passes on."""
        found: NDArray[np.int64] = np.maximum(self._seen, self._clock[:, :, None] * np.eye(self._warps, dtype=np.int64))
        return found

    def spread(self, blocks: int) -> None:
        """Follow each block from now on, and not one for all."""
        self.blocks = blocks
        self._written, self._read, self._read_too, self._stored = (
            np.tile(stamps, blocks) for stamps in (self._written, self._read, self._read_too, self._stored)
        )
        self._clock = np.tile(self._clock, (blocks, 1))
        self._seen, self._at_fence, self._heard = (
            np.tile(seen, (blocks, 1, 1)) for seen in (self._seen, self._at_fence, self._heard)
        )
        self._fenced = np.tile(self._fenced, (blocks, 1))
        self._told = {key: np.tile(known, (blocks, 1)) for key, known in self._told.items()}
        self._tick()

    def reads(self, index: int, addresses: Words, threads: Words, width: int, stores: Flags | None = None) -> None:
        """Threads load `width` bytes each; `threads` are numbered through the blocks.

        With `stores`, a flag for each instruction by which threads store, asynchronous units read for the threads.
        """
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        if stores is not None:
            written = self._written[places]
            fenced = self._fenced.reshape(-1)[threads // self.threads * self._warps + ((written & THREAD) >> 5)]
            found = stores[written >> INDEX_AT & INDEX] & (written >> CLOCK_AT > fenced) & (written & UNDER_WAY == 0)
            if found.any():
                self._tell("unfenced", index, found, places, threads, written)
        self._check_read(index, places, threads, stamps)
        self._keep_read(places, stamps)

    def writes(self, index: int, addresses: Words, threads: Words, width: int, asynchronous: bool = False) -> None:
        """Threads store, or start an asynchronous copy."""
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        self._check_write(index, places, threads, stamps)
        self._written[places] = stamps | UNDER_WAY if asynchronous else stamps
        last = self._written[places]
        lost = ((last ^ stamps) & THREAD) != 0
        if lost.any():
            self._tell("clash", index, lost, places, threads, last & ~UNDER_WAY)

    def updates(self, index: int, addresses: Words, threads: Words, width: int) -> None:
        """Threads update atomically; such accesses do not race with each other."""
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT | ATOMIC
        written = self._written[places]
        if not written.min():
            self._tell("uninitialised", index, written == 0, places, threads, written)
        self._check_write(index, places, threads, stamps)
        stored = np.where(written & ATOMIC != 0, self._stored[places], 0)
        if stored.max(initial=0) >= self._new:
            race = self._unordered(stored, threads, stamps) & (stored != 0)
            if race.any():
                self._tell("race", index, race, places, threads, stored & ~UNDER_WAY)
        self._stored[places] = np.where(written & ATOMIC != 0, stored, written)
        self._keep_read(places, stamps)
        self._written[places] = stamps

    def lands(self, index: int, addresses: Words, threads: Words, width: int, then: bool = False) -> None:
        """Copies have landed: they count as written now, or with `then` when they were started."""
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        written = self._written[places]
        still = (written & UNDER_WAY != 0) & ((written ^ stamps) & (THREAD | INDEX << INDEX_AT) == 0)
        self._written[places[still]] = written[still] & ~UNDER_WAY if then else stamps[still]

    def meets(self, warps: Flags) -> None:
        """Warps (blocks, warps) meet at a barrier: each has seen everything that any of them had."""
        if warps.all():
            self._seen[:] = self._clock[:, None, :]
        else:
            known = self._known(warps)
            self._seen = np.where(warps[:, :, None], known[:, None, :], self._seen)
        self._clock += warps
        self._tick()

    def meets_itself(self, warps: Flags) -> None:
        """The lanes of each of these warps meet: __syncwarp()."""
        block, warp = np.nonzero(warps)
        self._seen[block, warp, warp] = self._clock[block, warp]
        self._clock += warps
        self._tick()

    def fences(self, warps: Flags) -> None:
        """Asynchronous units see everything that these warps have seen: fence.proxy.async."""
        self._fenced = np.maximum(self._fenced, self._known(warps))
        self.meets_itself(warps)

    def release(self, warps: Flags, key: Any) -> None:
        """Warps that later acquire the key in the same block see what these warps did, as with an mbarrier."""
        self._hand_on(key, self._known(warps))
        self.meets_itself(warps)

    def acquire(self, warps: Flags, key: Any) -> None:
        """These warps see what was released to the key."""
        if (told := self._told.get(key)) is not None:
            self._seen = np.where(warps[:, :, None], np.maximum(self._seen, told[:, None, :]), self._seen)
            self._tick()

    def orders(self, warps: Flags) -> None:
        """A fence between threads: earlier atomics acquire, later ones release, for each warp."""
        some = warps[:, :, None]
        self._seen = np.where(some, np.maximum(self._seen, self._heard), self._seen)
        self._at_fence = np.where(some, self.vouched(), self._at_fence)
        self._clock += warps
        self._tick()

    def publish(self, warps: Flags, key: Any, at_fence: bool) -> None:
        """These warps write atomically and pass on what they did, or what they did before their last fence."""
        if at_fence:
            self._hand_on(key, np.where(warps[:, :, None], self._at_fence, 0).max(axis=1))
        else:
            self._hand_on(key, self._known(warps))
            self._clock += warps
            self._tick()

    def hear(self, warps: Flags, key: Any) -> None:
        """These warps read atomically: after their next fence they see what was released to the key."""
        if (told := self._told.get(key)) is not None:
            heard = np.maximum(self._heard, told[:, None, :])
            self._heard = np.where(warps[:, :, None], heard, self._heard)

    def _hand_on(self, key: Any, known: NDArray[np.int64]) -> None:
        self._told[key] = np.maximum(self._told.get(key, 0), known)

    def _known(self, warps: Flags) -> NDArray[np.int64]:
        """The latest clocks that any of these warps has seen, its own included: (blocks, warps)."""
        seen = np.where(warps[:, :, None], self._seen, 0).max(axis=1)
        known: NDArray[np.int64] = np.maximum(seen, np.where(warps, self._clock, 0))
        return known

    def _tick(self) -> None:
        """Update what depends on the clocks."""
        self.ticks += 1
        lanes = np.arange(self.threads)
        self._stamps = (np.repeat(self._clock, 32, axis=1) << CLOCK_AT | lanes).ravel()
        self._seen_by = self._seen.reshape(-1)
        self._new = (int(self._seen.min()) + 1) << CLOCK_AT  # every warp has seen every access below it

    def _places(self, addresses: Words, threads: Words, width: int) -> tuple[Words, Words]:
        """The granules of an access, with the thread of each."""
        while width < 1 << self._shift:
            self._halve()
        places = (addresses >> self._shift) + threads // self.threads * self._granules
        count = width >> self._shift
        if count == 1:
            return places, threads
        return (places[:, None] + np.arange(count)).ravel(), np.repeat(threads, count)

    def _halve(self) -> None:
        self._shift -= 1
        self._granules *= 2
        self._written, self._read, self._read_too, self._stored = (
            np.repeat(stamps, 2) for stamps in (self._written, self._read, self._read_too, self._stored)
        )

    def _unordered(self, then: Words, threads: Words, stamps: Words) -> Flags:
        """Which earlier accesses belong to other threads and have not been seen by this thread's warp."""
        seen = self._seen_by[(threads >> 5) * self._warps + ((then & THREAD) >> 5)]
        unordered: Flags = ((then & ~UNDER_WAY) >> CLOCK_AT > seen) & ((then ^ stamps) & THREAD != 0)
        return unordered

    def _check_read(self, index: int, places: Words, threads: Words, stamps: Words) -> None:
        written = self._written[places]
        if written.min() > 0 and written.max() < self._new:
            return
        never, under_way = written == 0, written & UNDER_WAY != 0
        race = self._unordered(written, threads, stamps) & ~under_way
        for kind, found in (("uninitialised", never), ("not landed", under_way), ("race", race)):
            if found.any():
                self._tell(kind, index, found, places, threads, written & ~UNDER_WAY)

    def _check_write(self, index: int, places: Words, threads: Words, stamps: Words) -> None:
        written = self._written[places]
        if written.max() >= self._new:
            race = self._unordered(written, threads, stamps) & (written & stamps & ATOMIC == 0)
            race |= written & UNDER_WAY != 0  # the thread's own copy may land later, too
            if race.any():
                self._tell("race", index, race, places, threads, written & ~UNDER_WAY)
        for read in (self._read[places], self._read_too[places]):
            if read.max() >= self._new:
                race = self._unordered(read, threads, stamps) & (read & stamps & ATOMIC == 0)
                if race.any():
                    self._tell("race", index, race, places, threads, read)

    def _keep_read(self, places: Words, stamps: Words) -> None:
        """Keep two threads that read a place: a thread that writes it differs from at least one of them."""
        before = self._read[places]
        self._read[places] = stamps
        last = self._read[places]
        other = ((before ^ last) & THREAD) != 0
        self._read_too[places[other]] = before[other]
        lost = stamps != last  # lanes whose place a later lane reads too
        self._read_too[places[lost]] = stamps[lost]

    def _tell(self, kind: str, index: int, found: Flags, places: Words, threads: Words, others: Words) -> None:
        self.report(kind, index, threads[found], places[found] % self._granules << self._shift, others[found])
