"""Kernels that never end: a chunk of blocks returns to a state that it was in before, or takes too many steps.

Threads at the lowest instruction run first, so a thread that waits in a loop for a value that another thread or block
writes later keeps that one from running. Such a loop returns to the same registers and memory. An endless loop that
changes a register each time does not, and ends at the limit of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gemmery.errors import EmulationError

if TYPE_CHECKING:
    from gemmery.emulator.simt import Machine

EVERY = 1 << 10  # basic blocks before the first look, then twice as many, so that a loop of any length is seen
MOST = 10_000_000  # basic blocks that a chunk may execute: some minutes


class Spinning:
    """Keeps the state of the chunk at one time and compares later states with it (Brent's search for a cycle)."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._steps = 0
        self._next = EVERY
        self._registers: list[Any] = []
        self._memory: list[Any] = []
        self._at: Any = None
        self._differed = 0  # the register that told the last time: mostly the counter of the loop

    def look(self, machine: Machine) -> None:
        """After each basic block; raises EmulationError for a kernel that does not end."""
        self._steps += 1
        if self._steps > self._most:
            raise EmulationError(_too_many(machine, self._most))
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


def _line(machine: Machine) -> str:
    return str(machine.kernel.instructions[machine.program.blocks[machine.at].first].line)


def _said(machine: Machine) -> str:
    return (
        f"threads loop forever at {_line(machine)}: the value they wait for does not change. The emulator runs the "
        "threads at the lowest instruction first, and some of the blocks at a time, so the thread that would change it "
        "never runs; wait with a barrier or an mbarrier, or emulate the writing and the waiting code as two kernels"
    )


def _too_many(machine: Machine, most: int) -> str:
    return (
        f"the kernel did not end within {most:,} steps, and loops at {_line(machine)}: check the loop's end condition; "
        "if the kernel does end, pass a larger max_steps="
    )
