"""The machine itself: runs all threads of a chunk of blocks in lock step, those at the lowest instruction first.

Where threads diverge, those at the lowest basic block run first, so they converge where their paths join; barriers hold
threads until no other thread can run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.banks import WARP
from gemmery_emulator import specials
from gemmery_emulator.blocks import Block
from gemmery_emulator.lower import LoweredKernel
from gemmery_emulator.machine import LaunchConfig, Machine, Observer, Observers, Places, UnitState, report_misuse
from gemmery_emulator.memory import Global, Own
from gemmery_emulator.op import Flags, Indices, Mask, Values, lowest, warps_in
from gemmery_emulator.spinning import LIMIT, Spinning
from gemmery_emulator.waiting import Waiting


class LockStep:
    """One chunk of blocks; `run` executes it to its end."""

    def __init__(
        self,
        program: LoweredKernel,
        launch: LaunchConfig,
        memory: Global,
        block_ids: Indices,
        observers: Sequence[Observer] = (),
        warp_order: np.random.Generator | None = None,
        max_steps: int = LIMIT,
        seconds: float = inf,
        ahead: int = 0,
    ) -> None:
        self.kernel, self.slots, self.followed = program.kernel, program.slots, program.followed
        self.launch = launch
        self.block_ids = block_ids
        self.blocks: int = len(block_ids)
        self.block_threads: int = -(-launch.block_threads // WARP) * WARP
        self.threads: int = self.blocks * self.block_threads
        self.warps: int = self.threads // WARP
        self.memory = memory
        self.shared = Own(self.blocks, specials.shared_bytes(self, program.provided), self.threads)
        local = program.kernel.local
        self.local = Own(self.threads if local else 1, local, self.threads)  # no part for each thread if there is none
        self.parameters = np.frombuffer(launch.parameters or b"\0", np.uint8)
        self.observers = Observers(())
        self._observers = tuple(observers)
        self.registers = list(program.zeros)
        for name, slot in program.provided.items():
            self.registers[slot] = specials.value(self, name)
        self.places = Places(self.threads, program.stop)
        self.failed: Any = False
        self.elapsed = self.changes = 0
        self.at_end: list[Callable[[], None]] = []
        self._units: dict[Callable[[Machine], Any], Any] = {}
        self._program = program
        self._waiting = Waiting(self, program)
        self._limits = max_steps, seconds
        self._ended = 0  # the number of the instruction after the latest step
        self._ran: Mask = None  # the threads of the latest step
        self._order: Indices | None = None
        idle = np.arange(self.threads) % self.block_threads >= launch.block_threads
        if idle.any():
            self.places.each = np.where(idle, program.stop, 0).astype(np.int32)
        if warp_order is not None:
            self._order = self._shuffled(warp_order)
            self.places.part()
        elif ahead:
            self._order = (np.arange(self.threads) % self.block_threads >= ahead).astype(np.int64)
            self.places.part()

    def _shuffled(self, generator: np.random.Generator) -> Indices:
        """The turn of each thread: warp by warp, or by warpgroups if the kernel has instructions of warpgroups."""
        gathered = (block.gathering.threads for block in self._program.blocks if block.gathering is not None)
        together, warps = max(gathered, default=WARP) // WARP, self.block_threads // WARP
        turns = generator.permutation(self.blocks * -(-warps // together)).reshape(self.blocks, -1)
        return np.repeat(np.repeat(turns, together, axis=1)[:, :warps], WARP)

    def unit(self, kind: Callable[[Machine], UnitState]) -> UnitState:
        """The state of a unit, made when it is first asked for."""
        if kind not in self._units:
            self._units[kind] = kind(self)
        state: UnitState = self._units[kind]
        return state

    def spread(self, value: Values) -> NDArray[Any]:
        """A value as an array with one element per thread."""
        array: NDArray[Any] = value
        if not value.ndim:  # filling an array is faster if there are few threads
            few = self.threads <= 1 << 11
            array = np.full(self.threads, value) if few else np.broadcast_to(value, (self.threads,))
        return array

    def run(self) -> None:
        """Run every thread to its end."""
        for observer in self._observers:
            observer.start(self)
        self.observers = Observers([part for observer in self._observers for part in observer.parts()])
        spinning = Spinning(self, self._waiting, self._program, *self._limits)
        while self._step():
            spinning.look(self._ran)
        for finish in self.at_end:
            finish()
        self.observers.finish(self)
        self.registers.clear()
        self.shared.release()
        self.local.release()

    def _step(self) -> bool:
        """Execute one basic block of the threads whose turn it is; False when all have ended."""
        places, stop = self.places, self._program.stop
        if places.each is None:
            if places.at == stop:
                return False
            self._execute(self._program.blocks[places.at], None, places.at)
            return True
        ready = self._waiting.turn()
        if ready is None:
            return self._waiting.resolve()
        if self._order is not None:
            rank = np.where(ready, self._order, self.warps)
            ready = rank == rank.min()
        every = np.count_nonzero(ready) == self.threads
        at = lowest(places.each if every else np.where(ready, places.each, stop))
        there: Flags = places.each == at
        if not every:
            there &= ready  # the block of a thread at a barrier is already the next one
        mask: Mask = None if np.count_nonzero(there) == self.threads else there
        if mask is None:
            places.each = None
        places.at, self._ran = at, mask
        self._execute(self._program.blocks[at], mask, at)
        if self._order is not None:
            places.part()
        return True

    def _execute(self, block: Block, mask: Mask, at: int) -> None:
        if block.gathering is not None and mask is not None:
            mask = self._waiting.gather(block.gathering, mask)
            if not np.count_nonzero(mask):
                return
        warps, threads = self.warps, self.threads
        if mask is not None:
            warps, threads = warps_in(mask), int(np.count_nonzero(mask))
        self.observers.executed(self, block.first, block.last, warps, threads)
        self.elapsed += self._ended - block.first
        for step in block.steps:
            step(self, mask)
        self._ended = block.last
        if block.waits:
            mask = self._waiting.sleep(mask)
            if mask is not None and not np.count_nonzero(mask):
                return
        if not block.way:
            self.places.go(mask, at + 1)
        elif block.way == "branch":
            self._branch(block, mask, at, block.targets[0])
        elif block.way == "switch":
            self._switch(block, mask)
        elif block.way == "barrier":
            self._waiting.at_barriers.arrive(block.last - 1, mask, at)
        else:
            if block.way == "trap":
                self._trap(block, mask)
            self._branch(block, mask, at, self._program.stop)

    def _branch(self, block: Block, mask: Mask, at: int, target: int) -> None:
        if block.guard is None:
            self.places.go(mask, target)
            return
        goes = block.guard(self.registers)
        self.observers.branch(self, block.last - 1, goes, mask)
        if not goes.ndim:
            self.places.go(mask, target if goes else at + 1)
            return
        going = goes if mask is None else goes & mask
        count = np.count_nonzero(going)
        if not count:
            self.places.go(mask, at + 1)
        elif count == (self.threads if mask is None else np.count_nonzero(mask)):
            self.places.go(mask, target)
        else:
            self.places.go(mask, at + 1)
            self.places.part()[going] = target

    def _switch(self, block: Block, mask: Mask) -> None:
        assert block.guard is not None
        cases = np.minimum(self.spread(block.guard(self.registers)), len(block.targets) - 1)
        blocks = np.array(block.targets, np.int32)[cases]
        self.places.each = blocks if mask is None else np.where(mask, blocks, self.places.part())

    def _trap(self, block: Block, mask: Mask) -> None:
        """Threads trap: a device stops the launch; here they end, and the observers are told."""
        traps = np.ones(self.threads, bool) if block.guard is None else self.spread(block.guard(self.registers))
        threads = np.flatnonzero(traps if mask is None else traps & mask)
        text, what = self.kernel.instructions[block.last - 1].text, "traps"
        if "__assertfail" in text:
            what = "fails an assert()"
        elif "call" in text:
            what = "calls through a pointer that holds the address of no function of its prototype"
        report_misuse(self, block.last - 1, threads, f"{what}: on a device the launch ends here with an error")
