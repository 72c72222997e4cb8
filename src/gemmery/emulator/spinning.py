"""Kernels that would never end: what a chunk of blocks is made of has come back, and nothing has changed in between.

Threads at the lowest instruction go first, so that one that waits in a loop for what another thread writes later, or
another block, keeps that one from coming. A loop that does not end but changes a register each time is not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmery.errors import EmulationError

if TYPE_CHECKING:
    from gemmery.emulator.simt import Machine

EVERY = 1 << 10  # basic blocks before the first look, then twice as many, so that a loop of any length is seen


class Spinning:
    """Keeps what the chunk was at one time, and compares (Brent's search for a cycle)."""

    def __init__(self) -> None:
        self._steps = 0
        self._next = EVERY
        self._registers: list[Any] = []
        self._memory: list[Any] = []
        self._at: Any = None
        self._differed = 0  # the register that told the last time: mostly the counter of the loop

    def look(self, machine: Machine) -> None:
        """After each basic block; raises EmulationError when all is as it was."""
        self._steps += 1
        if self._steps == self._next:
            self._next *= 2
            self._keep(machine)
        elif self._at is not None and self._same(machine):
            raise EmulationError(_said(machine))

    def _keep(self, machine: Machine) -> None:
        self._at = _place(machine)
        self._registers = list(machine.registers)  # never written in place
        self._memory = [space.data.copy() for space in (machine.shared, machine.local, machine.memory)]

    def _same(self, machine: Machine) -> bool:
        pairs = list(zip(machine.registers, self._registers, strict=True))
        if not all(_equal(*pair) for pair in pairs[self._differed :][:1]) or _place(machine) != self._at:
            return False
        for number, pair in enumerate(pairs):
            if not _equal(*pair):
                self._differed = number
                return False
        spaces = machine.shared, machine.local, machine.memory
        return all(np.array_equal(space.data, data) for space, data in zip(spaces, self._memory, strict=True))


def _equal(one: Any, other: Any) -> bool:
    """The same bits, NaN or not; as an array or as one number."""
    if one is other:
        return True
    return bool(np.all(one.view(f"u{one.itemsize}") == other.view(f"u{other.itemsize}")))


def _place(machine: Machine) -> Any:
    """Where the threads are, which of them wait, and how often an mbarrier has changed."""
    if machine.places is None:
        return machine.at, machine.waiting.changes
    ready = machine.waiting.ready(machine.places)
    return machine.places.tobytes(), machine.waiting.changes, None if ready is None else ready.tobytes()


def _said(machine: Machine) -> str:
    line = machine.kernel.instructions[machine.program.blocks[machine.at].first].line
    return (
        f"threads loop at {line} for ever: what they wait for does not change. Threads at the lowest instruction run "
        "first here, and a part of the blocks at a time, so that whoever would change it does not come; wait with a "
        "barrier or an mbarrier, or emulate what writes and what waits as two kernels"
    )
