"""The arrays of compiled blocks, which one chunk leaves to the next: fresh pages cost more than a short launch."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from gemmery_emulator.kernels.native.frames import ADDRESSES, ENTRIES, ENTRY, LANES, SLOTS, WIDEST

KEPT = 2  # sets of arrays that wait for the next chunk
LINE = 64  # bytes of a line of a cache
APART = LINE * 9  # bytes between registers beyond their values, so that they do not share lines of a cache's set
_waiting: list[Buffers] = []
_lock = threading.RLock()


class Buffers:
    """Arrays for so many threads and registers; `entries`, `slots` and what follows the flags are 0 in between."""

    def __init__(self, threads: int, registers: int) -> None:
        self.threads = threads
        row = 8 * threads + APART
        room = np.empty(registers * row + LINE, np.uint8)
        start = -room.__array_interface__["data"][0] % LINE
        self.rows = room[start : start + registers * row].reshape(registers, row)
        self.places = np.zeros(threads, np.int32)
        self.mask, self.ran, self.goes = np.zeros((3, threads + LANES), np.uint8)
        self.full = np.ones(threads + LANES, np.uint8)
        self.sources, self.bases, *self.addresses = np.zeros((2 + len(ADDRESSES), threads), np.int64)
        self.reads = np.zeros(threads, np.uint8)
        self._copies: tuple[NDArray[np.int64], NDArray[np.uint8]] | None = None
        self.lanes, self.every_lane = np.zeros(threads + 1, np.int32), np.arange(threads, dtype=np.int32)
        self.touched = np.empty((4, 32 * threads), np.int64)
        self.entries = np.zeros((ENTRIES + 1, ENTRY), np.int64)
        self.slots = np.zeros(SLOTS, np.int32)
        self.found, self.read_found = np.zeros((2, threads // 32), np.int64)

    def copies(self, room: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return where the bytes of so many copies go, and the bytes."""
        if self._copies is None:
            rows = np.empty((room, self.threads), np.int64), np.empty((room, self.threads * WIDEST), np.uint8)
            self._copies = rows
        return self._copies

    @staticmethod
    def for_threads(threads: int, registers: int) -> Buffers:
        """Return arrays that nobody uses."""
        with _lock:
            for number, each in enumerate(_waiting):
                if each.threads == threads and len(each.rows) >= registers:
                    return _waiting.pop(number)
        return Buffers(threads, registers)

    def give_back(self) -> None:
        """Leave the arrays to the next chunk."""
        with _lock:
            _waiting.append(self)
            del _waiting[:-KEPT]
