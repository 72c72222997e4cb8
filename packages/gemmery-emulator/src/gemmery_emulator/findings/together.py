"""Accesses to shared memory that wait and are checked together, which a launch of few threads needs to be fast.

Between two barriers of all threads a place may be read by all, updated atomically by all, or used by one thread; what
came before the barrier cannot conflict. Such accesses pass together, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gemmery_emulator.findings.orders import Words
from gemmery_emulator.machine import Access, Machine
from gemmery_emulator.memory import Bytes, Space
from gemmery_emulator.op import Flags

READ, WRITE, UPDATE = range(3)
SMALL = 1 << 16  # bytes of shared memory that may be copied for stores that wait


class Later(NamedTuple):
    """An access that waits."""

    kind: int  # READ, WRITE or UPDATE
    number: int  # of the instruction
    addresses: Words
    threads: Words
    width: int
    barriers: int  # of all threads, since the first access that waits
    event: Access | None


@dataclass(frozen=True)
class Joined:
    """Accesses one after the other, one element for each place of each thread."""

    places: Words
    threads: Words
    stamps: Words
    barriers: Words  # before each, since the first
    writing: Flags | None  # writes and updates; None if there are none
    updates: bool  # whether these are updates, and not writes

    @property
    def early(self) -> slice:
        """Those before the first barrier."""
        return slice(int(np.searchsorted(self.barriers, 1)))

    def conflict(self, places: int) -> bool:
        """Whether two of them may, of `places` in all: at one place between two barriers, by different threads."""
        if self.writing is None:
            return False
        keys = self.places + self.barriers * places
        table = np.zeros((int(self.barriers[-1]) + 1) * places, np.int32)
        if self.updates:
            table[keys[self.writing]] = 1
            return bool(table[keys[~self.writing]].any())
        table[keys[self.writing]] = self.threads[self.writing] + 1
        writers = table[keys]
        return bool(((writers != 0) & (writers != self.threads + 1)).any())

    def precedes(self, unset: Flags, places: int) -> bool:
        """Whether a write comes before each read of `unset`, places that nothing had written."""
        if self.writing is None or self.updates:
            return False
        count = len(self.places)
        first = np.full(places, count)
        at = np.flatnonzero(self.writing)[::-1]
        first[self.places[at]] = at
        return not (unset & ~self.writing & (first[self.places] > np.arange(count))).any()


def numbered(later: Sequence[Later], sizes: Sequence[int]) -> Words:
    """The number of the access that each of its elements belongs to."""
    return np.repeat(np.arange(len(later)), sizes)


class Contents:
    """Shared memory as it was before each store that waits, to compare it with the value stored."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._kept: Bytes | None = None
        self.small = machine.shared.data.size <= SMALL

    @property
    def data(self) -> Bytes:
        """The bytes before the store that is being checked."""
        return self._machine.shared.data if self._kept is None else self._kept

    def keep(self) -> None:
        """Keep the present bytes: the first store that waits comes next."""
        self._kept = self._machine.shared.data.copy()

    def forget(self) -> None:
        """No store waits any more."""
        self._kept = None

    def overwrite(self, event: Access | None) -> None:
        """Repeat a store on the kept bytes, once it has been checked."""
        if self._kept is not None and event is not None and event.kind == "st":
            kind = event.values[0].dtype.str
            memory = Space(self._kept, self._machine.shared.base)
            memory.store(event.addresses, event.values, event.mask, kind, event.width, self._machine.threads)
