"""Loops that wait for another thread, and kernels that never end.

Threads at the lowest instruction run first, so a thread that waits in a loop for a value that another thread or block
writes later keeps that one from running. Such a loop returns to the same registers and memory. Its threads then yield
to the others until those end, wait or loop themselves; if there are none, or if they come to the same state again, the
kernel never ends. A loop that also counts its turns comes to no earlier state: threads that have changed no memory for
many steps yield to warps that could have run. An endless loop of this kind ends at the limit of steps.
"""

from __future__ import annotations

import hashlib
import time
from math import inf
from typing import Any

import numpy as np

from gemmery.banks import WARP
from gemmery.errors import EmulationError
from gemmery_emulator.lower import LoweredKernel
from gemmery_emulator.machine import Machine
from gemmery_emulator.memory import Space, is_as_remembered, remembered
from gemmery_emulator.op import Flags, Mask
from gemmery_emulator.waiting import Waiting

AGAIN = 1 << 4  # basic blocks before the next look after threads have yielded
EVERY = 1 << 10  # basic blocks before the first look, then twice as many, so that a loop of any length is seen
READING = frozenset(
    ("ld", "ldu", "atom", "mbarrier", "tex", "suld", "shfl", "vote", "match", "redux", "bar", "barrier")
)
LIMIT = 10_000_000  # basic blocks that a chunk may execute: some minutes


class Spinning:
    """Keeps the state of the chunk at one time and compares later states with it (Brent's search for a cycle)."""

    def __init__(
        self, machine: Machine, waiting: Waiting, program: LoweredKernel, limit: int = LIMIT, seconds: float = inf
    ) -> None:
        self._machine, self._waiting, self._program = machine, waiting, program
        self._limit, self._seconds, self._end = limit, seconds, time.thread_time() + seconds
        self._turn: set[int] = set()  # the basic blocks of the loop
        self._steps = 0
        self._next = self._gap = EVERY
        self._spins: Flags | None = None  # the threads of a loop, from its first return to the next one
        self._yielded: set[bytes] = set()  # the states in which threads yielded
        self._registers: list[Any] = []
        self._memory: list[Any] | None = None  # None if it is kept at the first return to the same registers
        self._at: Any = None
        self._changes = 0  # `machine.changes` when the state was kept
        self._since: Flags | None = None  # the threads that have run since
        self._differed = 0  # the register that told the last time: mostly the counter of the loop

    def look(self, ran: Mask) -> None:
        """After each basic block, which these threads ran; raises EmulationError for a kernel that does not end."""
        self._steps += 1
        if self._steps > self._limit:
            raise EmulationError(_too_many(self._line(), f"{self._limit:,} steps", "max_steps"))
        if self._steps & 63 == 0 and time.thread_time() > self._end:
            raise EmulationError(_too_many(self._line(), f"{self._seconds:g} seconds", "seconds"))
        if self._spins is not None:
            self._spins |= True if ran is None else ran
            self._turn.add(self._machine.places.at)
        if self._since is not None:
            self._since |= True if ran is None else ran
        if self._steps == self._next:
            self._yield_idle()
            self._gap *= 2
            self._next = self._steps + self._gap
            self._keep()
        elif self._at is not None and self._same():
            self._returned()

    def _returned(self) -> None:
        """The state is the one that was kept: learn which threads loop, then let the others run."""
        if self._spins is None:
            self._spins = np.zeros(self._machine.threads, bool)
            self._turn = set()
            return
        state, waiting = self._digest(), self._waiting
        if state in self._yielded or not self._others(self._spins):
            raise EmulationError(_endless(self._line(), self._reads()))
        self._yielded.add(state)
        waiting.yielding = self._spins if waiting.yielding is None else waiting.yielding | self._spins
        self._spins = self._at = None
        self._gap, self._next = AGAIN, self._steps + AGAIN

    def _yield_idle(self) -> None:
        """Let other warps run if these have changed no memory since the state was kept."""
        machine, waiting = self._machine, self._waiting
        if self._since is None or self._changes != machine.changes or machine.places.each is None:
            return
        ran = np.repeat(self._since.reshape(-1, WARP).any(axis=1), WARP)
        if self._memory is None or not self._same_memory() or not self._others(ran):
            return
        waiting.yielding = ran if waiting.yielding is None else waiting.yielding | ran
        self._gap = AGAIN

    def _digest(self) -> bytes:
        """The kept state and the threads that loop, in a few bytes."""
        assert self._spins is not None
        assert self._memory is not None
        digest = hashlib.blake2b(repr(self._at).encode() + self._spins.tobytes())
        for part in (*self._registers, *self._memory):
            digest.update(part if isinstance(part, bytes) else np.asarray(part).tobytes())
        return digest.digest()

    def _keep(self) -> None:
        self._spins = None
        self._at = self._place()
        self._registers = list(self._machine.registers)  # never written in place
        self._memory = None  # most loops count in a register, and need neither copy nor hash while threads are together
        if self._machine.places.each is not None:
            self._keep_memory()
        self._changes, self._since = self._machine.changes, np.zeros(self._machine.threads, bool)

    def _same(self) -> bool:
        now, then, differed = self._machine.registers, self._registers, self._differed
        if differed < len(now) and not _equal(now[differed], then[differed]):
            return False
        if self._place() != self._at:
            return False
        for number, pair in enumerate(zip(now, then, strict=True)):
            if not _equal(*pair):
                self._differed = number
                return False
        return self._same_memory()

    def _keep_memory(self) -> None:
        self._memory = [remembered(space.data) for space in self._spaces()]

    def _same_memory(self) -> bool:
        if self._memory is None:
            self._keep_memory()
            return False
        return all(
            is_as_remembered(space.data, before) for space, before in zip(self._spaces(), self._memory, strict=True)
        )

    def _spaces(self) -> tuple[Space, ...]:
        return self._machine.shared, self._machine.local, self._machine.memory

    def _others(self, spins: Flags) -> bool:
        """Whether threads other than these can run, or leave a barrier."""
        places = self._machine.places
        if places.each is None:
            return False
        if self._waiting.at_barriers.release(places.running()):
            return True
        ready = self._waiting.ready()
        return ready is not None and bool((ready & ~spins).any())

    def _place(self) -> Any:
        """Where the threads are, which of them wait, and how often an mbarrier has changed."""
        machine, places = self._machine, self._machine.places
        if places.each is None:
            return places.at, machine.changes
        ready = self._waiting.ready()
        return places.each.tobytes(), machine.changes, None if ready is None else ready.tobytes()

    def _reads(self) -> bool:
        """Whether the loop reads what another thread may write."""
        blocks = (self._program.blocks[at] for at in self._turn if at < self._program.stop)
        opcodes = (
            each.opcode for block in blocks for each in self._machine.kernel.instructions[block.first : block.last]
        )
        return any(each.family in READING and each.space not in ("param", "const", "local") for each in opcodes)

    def _line(self) -> str:
        block = self._program.blocks[self._machine.places.at]
        return str(self._machine.kernel.instructions[block.first].line)


def _equal(value: Any, other: Any) -> bool:
    """The same bits, NaN or not; as an array or as one number."""
    if value is other:
        return True
    if value.shape == other.shape:
        same: bool = value.tobytes() == other.tobytes()
        return same
    bits = f"u{value.itemsize}"
    return bool((value.view(bits) == other.view(bits)).all())


def _endless(line: str, reads: bool) -> str:
    if not reads:
        return (
            f"the loop at {line} does not end: nothing in it changes its condition; check the condition, and the step"
        )
    return (
        f"threads loop forever at {line}: the value they wait for does not change. No other thread can run: "
        "lanes of a warp wait for each other, or the thread that would change it belongs to a block that starts when "
        "these have ended; wait with a barrier or an mbarrier, or emulate writing and waiting code as two kernels"
    )


def _too_many(line: str, limit: str, option: str) -> str:
    return (
        f"the kernel did not end within {limit}, and is at {line}: check the end condition of the loop there; if the "
        f"kernel does end, pass a larger {option}="
    )
