"""Threads that wait: at barriers, for an mbarrier's phase, or for other lanes of their warp.

A barrier is checked when no thread can run: by then every thread that will arrive has arrived. Barriers do not wait for
threads that have ended.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.banks import WARP
from gemmery_emulator import convergence
from gemmery_emulator.control import WHOLE_WARP, LoweredBarrier, Reduction
from gemmery_emulator.convergence import Gathering
from gemmery_emulator.lower import LoweredKernel
from gemmery_emulator.machine import Machine, report_misuse
from gemmery_emulator.op import Flags, Indices, Mask


class Waiting:
    """The threads that wait, and where."""

    def __init__(self, machine: Machine, program: LoweredKernel) -> None:
        self.at_barriers = AtBarriers(machine, program)
        self.yielding: Mask = None  # threads that loop until another one writes, and let the others run
        self._machine = machine
        self._program = program
        self._asleep = False  # whether any thread sleeps, for an mbarrier or for lanes of its warp
        self._sleeping = np.zeros(0, bool)
        self._changes_seen = 0  # `machine.changes` when threads were last put to sleep
        self._alive = -1  # threads that had not ended when sleeping threads were last woken for that reason
        self._woken = 0, b""  # `machine.changes` and all places when threads that wait for lanes were last woken
        self._forced = False  # whether the next basic block runs without the missing lanes

    @property
    def plainly(self) -> bool:
        """Whether threads wait at barriers alone."""
        return not self._asleep and self.yielding is None and not self._forced

    def ready(self) -> Mask:
        """The threads that can run; None if there are none."""
        machine = self._machine
        if self._asleep and machine.changes != self._changes_seen:
            self._sleeping[:] = False
            self._asleep = False
        ready = machine.places.running()
        if self.at_barriers.parked.size:
            ready &= ~self.at_barriers.parked
        if self._asleep:
            ready &= ~self._sleeping
        return ready if np.count_nonzero(ready) else None

    def turn(self) -> Mask:
        """The threads whose turn it is: those that can run and do not yield; None if none can run."""
        ready = self.ready()
        if ready is None or self.yielding is None:
            return ready
        others = ready & ~self.yielding
        if not np.count_nonzero(others) and self.at_barriers.release(self._machine.places.running()):
            ready = self.ready()
            assert ready is not None
            others = ready & ~self.yielding
        if np.count_nonzero(others):
            return others
        self.yielding = None
        return ready

    def gather(self, gathering: Gathering, mask: Flags) -> Flags:
        """Put threads to sleep whose lanes have not all arrived; return those that go on."""
        if self._forced:
            self._forced = False
            return mask
        waits = convergence.absent(self._machine, gathering, mask)
        if not np.count_nonzero(waits):
            return mask
        self._put_to_sleep(waits)
        return mask & ~waits

    def sleep(self, mask: Mask) -> Mask:
        """Put the threads whose wait failed to sleep; return those that go on."""
        machine = self._machine
        failed = np.broadcast_to(machine.failed, (machine.threads,))
        machine.failed = np.False_  # a guarded wait that no thread executes leaves no result
        if mask is not None:
            failed = failed & mask
        if not np.count_nonzero(failed):
            return mask
        self._put_to_sleep(failed)
        return ~failed if mask is None else mask & ~failed

    def _put_to_sleep(self, threads: Flags) -> None:
        machine = self._machine
        machine.places.part()
        if not self._sleeping.size:
            self._sleeping = np.zeros(machine.threads, bool)
        self._sleeping |= threads
        self._asleep = True
        self._changes_seen = machine.changes

    def resolve(self) -> bool:
        """Complete barriers when no thread can run; False if all threads have ended or wait forever."""
        machine = self._machine
        alive = machine.places.running()
        if not np.count_nonzero(alive):
            return False
        if self.at_barriers.release(alive):
            return True
        if self._asleep and np.count_nonzero(alive) != self._alive:  # a thread that ended may have been waited for
            self._alive = int(np.count_nonzero(alive))
            machine.changes += 1
            return True
        places = machine.places.part()
        if self._asleep and self._wake_gathering(places):
            return True
        stuck = self.at_barriers.stuck()
        if self._asleep:
            for place in np.unique(places[self._sleeping]).tolist():
                stuck.append((self._program.blocks[place].first, self._sleeping & (places == place)))
        for index, mask in stuck:
            barrier = self._program.barriers.get(index)
            members = None if barrier is None or barrier.members is None else self.at_barriers.members(mask)
            machine.observers.deadlock(machine, index, mask, members)
        places[alive] = machine.places.stop
        return False

    def _wake_gathering(self, places: NDArray[np.int32]) -> bool:
        """Wake threads that wait for lanes; if nothing has changed since the last time, they go on without them."""
        gathers = np.array([block.gathering is not None for block in self._program.blocks])
        waiting = self._sleeping & gathers[np.minimum(places, len(gathers) - 1)]
        if not waiting.any():
            return False
        state = self._machine.changes, places.tobytes()
        self._forced, self._woken = state == self._woken, state
        self._sleeping &= ~waiting
        self._asleep = bool(self._sleeping.any())
        return True


class AtBarriers:
    """The threads that wait at barriers of their block or warp, and the arrivals of those that did not wait."""

    def __init__(self, machine: Machine, program: LoweredKernel) -> None:
        self.parked = np.zeros(0, bool)
        self._machine = machine
        self._barriers = program.barriers
        self._at = np.zeros(0, np.int32)  # index of the barrier instruction
        self._number = np.zeros(0, np.int32)
        self._counts: dict[int, Indices] = {}  # by barrier for each block: the threads that were named, and where
        self._arrived: dict[int, Indices] = {}  # barrier -> threads per block that arrived without waiting

    def arrive(self, index: int, mask: Mask, at: int) -> None:
        """Threads reach the barrier that ends basic block `at`."""
        machine, barrier = self._machine, self._barriers[index]
        if barrier.members is not None and machine.observers:
            convergence.check_barrier(machine, index, mask, barrier.members(machine.registers))
        number = self._numbers(barrier, mask)
        if barrier.members is None and machine.observers:
            self._check_count(index, barrier, mask, number)
        if barrier.arrives:
            self._count(index, mask, number)
            machine.places.go(mask, at + 1)
            return
        if mask is None and not number.ndim and barrier.count is None and self._are_whole(barrier):
            if barrier.reduction is not None:
                self._reduce(barrier.reduction, None)
            machine.observers.barrier(machine, index, int(number), None)
            machine.places.go(None, at + 1)
            return
        machine.places.part()
        machine.places.go(mask, at + 1)
        if not self.parked.size:
            self.parked = np.zeros(machine.threads, bool)
            self._at = np.zeros(machine.threads, np.int32)
            self._number = np.zeros(machine.threads, np.int32)
        threads: Any = slice(None) if mask is None else mask
        self.parked[threads] = True
        self._at[threads] = index
        self._number[threads] = number[threads] if number.ndim else number

    def _are_whole(self, barrier: LoweredBarrier) -> bool:
        """Whether a barrier that all threads of the chunk reach together is one of whole warps, or of blocks."""
        if barrier.members is None or not self._machine.observers:
            return True
        return bool((barrier.members(self._machine.registers) == np.uint32(0xFFFFFFFF)).all())

    def release(self, alive: Flags) -> bool:
        """Complete the barriers that all threads have reached; False if there is none."""
        moved = False
        if np.count_nonzero(self.parked):
            for number in np.unique(self._number[self.parked]).tolist():
                moved |= self._complete(number, alive)
        return moved

    def stuck(self) -> list[tuple[int, Flags]]:
        """The barrier instructions at which threads wait, and their threads; if any are of warps, only those."""
        if not self.parked.any():
            return []
        barriers = np.unique(self._at[self.parked]).tolist()
        of_warps = [index for index in barriers if self._barriers[index].members is not None]
        # Threads at the block's barrier wait for those at a warp's.
        return [(index, self.parked & (self._at == index)) for index in of_warps or barriers]

    def members(self, waiting: Flags) -> NDArray[np.uint32]:
        """The member masks of the threads that wait at bar.warp.sync."""
        machine = self._machine
        members = np.zeros(machine.threads, np.uint32)
        for index in np.unique(self._at[waiting]).tolist():
            read = self._barriers[index].members
            assert read is not None
            threads = waiting & (self._at == index)
            members[threads] = machine.spread(read(machine.registers))[threads]
        return members

    def _complete(self, number: int, alive: Flags) -> bool:
        """Release the blocks (the warps) whose threads have all arrived."""
        waiting = self.parked & (self._number == number)
        if number != WHOLE_WARP:
            return self._let_go(number, waiting, alive)
        moved = False
        members = self.members(waiting)
        for mask in np.unique(members[waiting]):  # parts of a warp may wait separately
            lanes = mask >> (np.arange(self._machine.threads) % WARP).astype(np.uint32) & 1 == 1
            moved |= self._let_go(number, waiting & (members == mask), alive & lanes)
        return moved

    def _let_go(self, number: int, waiting: Flags, awaited: Flags) -> bool:
        """Release the waiting threads of blocks (of warps) in which all awaited threads have arrived."""
        machine = self._machine
        group = WARP if number == WHOLE_WARP else machine.block_threads
        shape = (-1, group)
        arrived = waiting.reshape(shape).sum(axis=1)
        needed = awaited.reshape(shape).sum(axis=1)
        index = int(self._at[waiting][0])
        barrier = self._barriers[index]
        if barrier.count is not None:
            needed = np.full(len(arrived), machine.spread(barrier.count(machine.registers))[waiting][0], np.int64)
            arrived = arrived + self._arrived.get(number, 0)
        done = (arrived >= needed) & (waiting.reshape(shape).any(axis=1))
        if not done.any():
            return False
        leave = waiting & np.repeat(done, group)
        if barrier.reduction is not None:
            self._reduce(barrier.reduction, leave)
        together = (
            group if barrier.count is None else WARP
        )  # warps of different roles may meet at a barrier they count for
        first = np.where(leave, self._at, np.iinfo(np.int32).max).reshape(-1, together).min(axis=1)
        apart = leave & (self._at != np.repeat(first, together))
        for place in np.unique(self._at[apart]).tolist():
            opcode = machine.kernel.instructions[place].opcode
            if opcode.family == "barrier" and "aligned" not in opcode.modifiers:  # which may stand at several places
                apart &= self._at != place
        if apart.any() and number != WHOLE_WARP:  # lanes may meet at different instructions
            machine.observers.diverged(machine, int(self._at[apart][0]), apart)
        machine.observers.barrier(machine, index, number, leave)
        if number in self._arrived:
            self._arrived[number][done] = 0
        if number in self._counts:
            self._counts[number][:, done] = 0
        self.parked &= ~leave
        return True

    def _reduce(self, reduction: Reduction, leave: Mask) -> None:
        """Write the combined predicates of their block for the threads that leave bar.red."""
        machine = self._machine
        predicate = machine.spread(reduction.predicate(machine.registers))
        leaving = np.ones(machine.threads, bool) if leave is None else leave
        true = (predicate & leaving).reshape(machine.blocks, -1).sum(axis=1)
        all_ = leaving.reshape(machine.blocks, -1).sum(axis=1)
        result = {"popc": true.astype(np.uint32), "and": true == all_, "or": true > 0}[reduction.way]
        reduction.write(machine.registers, leave, np.repeat(result, machine.block_threads))

    def _check_count(self, index: int, barrier: LoweredBarrier, mask: Mask, numbers: Any) -> None:
        """Report a count of threads that is no multiple of 32, or another than at the instruction before."""
        machine, each = self._machine, self._machine.block_threads
        if barrier.count is None and (numbers.ndim or int(numbers) not in self._counts):
            return
        count = np.uint32(each) if barrier.count is None else barrier.count(machine.registers)
        own, active = machine.spread(count), np.ones(machine.threads, bool) if mask is None else mask
        for number in np.unique(numbers[active] if numbers.ndim else numbers).tolist():
            threads = active & (numbers == number)
            known = self._counts.setdefault(number, np.zeros((2, machine.blocks), np.int64))
            counts, places = np.repeat(known, each, axis=1)
            uneven, apart = threads & ((own % WARP != 0) | (own == 0)), threads & (counts != own) & (counts != 0)
            for bad in (uneven, apart):
                if bad.any():
                    first = int(bad.argmax())
                    other = f"{machine.kernel.instructions[places[first]].line} names {counts[first]}: name the same"
                    why = f"a multiple of {WARP} is needed" if bad is uneven else other
                    what = f"names {own[first]} threads for barrier {number}, and {why}"
                    report_misuse(machine, index, np.flatnonzero(bad), what)
            fresh = threads.reshape(machine.blocks, -1).any(axis=1) & (known[0] == 0)
            known[0, fresh] = np.where(threads, own, 0).reshape(machine.blocks, -1).max(axis=1)[fresh]
            known[1, fresh] = index

    def _count(self, index: int, mask: Mask, numbers: Any) -> None:
        """bar.arrive: count the threads, which do not wait."""
        machine = self._machine
        active = np.ones(machine.threads, bool) if mask is None else mask
        for number in np.unique(numbers[active] if numbers.ndim else numbers).tolist():
            threads = active & (numbers == number)
            arrived = self._arrived.setdefault(number, np.zeros(machine.blocks, np.int64))
            arrived += threads.reshape(machine.blocks, -1).sum(axis=1)
            machine.observers.barrier(machine, index, number, threads)

    def _numbers(self, barrier: LoweredBarrier, mask: Mask) -> Any:
        """Barrier numbers: one for all threads of the mask, or one per thread."""
        if barrier.number is None:
            return np.int32(WHOLE_WARP)
        values = barrier.number(self._machine.registers).astype(np.int32)
        active = values[mask] if values.ndim and mask is not None else values
        return active[0] if active.ndim and (active == active[0]).all() else values
