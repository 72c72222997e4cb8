"""The machine itself: runs all threads of a chunk of blocks in lock step, those at the lowest instruction first.

Where threads diverge, those at the lowest basic block run first, so they converge where their paths join; barriers hold
threads until no other thread can run.

So a thread that waits in a loop for a value that another thread or block writes later keeps that one from running. Such
a loop returns to the same registers and memory. Its threads then yield to the others until those end, wait or loop
themselves; if there are none, or if they come to the same state again, the kernel never ends. A loop that also counts
its turns comes to no earlier state: threads that have changed no memory for many steps yield to warps that could have
run. An endless loop of this kind ends at the limit of steps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.banks import WARP
from gemmery.errors import EmulationError
from gemmery_emulator import specials
from gemmery_emulator.lower import Block, Engine, LoweredKernel
from gemmery_emulator.machine import LaunchConfig, Machine, Observer, Observers, Places, UnitState, report_misuse
from gemmery_emulator.memory import Global, Own, Space, is_as_remembered, remembered
from gemmery_emulator.op import Flags, Indices, Mask, Values, lowest, warps_in
from gemmery_emulator.waiting import Waiting

AGAIN = 1 << 4  # basic blocks before the next look after threads have yielded
EVERY = 1 << 10  # basic blocks before the first look, then twice as many, so that a loop of any length is seen
READING = frozenset(
    ("ld", "ldu", "atom", "mbarrier", "tex", "suld", "shfl", "vote", "match", "redux", "bar", "barrier")
)
LIMIT = 10_000_000  # basic blocks that a chunk may execute: some minutes


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
        self.watching = tuple(observers)  # those that asked to be told of events
        self.registers = list(program.zeros)
        for name, slot in program.provided.items():
            self.registers[slot] = specials.value(self, name)
        self.places = Places(self.threads, program.stop)
        self.ran: Mask = None
        self.failed: Any = False
        self.elapsed = self.changes = 0
        self.at_end: list[Callable[[], None]] = []
        self._units: dict[Callable[[Machine], Any], Any] = {}
        self.program = program
        self.waiting = Waiting(self, program)
        self._limits = max_steps, seconds
        self.ended = 0  # the number of the instruction after the latest step
        self._engine: Engine | None = None  # what runs compiled blocks
        self._ran: Mask = None  # the threads of the latest step
        self._order: Indices | None = None
        idle = np.arange(self.threads) % self.block_threads >= launch.block_threads
        if idle.any():
            self.places.each = np.where(idle, program.stop, 0).astype(np.int32)
        if warp_order is not None:
            # Warp by warp, or by warpgroups if the kernel has instructions of warpgroups.
            gathered = (block.gathering.threads for block in program.blocks if block.gathering is not None)
            together, warps = max(gathered, default=WARP) // WARP, self.block_threads // WARP
            turns = warp_order.permutation(self.blocks * -(-warps // together)).reshape(self.blocks, -1)
            self._order = np.repeat(np.repeat(turns, together, axis=1)[:, :warps], WARP)
            self.places.part()
        elif ahead:
            self._order = (np.arange(self.threads) % self.block_threads >= ahead).astype(np.int64)
            self.places.part()

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
        for observer in self.watching:
            observer.start(self)
        self.observers = Observers([part for observer in self.watching for part in observer.parts()])
        spinning = Spinning(self, *self._limits)
        if self.program.engine is not None and self._order is None:
            self._engine = self.program.engine(self)
        while True:
            if self._engine is not None and (steps := self._engine.run(spinning.allowance())):
                spinning.look(self._engine.ran, steps)
            elif self._step():
                spinning.look(self._ran)
            else:
                break
        if self._engine is not None:
            self._engine.finish()
            self._engine = None
        for finish in self.at_end:
            finish()
        self.observers.finish(self)
        self.registers.clear()
        self.shared.release()
        self.local.release()

    def waits_plainly(self) -> bool:
        """Whether threads wait at barriers alone, and the lowest instruction comes first."""
        return self._order is None and self.waiting.plainly

    def current_registers(self) -> list[Any]:
        """The registers, up to date."""
        if self._engine is not None:
            self._engine.lend_all()
        return self.registers

    def _step(self) -> bool:
        """Execute one basic block of the threads whose turn it is; False when all have ended."""
        places, stop = self.places, self.program.stop
        if places.each is None:
            if places.at == stop:
                return False
            self._execute(self.program.blocks[places.at], None, places.at)
            return True
        ready = self.waiting.turn()
        if ready is None:
            return self.waiting.resolve()
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
        self._execute(self.program.blocks[at], mask, at)
        if self._order is not None:
            places.part()
        return True

    def _execute(self, block: Block, mask: Mask, at: int) -> None:
        if self._engine is not None:
            self._engine.lend(at)
        if block.gathering is not None and mask is not None:
            mask = self.waiting.gather(block.gathering, mask)
            if not np.count_nonzero(mask):
                return
        warps, threads = self.warps, self.threads
        if mask is not None:
            warps, threads = warps_in(mask), int(np.count_nonzero(mask))
        self.ran = mask
        self.observers.executed(self, block.first, block.last, warps, threads)
        self.elapsed += self.ended - block.first
        for step in block.steps:
            step(self, mask)
        self.ended = block.last
        self.end_block(block, mask, at)

    def end_block(self, block: Block, mask: Mask, at: int) -> None:
        """Send the threads that have executed a block on."""
        if block.waits:
            mask = self.waiting.sleep(mask)
            if mask is not None and not np.count_nonzero(mask):
                return
        if not block.way:
            self.places.go(mask, at + 1)
        elif block.way == "branch":
            self._branch(block, mask, at, block.targets[0])
        elif block.way == "switch":
            assert block.guard is not None
            cases = np.minimum(self.spread(block.guard(self.registers)), len(block.targets) - 1)
            targets = np.array(block.targets, np.int32)[cases]
            self.places.each = targets if mask is None else np.where(mask, targets, self.places.part())
        elif block.way == "barrier":
            self.waiting.at_barriers.arrive(block.last - 1, mask, at)
        else:
            if block.way == "trap":
                self._trap(block, mask)
            self._branch(block, mask, at, self.program.stop)

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


class Spinning:
    """Keeps the state of the chunk at one time and compares later states with it (Brent's search for a cycle)."""

    def __init__(self, machine: LockStep, limit: int = LIMIT, seconds: float = inf) -> None:
        self._machine, self._waiting, self._program = machine, machine.waiting, machine.program
        self._limit, self._seconds, self._end = limit, seconds, time.thread_time() + seconds
        self._spaces: tuple[Space, ...] = machine.shared, machine.local, machine.memory
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

    def allowance(self) -> int:
        """How many basic blocks may run before the next look.

        For a while after the state was kept each of them is looked at: a loop comes back to it in that time, or in the
        longer one after the next state.
        """
        since = self._steps - (self._next - self._gap)
        if self._spins is not None or (self._at is not None and since < max(self._gap >> 8, AGAIN)):
            return 1
        return min(self._next - self._steps, self._limit - self._steps + 1)

    def look(self, ran: Mask, steps: int = 1) -> None:
        """After basic blocks, which these threads ran; raises EmulationError for a kernel that does not end."""
        self._steps += steps
        if self._steps > self._limit:
            raise self._too_many(f"{self._limit:,} steps", "max_steps")
        if (steps > 1 or self._steps & 63 == 0) and time.thread_time() > self._end:
            raise self._too_many(f"{self._seconds:g} seconds", "seconds")
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
        elif steps == 1 and self._at is not None and self._same():
            self._returned()

    def _returned(self) -> None:
        """The state is the one that was kept: learn which threads loop, then let the others run."""
        if self._spins is None:
            self._spins = np.zeros(self._machine.threads, bool)
            self._turn = set()
            return
        assert self._memory is not None
        digest = hashlib.blake2b(repr(self._at).encode() + self._spins.tobytes())
        for part in (*self._registers, *self._memory):
            digest.update(part if isinstance(part, bytes) else np.asarray(part).tobytes())
        state, waiting = digest.digest(), self._waiting
        if state in self._yielded or not self._others(self._spins):
            raise self._endless()
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

    def _keep(self) -> None:
        self._spins = None
        self._at = self._place()
        self._registers = list(self._machine.current_registers())  # never written in place
        self._memory = None  # most loops count in a register, and need neither copy nor hash while threads are together
        if self._machine.places.each is not None:
            self._keep_memory()
        self._changes, self._since = self._machine.changes, np.zeros(self._machine.threads, bool)

    def _same(self) -> bool:
        now, then, differed = self._machine.current_registers(), self._registers, self._differed
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
        self._memory = [remembered(space.data) for space in self._spaces]

    def _same_memory(self) -> bool:
        if self._memory is None:
            self._keep_memory()
            return False
        return all(map(is_as_remembered, (space.data for space in self._spaces), self._memory))

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

    def _line(self) -> str:
        # The place is behind the last block where the latest step ended the kernel.
        at = min(self._machine.places.at, self._program.stop - 1)
        block = self._program.blocks[at]
        return str(self._machine.kernel.instructions[block.first].line)

    def _endless(self) -> EmulationError:
        """An error that depends on whether the loop reads what another thread may write."""
        blocks = (self._program.blocks[at] for at in self._turn if at < self._program.stop)
        instructions = self._machine.kernel.instructions
        opcodes = (each.opcode for block in blocks for each in instructions[block.first : block.last])
        if any(each.family in READING and each.space not in ("param", "const", "local") for each in opcodes):
            return EmulationError(
                f"threads loop forever at {self._line()}: the value they wait for does not change. No other thread can "
                "run: lanes of a warp wait for each other, or the thread that would change it belongs to a block that "
                "starts when these have ended; wait with a barrier or an mbarrier, or emulate writing and waiting code "
                "as two kernels"
            )
        return EmulationError(
            f"the loop at {self._line()} does not end: nothing in it changes its condition; check the condition, and "
            "the step"
        )

    def _too_many(self, limit: str, option: str) -> EmulationError:
        return EmulationError(
            f"the kernel did not end within {limit}, and is at {self._line()}: check the end condition of the loop "
            f"there; if the kernel does end, pass a larger {option}="
        )


def _equal(value: Any, other: Any) -> bool:
    """The same bits, NaN or not; as an array or as one number."""
    if value is other:
        return True
    if value.shape == other.shape:
        same: bool = value.tobytes() == other.tobytes()
        return same
    bits = f"u{value.itemsize}"
    return bool((value.view(bits) == other.view(bits)).all())
