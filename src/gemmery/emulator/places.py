"""Where threads are: the basic block that each one executes next."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator.op import Flags, Mask


class Places:
    """The basic blocks of a chunk's threads: one number while all are together, else one per thread."""

    def __init__(self, threads: int, stop: int) -> None:
        self.at = 0  # the block of the latest step; of all threads while `each` is None
        self.each: NDArray[np.int32] | None = None
        self.stop = stop  # the block of threads that have ended
        self._threads = threads

    def part(self) -> NDArray[np.int32]:
        """The blocks of all threads, as an array from now on."""
        if self.each is None:
            self.each = np.full(self._threads, self.at, np.int32)
        return self.each

    def go(self, mask: Mask, block: int) -> None:
        """Send threads to a block."""
        if mask is None and self.each is None:
            self.at = block
        else:
            self.part()[slice(None) if mask is None else mask] = block

    def running(self) -> Flags:
        """The threads that have not ended."""
        if self.each is None:
            return np.full(self._threads, self.at != self.stop)
        return self.each < self.stop
