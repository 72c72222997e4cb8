"""Synchronization between threads by atomics in global memory, with release and acquire or with fences.

Each address has a log of releases for all blocks, and one for the threads of each block. An entry holds the releasing
block and the clock of each of its warps up to which the release covers their accesses. A block that acquires knows the
log up to that point, and what the releasing blocks knew. Knowledge is kept per block: what one thread acquires counts
as known to its whole block. A block that knows more than 128 logs counts as knowing everything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gemmery_emulator.findings.orders import Words
from gemmery_emulator.findings.publishing import Releases
from gemmery_emulator.op import Flags, Indices

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

    def known(self, blocks: Words, warps: Words, lanes: Words, clocks: Words, each: int) -> Flags:
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
