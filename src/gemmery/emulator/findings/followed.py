"""The blocks whose shared memory is followed: while all blocks of a chunk do the same, one of them stands for all."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery.banks import WARP
from gemmery.emulator.findings.clocks import Clocks, Words
from gemmery.emulator.findings.races import History
from gemmery.emulator.machine import Machine
from gemmery.emulator.op import Flags, Mask


class Followed:
    """The blocks of a chunk that are followed; `alike` is the number of blocks that each of them stands for."""

    def __init__(self, machine: Machine, clocks: Clocks, *histories: History) -> None:
        self.alike = machine.blocks
        self.clocks, self.histories = clocks, list(histories)
        self._every = np.arange(machine.threads)
        self._threads, self._block_threads = machine.threads, machine.block_threads

    def warps(self, mask: Mask) -> Flags:
        """The warps of a mask: (blocks, warps)."""
        if mask is None:
            return np.ones(self.clocks.clock.shape, np.bool_)
        warps: Flags = np.any(self.lanes(mask), axis=2)
        return warps

    def lanes(self, mask: Mask) -> Flags:
        """The lanes of a mask: (blocks, warps, 32)."""
        if mask is not None and self.alike > 1:
            rows = mask.reshape(self.alike, -1)
            if (rows == rows[0]).all():
                mask = rows[0]
            else:
                self._spread()
        shape = (*self.clocks.clock.shape, WARP)
        return np.ones(shape, np.bool_) if mask is None else mask.reshape(shape)

    def warps_of(self, threads: Words) -> Flags:
        """The warps of these threads, numbered through the blocks that are followed."""
        warps: Flags = np.zeros(self.clocks.clock.shape, np.bool_)
        warps.reshape(-1)[threads // WARP] = True
        return warps

    def active(self, addresses: Any, mask: Mask) -> tuple[Words, Words]:
        """The active threads and their addresses; those of the followed block alone while all blocks do the same."""
        block_threads = self._block_threads
        if self.alike > 1:
            rows = addresses.reshape(-1, block_threads) if addresses.ndim else addresses
            masks = None if mask is None else mask.reshape(-1, block_threads)
            same: Any = rows == rows[0] if addresses.ndim else np.True_
            if masks is not None:
                same = (same | ~masks) if (masks == masks[0]).all() else np.False_
            if same.all():
                mask = None if masks is None else masks[0]
                addresses = rows[0] if addresses.ndim else rows
            else:
                self._spread()
        threads = self._every[: self.clocks.blocks * block_threads] if mask is None else mask.nonzero()[0]
        if not addresses.ndim:
            return threads, np.full(threads.shape, addresses, np.int64)
        return threads, addresses if mask is None else addresses[mask]

    def listed(self, threads: Words, addresses: Words) -> tuple[Words, Words]:
        """The same for threads listed by number; each is listed once while one block stands for all."""
        if self.alike > 1:
            mask = np.zeros(self._threads, bool)
            spread = np.zeros(self._threads, np.int64)
            mask[threads], spread[threads] = True, addresses
            if np.count_nonzero(mask) == len(threads):
                return self.active(spread, mask)
            self._spread()
        return threads, addresses

    def pieces(self, threads: Words, addresses: Words) -> tuple[Words, Words]:
        """The same for threads of which each has several addresses: (threads, addresses)."""
        count = addresses.shape[1]
        if self.alike > 1:
            rows = np.column_stack([threads, addresses])
            blocks = rows.reshape(self.alike, -1, count + 1) if len(rows) % self.alike == 0 else rows[None, :0]
            blocks[..., 0] -= np.arange(len(blocks))[:, None] * self._block_threads
            if blocks.size and (blocks == blocks[0]).all():
                threads, addresses = blocks[0, :, 0], blocks[0, :, 1:]
            else:
                self._spread()
        return np.repeat(threads, count), addresses.ravel()

    def _spread(self) -> None:
        """Follow each block from now on."""
        if self.alike > 1:
            for history in self.histories:
                history.spread(self.alike)
            self.clocks.spread(self.alike)
            self.alike = 1
