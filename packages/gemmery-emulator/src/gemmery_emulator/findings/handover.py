"""What threads pass on to others: by atomics in global memory, and of what the other lanes of their warp have written.

Each address has a log of releases for all blocks, and one for the threads of each block. An entry holds the releasing
block and the clock of each of its warps up to which the release covers their accesses. A block that acquires knows the
log up to that point, and what the releasing blocks knew. Knowledge is kept per block: what one thread acquires counts
as known to its whole block. A block that knows more than 128 logs counts as knowing everything.

A warp that acquires what another has released knows its clock (orders.py). But a release of some lanes, or their fence
and store, covers what the others write only up to the last __syncwarp(), barrier, shuffle or the like. A release that
leaves out a write is kept under the warp and its clock: whoever knows exactly this clock knows less of some lanes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gemmery.banks import WARP
from gemmery_emulator.op import Flags, Indices, Mask


class Releases:
    """The releases of a launch that leave out writes, by warp, numbered through the launch, and clock."""

    def __init__(self) -> None:
        self.partial: dict[tuple[int, int], tuple[int, Indices]] = {}  # the instruction, and the clocks it covers
        self.missed: dict[tuple[int, int], int] = {}  # the instructions that left out a write, by its lane and clock

    def leave_out(self, warp: int, known: int, lane: int, clock: int) -> bool:
        """Return whether a write is unknown to a warp that has seen `known` of another one; lane -1 is no write."""
        index, covered = self.partial.get((warp, known), (0, None))
        if covered is None or lane < 0 or covered[lane] >= clock:
            return False
        self.missed[lane, clock] = index
        return True

    def left_out(self, *queries: Indices) -> Flags:
        """Return the same for many writes."""
        self.missed.clear()
        return np.array(list(map(self.leave_out, *np.stack(queries).tolist())), np.bool_)


class Publishing:
    """The lanes of the warps of some blocks, which have these clocks: (blocks, warps)."""

    def __init__(self, blocks: int, warps: int) -> None:
        self.releases, self.first = Releases(), 0  # of the launch, and the number of the first warp there
        # When each lane has last waited for others or published by itself, and when it wrote.
        self.waited, self.wrote = np.zeros((2, blocks, warps, WARP), np.int64)
        self._writes = set[int]()  # instructions
        self._fresh = False  # whether any lane may have written since it met others

    def write(self, index: int, mask: Mask, clocks: Indices) -> None:
        """Threads write to memory, of all blocks or of those that are followed."""
        self._writes.add(index)
        self._fresh = True
        if mask is None or mask.size == self.wrote.size:
            lanes: Any = True if mask is None else mask.reshape(self.wrote.shape)
        else:
            lanes = np.any(mask.reshape(-1, *self.wrote.shape), axis=0)
        np.copyto(self.wrote, clocks[..., None], where=lanes)

    def meet(self, lanes: Flags, clocks: Indices) -> None:
        """Lanes (blocks, warps, 32), or whole warps, have waited for others, before their clocks advance."""
        np.copyto(self.waited, clocks[..., None], where=lanes.reshape(*clocks.shape, -1))

    def matters(self) -> bool:
        """Whether releases may leave out writes, or have."""
        self._fresh = self._fresh and bool(np.count_nonzero(self.wrote > self.waited))
        return self._fresh or bool(self.releases.partial)

    def publish(self, index: int, threads: Indices, clocks: Indices) -> None:
        """Threads, of all blocks or of those that are followed, release what their warps did up to these clocks."""
        if not clocks.any():
            return
        lanes = np.zeros((clocks.size, WARP), np.bool_)
        lanes.reshape(-1)[threads] = True
        warps = np.flatnonzero(np.any(lanes, axis=1))
        waited, wrote = self.waited.reshape(-1, WARP), self.wrote.reshape(-1, WARP)
        followed, until = warps % len(waited), clocks[warps][:, None]
        covered = np.where(lanes[warps], np.maximum(waited[followed], until), waited[followed])
        if clocks.size > len(waited):  # one block stands for all
            np.maximum.at(waited, followed, covered)
        else:
            waited[warps] = covered
        late = (covered < until) & (wrote[followed] > covered)
        self.releases.missed.clear()
        for row in range(len(warps)) if self.releases.partial or late.any() else ():
            key = self.first + int(warps[row]), int(until[row, 0])
            self.releases.partial.pop(key, None)
            if late[row].any():
                self.releases.partial[key] = index, np.where(late[row], covered[row], until[row])

    def lanes(self, threads: Indices, instructions: Indices) -> Indices:
        """The lanes of earlier accesses; -1 of reads, which may come before a meeting where no clock has advanced."""
        return np.where(np.isin(instructions, list(self._writes)), threads & 31, -1)


LogKey = tuple[int, int]  # an address, and the number of a block; -1 for all blocks
Known = dict[LogKey, int]  # key -> known entries of its log
MOST = 128  # logs of which a block keeps apart how much it knows
EVERYTHING: LogKey = (-1, -1)  # the one key of a block that knows more


@dataclass
class Log:
    """The releases to one key."""

    length: int = 0
    only: tuple[int, int] | None = None  # the block and thread, if a single one has released
    entries: dict[int, tuple[list[int], list[Indices]]] = field(default_factory=dict)  # of each block
    known: Known = field(default_factory=dict)  # what the releasing blocks knew

    def add(self, block: int, clocks: Indices) -> None:
        """Append a release."""
        places, vouched = self.entries.setdefault(block, ([], []))
        if vouched and (clocks <= vouched[-1]).all():
            return
        places.append(self.length)
        vouched.append(np.maximum(vouched[-1], clocks) if vouched else clocks)
        self.length += 1

    def vouched(self, length: int, block: int, warp: int) -> int:
        """The clock up to which the first `length` entries cover a warp of a block; -1 if none is of the block."""
        places, vouched = self.entries.get(block, ([], []))
        count = bisect_left(places, length)
        return int(vouched[count - 1][warp]) if count else -1


class Handover:
    """The logs of a launch, and how much of them each block of the chunk knows."""

    def __init__(self) -> None:
        self.releases = Releases()
        self._logs: dict[LogKey, Log] = {}
        self._addresses: set[int] = set()  # of the logs
        self._knows: dict[int, Known] = {}  # by block of the chunk, from 0
        self._received: dict[int, Known] = {}  # received by relaxed atomics, known after the next fence

    @property
    def any(self) -> bool:
        """Whether anything has been released."""
        return bool(self._logs)

    @property
    def knows_any(self) -> bool:
        """Whether any block of the chunk has acquired."""
        return bool(self._knows)

    def addresses(self) -> Indices:
        """The addresses to which anything has been released."""
        return np.array(list(self._addresses), np.int64)

    def start(self) -> None:
        """Start a chunk of blocks; logs of earlier blocks' own threads stay if other blocks may know them."""
        self._knows, self._received = {}, {}
        passed_on = {key for (_, block), log in self._logs.items() if block < 0 for key in log.known}
        self._logs = {key: log for key, log in self._logs.items() if key[1] < 0 or key in passed_on}
        self._addresses = {address for address, _ in self._logs}

    def acquire(self, key: LogKey, block: int, thread: tuple[int, int], by_fence: bool) -> None:
        """A block reads atomically: it knows the log now, or after its next fence."""
        log = self._logs.get(key)
        if log is None or log.only == thread:  # its own releases tell it nothing
            return
        known = (self._received if by_fence else self._knows).setdefault(block, {})
        if EVERYTHING in known:
            return
        _join(known, log.known)
        known[key] = log.length

    def fence(self, blocks: Sequence[int], own: bool) -> None:
        """Blocks execute a fence, for all threads or only for their `own`."""
        for block in blocks if self._received else ():
            if received := self._received.get(block):
                passed = {key: length for key, length in received.items() if not own or key[1] >= 0}
                _join(self._knows.setdefault(block, {}), passed)

    def release(self, key: LogKey, block: int, thread: tuple[int, int], clocks: Indices) -> None:
        """A block, with this number in the launch, writes atomically and covers its warps up to these clocks."""
        if not clocks.any():
            return
        if (log := self._logs.get(key)) is None:
            log = self._logs[key] = Log(only=thread)
            self._addresses.add(key[0])
        if log.only != thread:
            log.only = None
        log.add(thread[0], clocks)
        _join(log.known, self._knows.get(block, {}))

    def observed(self, block: int, address: int, number: int) -> bool:
        """Whether a block has acquired a release of another block, by number, to this address itself."""
        known = self._knows.get(block, {})
        if EVERYTHING in known:
            return True
        for start in {address, address & ~3, address & ~7}:  # a granule may be narrower than the atomic
            log, length = self._logs.get((start, -1)), known.get((start, -1), 0)
            if log is not None and log.vouched(length, number, 0) >= 0:
                return True
        return False

    def known(self, blocks: Indices, warps: Indices, lanes: Indices, clocks: Indices, each: int) -> Flags:
        """Whether blocks of the chunk know clocks of lanes, of warps numbered through the launch, `each` of a block."""
        queries = np.stack([blocks, warps, lanes, clocks])
        unique, back = np.unique(queries, axis=1, return_inverse=True)
        answers = [
            any(
                key == EVERYTHING
                or (
                    (until := self._logs[key].vouched(length, warp // each, warp % each)) >= clock
                    and not self.releases.leave_out(warp, until, lane, clock)
                )
                for key, length in self._knows.get(block, {}).items()
            )
            for block, warp, lane, clock in unique.T.tolist()
        ]
        known: Flags = np.array(answers, np.bool_)[back.reshape(-1)]
        return known


def _join(known: Known, other: Known) -> None:
    if EVERYTHING in known:
        return
    for key, length in other.items():
        known[key] = max(known.get(key, 0), length)
    if EVERYTHING in known or len(known) > MOST:
        known.clear()
        known[EVERYTHING] = 0
