"""cp.async: copies to shared memory under way, by thread and group. A copy lands when its thread waits for it.

PTX ISA 9.0, "Data Movement and Conversion Instructions: Non-bulk copy".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator.machine import Machine
from gemmery.emulator.op import Mask


@dataclass(frozen=True)
class Copy:
    """The copies of one instruction, for the threads that executed it."""

    index: int  # of the instruction
    rows: NDArray[np.int64]  # places in the chunk's shared memory, in rows of `data`
    addresses: NDArray[np.int64]  # the same as byte offsets in the block's part
    data: NDArray[Any]  # (copies, width) bytes
    threads: NDArray[np.int64]
    group: Any  # group of each copy's thread, from 0; an int while all agree

    def only(self, some: NDArray[np.bool_]) -> Copy:
        """Return the selected copies."""
        group = self.group if isinstance(self.group, int) else self.group[some]
        return Copy(self.index, self.rows[some], self.addresses[some], self.data[some], self.threads[some], group)


class Copies:
    """The copies under way of a chunk of blocks."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.committed: Any = 0  # groups of each thread; an int while all agree
        self.bytes = 0  # of data that has not landed
        self._under_way: list[Copy] = []

    def add(self, copy: Copy) -> None:
        """Start copies; they belong to the group that their threads commit next."""
        group = self.committed if isinstance(self.committed, int) else self.committed[copy.threads]
        self._under_way.append(replace(copy, group=group))
        self.bytes += copy.data.nbytes

    def commit(self, mask: Mask) -> None:
        """Close the group of these threads."""
        if mask is None:
            self.committed = self.committed + 1
            return
        if isinstance(self.committed, int):
            self.committed = np.full(self._machine.threads, self.committed, np.int64)
        self.committed = self.committed + mask

    def wait(self, mask: Mask, pending: int) -> None:
        """Land all groups of these threads except the latest `pending` ones."""
        newest = self.committed - 1 - pending
        pending_copies = []
        for copy in self._under_way:
            ready = copy.group <= (newest if isinstance(newest, int) else newest[copy.threads])
            if mask is not None:
                ready = ready & mask[copy.threads]
            if np.ndim(ready) == 0:
                if ready:
                    _land(self._machine, copy)
                else:
                    pending_copies.append(copy)
                continue
            if ready.any():
                _land(self._machine, copy.only(ready))
            if not ready.all():
                pending_copies.append(copy.only(~ready))
        self._under_way = pending_copies
        self.bytes = sum(copy.data.nbytes for copy in pending_copies)

    def wait_all(self, mask: Mask) -> None:
        """Land all copies of these threads."""
        self.commit(mask)
        self.wait(mask, 0)


def _land(machine: Machine, copy: Copy) -> None:
    for observer in machine.observers:
        observer.landed(machine, copy.index, copy.addresses, copy.threads)
    machine.shared.view("u1", copy.data.shape[1])[copy.rows] = copy.data
