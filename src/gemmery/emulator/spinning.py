"""Loops that wait for another thread, and kernels that never end.

Threads at the lowest instruction run first, so a thread that waits in a loop for a value that another thread or block
writes later keeps that one from running. Such a loop returns to the same registers and memory. Its threads then yield
to the others until those end, wait or loop themselves; if there are none, or if they come to the same state again, the
kernel never ends. An endless loop that changes a register each time ends at the limit of steps.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemmery.errors import EmulationError

if TYPE_CHECKING:
    from gemmery.emulator.simt import Machine

AGAIN = 1 << 4  # basic blocks before the next look after threads have yielded
EVERY = 1 << 10  # basic blocks before the first look, then twice as many, so that a loop of any length is seen
MOST = 10_000_000  # basic blocks that a chunk may execute: some minutes


class Spinning:
    """Keeps the state of the chunk at one time and compares later states with it (Brent's search for a cycle)."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._steps = 0
        self._next = self._gap = EVERY
        self._spins: NDArray[np.bool_] | None = None  # the threads of a loop, from its first return to the next one
        self._yielded: set[bytes] = set()  # the states in which threads yielded
        self._registers: list[Any] = []
        self._memory: list[Any] = []
        self._at: Any = None
        self._differed = 0  # the register that told the last time: mostly the counter of the loop

    def look(self, machine: Machine) -> None:
        """After each basic block; raises EmulationError for a kernel that does not end."""
        self._steps += 1
        if self._steps > self._most:
            raise EmulationError(_too_many(machine, self._most))
        if self._spins is not None:
            self._spins |= True if machine.ran is None else machine.ran
        if self._steps == self._next:
            self._gap *= 2
            self._next = self._steps + self._gap
            self._keep(machine)
        elif self._at is not None and self._same(machine):
            self._returned(machine)

    def _returned(self, machine: Machine) -> None:
        """The state is the kept one: learn which threads loop, then let the others run."""
        if self._spins is None:
            self._spins = np.zeros(machine.threads, bool)
            return
        state = self._digest()
        if state in self._yielded or not _others(machine, self._spins):
            raise EmulationError(_said(machine))
        self._yielded.add(state)
        machine.yielding = self._spins if machine.yielding is None else machine.yielding | self._spins
        self._spins = self._at = None
        self._gap, self._next = AGAIN, self._steps + AGAIN

    def _digest(self) -> bytes:
        """The kept state and the threads that loop, in a few bytes."""
        assert self._spins is not None
        digest = hashlib.blake2b(repr(self._at).encode() + self._spins.tobytes())
        for part in (*self._registers, *self._memory):
            digest.update(np.asarray(part).tobytes())
        return digest.digest()

    def _keep(self, machine: Machine) -> None:
        self._spins = None
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


def _others(machine: Machine, spins: NDArray[np.bool_]) -> bool:
    """Whether threads other than these can run, or leave a barrier."""
    if machine.places is None:
        return False
    if machine.waiting.released(machine.places < machine.program.stop):
        return True
    ready = machine.waiting.ready(machine.places)
    return ready is not None and bool((ready & ~spins).any())


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
        f"threads loop forever at {_line(machine)}: the value they wait for does not change. No other thread can run: "
        "lanes of a warp wait for each other, or the thread that would change it belongs to a block that starts when "
        "these have ended; wait with a barrier or an mbarrier, or emulate writing and waiting code as two kernels"
    )


def _too_many(machine: Machine, most: int) -> str:
    return (
        f"the kernel did not end within {most:,} steps, and loops at {_line(machine)}: check the loop's end condition; "
        "if the kernel does end, pass a larger max_steps="
    )
