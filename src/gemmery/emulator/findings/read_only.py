"""Loads by way of the read-only cache (ld.global.nc) of what the launch has stored before.

PTX ISA 9.0, "ld.global.nc": the cache is not coherent, so the load may return the value from before the store, whatever
orders the two. `__ldg()` and pointers that are `const __restrict__` compile to it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gemmery.emulator.findings import messages
from gemmery.emulator.findings.clocks import Words
from gemmery.emulator.findings.finding import Collection
from gemmery.emulator.findings.orders import UPDATES
from gemmery.emulator.findings.pointers import Reach
from gemmery.emulator.machine import Access, Machine, Pieces
from gemmery.emulator.ptx import Opcode

_WAY_OUT = (
    "it may get the value from before the store: load it plainly, without __ldg(), and without const __restrict__ at a "
    "pointer to what the kernel writes"
)


class ReadOnlyLoads:
    """The last store to each granule of global memory, in kernels that may load it by way of the read-only cache."""

    def __init__(self, machine: Machine, reach: Reach, collection: Collection) -> None:
        self._collection = collection
        kernel = machine.kernel
        stores = [
            index
            for index, instruction in enumerate(kernel.instructions)
            if reach.followed[index] and _stores(instruction.opcode)
        ]
        self._loads = {
            index
            for index, instruction in enumerate(kernel.instructions)
            if reach.followed[index] and instruction.opcode.name == "ld" and "nc" in instruction.opcode.modifiers
        }
        self._stores = stores if self._loads else []
        self._number = {index: number for number, index in enumerate(self._stores, 1)}
        widths = [kernel.instructions[index].opcode.type for index in (*self._stores, *self._loads)]
        self._granule = 1 if any(kind.endswith(("8", "16")) for kind in widths) else 4
        size = machine.memory.data.size // self._granule + 1 if self._loads else 0
        self._stored = np.zeros(size, np.min_scalar_type(len(self._stores)))  # numbers of stores; 0 for none

    def access(self, machine: Machine, event: Access) -> None:
        """Threads access global memory."""
        if event.kind == "bulk":
            return
        if event.index in self._number:
            _, places = self._places(machine, event)
            self._stored[places] = self._number[event.index]
        elif event.index in self._loads:
            threads, places = self._places(machine, event)
            stored = self._stored[places].max(axis=1)
            for number in np.unique(stored[stored > 0]).tolist():
                these, other = np.flatnonzero(stored == number), self._stores[number - 1]
                thread, first = int(threads[these[0]]), places[these[0]]
                where = int(first[self._stored[first].argmax()]) * self._granule
                text = (
                    f"{messages.thread(machine, thread)} reads {messages.address(machine, 'global', where)} by way of "
                    f"the read-only cache, after the store at {messages.line_of(machine, other)}; {_WAY_OUT}"
                )
                self._collection.add(machine, "misuse", event.index, thread, len(these), text, other)

    def transferred(self, index: int, pieces: Callable[[], Pieces]) -> None:
        """Bulk copies write global memory."""
        if index in self._number:
            _, addresses, width = pieces()
            places = addresses[:, None] // self._granule + np.arange(max(width // self._granule, 1))
            self._stored[places] = self._number[index]

    def _places(self, machine: Machine, event: Access) -> tuple[Words, Words]:
        """The threads of an access, and the granules of each."""
        threads = np.arange(machine.threads) if event.mask is None else np.flatnonzero(event.mask)
        first = machine.spread(event.addresses)[threads] // self._granule
        return threads, first[:, None] + np.arange(max(event.width // self._granule, 1))


def _stores(opcode: Opcode) -> bool:
    """Whether it writes global memory: a store, an atomic, or a bulk copy out of shared memory."""
    return opcode.name == "st" or opcode.family in UPDATES or (opcode.is_bulk and "bulk_group" in opcode.modifiers)
