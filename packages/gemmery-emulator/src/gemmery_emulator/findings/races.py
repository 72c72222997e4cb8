"""Races in shared memory: accesses that no barrier orders.

Each granule of shared memory remembers its last write and its last two readers, each as the clock of the warp, the
thread and the instruction in one integer; orders.py tells what each warp has seen. This is FastTrack (Flanagan and
Freund, PLDI 2009) with warps instead of threads.

While all blocks of a chunk do the same, one of them stands for all.

Accesses of few threads wait, also across barriers of whole blocks, and are checked together. Only if one of them may
conflict is each checked alone, in its order and with the clocks that it met: together.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gemmery_emulator.findings.orders import Clocks, Words
from gemmery_emulator.findings.together import READ, UPDATE, WRITE, Contents, Joined, Later, numbered
from gemmery_emulator.machine import Access
from gemmery_emulator.op import Flags

# A stamp: bits 0-9 the thread in its block, 10 an atomic, 11-31 the instruction, 32-60 the clock, 61 not yet landed.
THREAD, ATOMIC, INDEX_AT, INDEX, CLOCK_AT, UNDER_WAY = 1023, 1 << 10, 11, (1 << 21) - 1, 32, 1 << 61

FEW = 1 << 11  # threads whose accesses are checked together, up to so many
TOGETHER = 1 << 12
LARGEST = 1 << 16  # granules times barriers that such accesses span

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

    def __init__(
        self,
        clocks: Clocks,
        threads: int,
        size: int,
        report: ReportConflict,
        zeroed: int = 0,
        contents: Contents | None = None,
    ) -> None:
        """`zeroed` bytes at the end of `size` count as written; `contents` keeps what stores overwrite, to compare."""
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
        self.event: Access | None = None  # the access being checked, for reports; set before it is passed
        self._contents = contents
        self._check: dict[int, Callable[..., None]] = {
            READ: self._read_now,
            WRITE: self._write_now,
            UPDATE: self._update_now,
        }
        self._later: list[Later] = []  # accesses that are not checked yet
        self._of_later = 0  # their threads
        self._barriers = 0  # of all threads, since the first of them
        self._writes = READ  # WRITE or UPDATE if there are any among them; they do not wait together
        clocks.before.append(self.settle)
        clocks.meeting.append(self._meet)
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
        self.settle()
        self._written, self._read, self._read_too, self._stored = (
            np.tile(stamps, blocks) for stamps in (self._written, self._read, self._read_too, self._stored)
        )

    def reads(self, index: int, addresses: Words, threads: Words, width: int, stores: Flags | None = None) -> None:
        """Threads load `width` bytes each; `threads` are numbered through the blocks.

        With `stores`, a flag for each instruction by which threads store, asynchronous units read for the threads.
        """
        self._access(READ, index, addresses, threads, width, at_once=stores is not None, stores=stores)

    def writes(self, index: int, addresses: Words, threads: Words, width: int, asynchronous: bool = False) -> None:
        """Threads store, or start an asynchronous copy."""
        at_once = asynchronous or not (self._contents is None or self._contents.small)
        self._access(WRITE, index, addresses, threads, width, at_once, asynchronous=asynchronous)

    def updates(self, index: int, addresses: Words, threads: Words, width: int) -> None:
        """Threads update atomically; such accesses do not race with each other."""
        self._access(UPDATE, index, addresses, threads, width)

    def _access(
        self, kind: int, index: int, addresses: Words, threads: Words, width: int, at_once: bool = False, **how: Any
    ) -> None:
        if threads.size <= FEW and not at_once:
            self._wait(kind, index, addresses, threads, width)
        else:
            self._make_ready()
            self._check[kind](index, addresses, threads, width, **how)

    def _wait(self, kind: int, index: int, addresses: Words, threads: Words, width: int) -> None:
        """Leave an access for later."""
        if width < self.granule:
            self.settle()
            self._split(width)
        if kind != READ and kind != self._writes:
            if self._writes != READ:
                self.settle()
            self._writes = kind
            if kind == WRITE and self._contents is not None:
                self._contents.keep()
        if not self._later:
            self._look_at_clocks()
        self._later.append(Later(kind, index, addresses, threads, width, self._barriers, self.event))
        self._of_later += threads.size
        if self._of_later >= TOGETHER:
            self.settle()

    def _meet(self) -> None:
        """All threads are about to meet at a barrier."""
        if self._later:
            self._barriers += 1
            if len(self._written) * (self._barriers + 1) > LARGEST:
                self._barriers -= 1
                self.settle()

    def settle(self) -> None:
        """Check the accesses that wait, before clocks change otherwise than at a barrier of all threads."""
        if not self._later:
            return
        later, self._later, self._of_later = self._later, [], 0
        if len(later) == 1 or not self._pass(self._joined(later)):
            self._check_in_turn(later)
        self._barriers, self._writes = 0, READ
        if self._contents is not None:
            self._contents.forget()

    def _make_ready(self) -> None:
        """Make ready for an access that is checked at once."""
        self.settle()
        self._look_at_clocks()

    def _joined(self, later: Sequence[Later]) -> Joined:
        widths = {access.width for access in later}
        if len(widths) == 1:
            addresses = np.concatenate([access.addresses for access in later])
            threads = np.concatenate([access.threads for access in later])
            places, threads = self._places(addresses, threads, later[0].width)
            count = len(places) // max(len(addresses), 1)
            numbers = numbered(later, [access.threads.size * count for access in later])
        else:
            pairs = [self._places(access.addresses, access.threads, access.width) for access in later]
            places, threads = (np.concatenate(each) for each in zip(*pairs, strict=True))
            numbers = numbered(later, [each.size for each, _ in pairs])
        kinds, indices, barriers = np.array([(access.kind, access.number, access.barriers) for access in later]).T
        own = indices << INDEX_AT | np.where(kinds == UPDATE, ATOMIC, 0)
        stamps = (self._stamps[threads] | own[numbers]) + (barriers << CLOCK_AT)[numbers]
        writing = None if self._writes == READ else (kinds != READ)[numbers]
        return Joined(places, threads, stamps, barriers[numbers], writing, self._writes == UPDATE)

    def _pass(self, joined: Joined) -> bool:
        """Let accesses pass together; False if one of them may conflict."""
        places, stamps, writing = joined.places, joined.stamps, joined.writing
        written = self._written[places]
        if written.min() == 0 and not joined.precedes(written == 0, len(self._written)):
            return False
        if (joined.updates or written.max() >= self._new) and self._may_conflict(joined, written):
            return False
        if writing is None:
            self._keep_read(places, stamps)
            return True
        if self._reads_may_conflict(joined) or joined.conflict(len(self._written)):
            return False
        if joined.updates:
            self._keep_read(places, stamps)
            places, stamps, written = places[writing], stamps[writing], written[writing]
            self._stored[places] = np.where(written & ATOMIC != 0, self._stored[places], written)
            self._written[places] = stamps
        else:
            self._keep_read(places[~writing], stamps[~writing])
            self._written[places[writing]] = stamps[writing]
        return True

    def _may_conflict(self, joined: Joined, written: Words) -> bool:
        """Whether accesses conflict with the last write before them all, or with the one before atomics."""
        if written.max() >= UNDER_WAY:
            return True
        early = joined.early
        places, written, by = joined.places[early], written[early], (joined.threads[early], joined.stamps[early])
        if self._racing(written, *by).any():
            return True
        stored = np.where(written & by[1] & ATOMIC != 0, self._stored[places], 0)
        return bool(self._unordered(stored, *by).any())

    def _reads_may_conflict(self, joined: Joined) -> bool:
        """Whether writes or updates conflict with reads before all these accesses."""
        assert joined.writing is not None
        early = joined.early
        writing = joined.writing[early]
        places, threads, stamps = (each[early][writing] for each in (joined.places, joined.threads, joined.stamps))
        for read in (self._read[places], self._read_too[places]):
            if read.max(initial=0) >= self._new and self._racing(read, threads, stamps).any():
                return True
        return False

    def _check_in_turn(self, later: Sequence[Later]) -> None:
        """Check each access alone, with the clocks that it met, and then return to those of the first."""
        event, ticks = self.event, self._ticks
        before = self._stamps, self._known_by, self._new
        first = self._clocks.clock - self._barriers
        barriers = 0
        for access in later:
            if access.barriers != barriers:
                barriers = access.barriers
                known = first + (barriers - 1)
                self._stamps = before[0] + (barriers << CLOCK_AT)
                self._known_by = np.broadcast_to(known[:, None, :], self._clocks.known.shape).reshape(-1)
                self._new = (int(known.min()) + 1) << CLOCK_AT
            self.event = access.event
            self._check[access.kind](access.number, access.addresses, access.threads, access.width)
            if access.kind == WRITE and self._contents is not None:
                self._contents.overwrite(access.event)
        self.event, self._ticks = event, ticks
        self._stamps, self._known_by, self._new = before

    def forget(self) -> None:
        """Free the memory of all accesses, at the end of the chunk."""
        self._written = self._read = self._read_too = self._stored = self._stamps = np.zeros(0, np.int64)

    def _read_now(self, index: int, addresses: Words, threads: Words, width: int, stores: Flags | None = None) -> None:
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        if stores is not None:
            written = self._written[places]
            fenced = self._clocks.fenced.reshape(-1)[threads // self._threads * self._threads + (written & THREAD)]
            unfenced = stores[written >> INDEX_AT & INDEX] & (written >> CLOCK_AT > fenced) & (written & UNDER_WAY == 0)
            self._emit("unfenced", index, unfenced, places, threads, written)
        self._check_read(index, places, threads, stamps)
        self._keep_read(places, stamps)

    def _write_now(self, index: int, addresses: Words, threads: Words, width: int, asynchronous: bool = False) -> None:
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
        self._check_write(index, places, threads, stamps)
        self._written[places] = stamps | UNDER_WAY if asynchronous else stamps
        last = self._written[places]
        lost = ((last ^ stamps) & THREAD) != 0
        self._emit("clash", index, lost, places, threads, last)

    def _update_now(self, index: int, addresses: Words, threads: Words, width: int) -> None:
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT | ATOMIC
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
        self._make_ready()
        places, threads = self._places(addresses, threads, width)
        self._written[places] = index << INDEX_AT | np.maximum(threads % self._threads, 1)

    def lands(self, index: int, addresses: Words, threads: Words, width: int, then: bool = False) -> None:
        """Copies have landed: they count as written now, or with `then` when they were started."""
        self._make_ready()
        places, threads = self._places(addresses, threads, width)
        stamps = self._stamps[threads] | index << INDEX_AT
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

    def _look_at_clocks(self) -> None:
        """Compute what depends on the clocks, if they have changed."""
        clocks = self._clocks
        if self._ticks == clocks.ticks:
            return
        self._ticks = clocks.ticks
        self._stamps = (np.repeat(clocks.clock << CLOCK_AT, 32, axis=1) | self._lanes).ravel()
        self._known_by = clocks.known.flatten()  # known at the first access that waits
        self._new = 0 if clocks.publishing.releases.partial else (int(clocks.known.min()) + 1) << CLOCK_AT

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
        known = self._known_by[(threads >> 5) * self._warps + ((then & THREAD) >> 5)]
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

    def _check_read(self, index: int, places: Words, threads: Words, stamps: Words) -> None:
        written = self._written[places]
        if written.min() > 0 and written.max() < self._new:
            return
        never, under_way = written == 0, written & UNDER_WAY != 0
        race = self._unordered(written, threads, stamps) & ~under_way
        for kind, faulty in (("uninitialized", never), ("not landed", under_way), ("race", race)):
            self._emit(kind, index, faulty, places, threads, written)

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
