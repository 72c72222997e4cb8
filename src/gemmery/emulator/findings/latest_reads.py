"""The latest plain reads of global memory, which no table has yet because a write of the same threads may follow.

A thread that reads places and then writes them, as in `x[i] *= 2`, needs one stamp for both: what races with the read
races with the write too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gemmery.emulator.findings.clocks import Words

MOST = 2  # reads: one of a chunk takes some MiB


@dataclass(frozen=True)
class ReadPlaces:
    """Threads of a chunk have read places, from `low` to `high`."""

    access: int
    places: Words
    stamps: Words
    low: int
    high: int

    def touches(self, low: int, high: int) -> bool:
        """Whether it may have read a place from `low` to `high`."""
        return self.low <= high and low <= self.high


class LatestReads:
    """The reads in turn; `keep` puts one into a table."""

    def __init__(self, keep: Callable[[ReadPlaces], None]) -> None:
        self._keep = keep
        self._reads: list[ReadPlaces] = []

    def add(self, read: ReadPlaces) -> None:
        """Threads read."""
        self._reads.append(read)
        if len(self._reads) > MOST:
            self._keep(self._reads.pop(0))

    def before(self, write: ReadPlaces, thread_at: int) -> ReadPlaces | None:
        """The read of what the same threads now write, if it is the latest one there and at the same clocks."""
        for read in reversed(self._reads):
            if read.touches(write.low, write.high):
                same = np.array_equal(read.places, write.places)
                return read if same and not np.count_nonzero((read.stamps ^ write.stamps) >> thread_at) else None
        return None

    def settle(self, low: int, high: int, spared: ReadPlaces | None = None) -> None:
        """Keep the reads up to the last one from `low` to `high`, but for one that is later than these."""
        touched = (number for number, read in enumerate(self._reads, 1) if read.touches(low, high))
        count = max((number for number in touched if self._reads[number - 1] is not spared), default=0)
        reads, self._reads = self._reads[:count], self._reads[count:]
        for read in reads:
            self._keep(read)

    def settle_all(self) -> None:
        """Keep all reads."""
        reads, self._reads = self._reads, []
        for read in reads:
            self._keep(read)

    def drop(self, read: ReadPlaces) -> None:
        """Forget a read."""
        self._reads = [each for each in self._reads if each is not read]
