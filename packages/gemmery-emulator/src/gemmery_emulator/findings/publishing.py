"""What some lanes of a warp publish of the other lanes' writes: those before the lanes have last waited for each other.

A warp that acquires what another has released knows its clock (orders.py). But a release of some lanes, or their fence
and store, covers what the others write only up to the last __syncwarp(), barrier, shuffle or the like. A release that
leaves out a write is kept under the warp and its clock: whoever knows exactly this clock knows less of some lanes.
"""

from __future__ import annotations

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
