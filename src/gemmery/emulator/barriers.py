"""Threads that wait: at barriers of a block or a warp, for an mbarrier's phase, or for other lanes of their warp.

PTX ISA 9.0, "bar", "barrier", "bar.warp.sync". A barrier is checked when no thread can run: by then every thread
that will arrive has arrived. Barriers do not wait for threads that have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gemmery.emulator import convergence
from gemmery.emulator.op import Mask
from gemmery.emulator.ptx import Immediate, Instruction, Register

if TYPE_CHECKING:
    from gemmery.emulator.convergence import Gathering
    from gemmery.emulator.lower import Block, Reduction
    from gemmery.emulator.simt import Machine

# "bar" is always aligned and has no modifier for it.
_FORMS = [(name, how) for name in ("bar", "bar.cta", "barrier", "barrier.cta") for how in ("", ".aligned")]
_NAMES = [f"{name}.{{}}{how}" for name, how in _FORMS if name.startswith("barrier") or not how]
ARRIVE = frozenset(name.format("arrive") for name in _NAMES)
WARP_SYNC = "bar.warp.sync"
SYNC = frozenset((WARP_SYNC, *(name.format("sync") for name in _NAMES)))
# bar.red: how a block's predicates are combined, and the type of the result that every thread gets.
REDUCTIONS = {
    f"{name.format(f'red.{way}')}.{kind}": (way, kind)
    for way, kind in (("popc", "u32"), ("and", "pred"), ("or", "pred"))
    for name in _NAMES
}
WHOLE_WARP = -1  # the barrier number that observers receive for bar.warp.sync


class Waiting:
    """The threads that wait, and where."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.asleep = False  # whether any thread sleeps, for an mbarrier or for lanes of its warp
        self.changes = 0  # changes of mbarriers; each one wakes the sleeping threads
        self._seen = 0
        self._alive = -1  # threads that had not ended when sleeping threads were last woken for that reason
        self._sleeping = np.zeros(0, bool)
        self._parked = np.zeros(0, bool)
        self._at = np.zeros(0, np.int32)  # index of the barrier instruction
        self._number = np.zeros(0, np.int32)
        self._woken = 0, b""  # `changes` and all places when threads that wait for lanes were last woken
        self._forced = False  # whether the next basic block runs without the missing lanes
        self._arrived: dict[int, NDArray[np.int64]] = {}  # barrier -> threads per block that arrived without waiting

    def ready(self, places: NDArray[np.int32]) -> Mask:
        """The threads that can run; None if there are none."""
        if self.asleep and self.changes != self._seen:
            self._sleeping[:] = False
            self.asleep = False
        ready = places < self.machine.program.stop
        if self._parked.size:
            ready &= ~self._parked
        if self.asleep:
            ready &= ~self._sleeping
        return ready if ready.any() else None

    def gather(self, gathering: Gathering, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Put threads to sleep whose lanes have not all arrived; return those that go on."""
        if self._forced:
            self._forced = False
            return mask
        waits = convergence.absent(self.machine, gathering, mask)
        if not waits.any():
            return mask
        self._put_to_sleep(waits)
        return mask & ~waits

    def sleep(self, mask: Mask) -> Mask:
        """Put the threads whose wait failed to sleep; return those that go on."""
        machine = self.machine
        failed = np.broadcast_to(machine.failed, (machine.threads,))
        machine.failed = np.False_  # a guarded wait that no thread executes leaves no result
        if mask is not None:
            failed = failed & mask
        if not failed.any():
            return mask
        self._put_to_sleep(failed)
        return ~failed if mask is None else mask & ~failed

    def _put_to_sleep(self, failed: NDArray[np.bool_]) -> None:
        machine = self.machine
        machine.part()
        if not self._sleeping.size:
            self._sleeping = np.zeros(machine.threads, bool)
        self._sleeping |= failed
        self.asleep = True
        self._seen = self.changes

    def arrive(self, block: Block, mask: Mask, at: int) -> None:
        """Threads reach the barrier that ends a basic block."""
        machine, end = self.machine, block.end
        assert end is not None
        if end.opcode in ARRIVE:
            self._pass(end, mask, block.last - 1)
            machine._go(mask, at + 1)
            return
        number: Any = np.int32(WHOLE_WARP)
        if end.opcode != WARP_SYNC:
            number = self._numbers(end, _first(end), mask)
        elif machine.observers:
            convergence.check_barrier(machine, block.last - 1, mask, self._values(end, 0))
        if mask is None and not number.ndim and (number == WHOLE_WARP or not _counts(end)):
            if block.reduction is not None:
                self._reduce(block.reduction, None)
            for observer in machine.observers:
                observer.barrier(machine, block.last - 1, int(number), None)
            machine._go(None, at + 1)
            return
        machine.part()
        machine._go(mask, at + 1)
        if not self._parked.size:
            self._parked = np.zeros(machine.threads, bool)
            self._at = np.zeros(machine.threads, np.int32)
            self._number = np.zeros(machine.threads, np.int32)
        chosen: Any = slice(None) if mask is None else mask
        self._parked[chosen] = True
        self._at[chosen] = block.last - 1
        self._number[chosen] = number[chosen] if number.ndim else number

    def resolve(self, places: NDArray[np.int32]) -> bool:
        """Complete barriers when no thread can run; False if all threads have ended or wait forever."""
        machine = self.machine
        alive = places < machine.program.stop
        if not alive.any():
            return False
        if self.released(alive):
            return True
        if self.asleep and np.count_nonzero(alive) != self._alive:  # a thread that ended may have been waited for
            self._alive = int(np.count_nonzero(alive))
            self.changes += 1
            return True
        if self.asleep and self._gathered(places):
            return True
        stuck: list[tuple[Any, NDArray[np.bool_]]] = []
        if self._parked.any():
            stuck += [(index, self._parked & (self._at == index)) for index in np.unique(self._at[self._parked])]
            kinds = {machine.kernel.instructions[index].opcode for index, _ in stuck}
            if WARP_SYNC in kinds:  # the threads at the block's barrier wait for these
                stuck = [one for one in stuck if machine.kernel.instructions[one[0]].opcode == WARP_SYNC]
        if self.asleep:
            blocks = machine.program.blocks
            for place in np.unique(places[self._sleeping]):
                stuck.append((np.int32(blocks[place].first), self._sleeping & (places == place)))
        for index, mask in stuck:
            for observer in machine.observers:
                observer.deadlock(machine, int(index), mask)
        places[alive] = machine.program.stop
        return False

    def released(self, alive: NDArray[np.bool_]) -> bool:
        """Complete the barriers that all threads have reached; False if there is none."""
        moved = False
        if self._parked.any():
            for number in np.unique(self._number[self._parked]):
                moved |= self._complete(int(number), alive)
        return moved

    def _gathered(self, places: NDArray[np.int32]) -> bool:
        """Wake threads that wait for lanes; if nothing has changed since the last time, they go on without them."""
        gathers = np.array([one.gathering is not None for one in self.machine.program.blocks])
        waiting = self._sleeping & gathers[np.minimum(places, len(gathers) - 1)]
        if not waiting.any():
            return False
        state = self.changes, places.tobytes()
        self._forced, self._woken = state == self._woken, state
        self._sleeping &= ~waiting
        self.asleep = bool(self._sleeping.any())
        return True

    def _complete(self, number: int, alive: NDArray[np.bool_]) -> bool:
        """Release the blocks (the warps) whose threads have all arrived."""
        here = self._parked & (self._number == number)
        if number != WHOLE_WARP:
            return self._let_go(number, here, alive)
        moved = False
        members = self.members(here)
        for named in np.unique(members[here]):  # parts of a warp may wait separately
            lanes = named >> (np.arange(self.machine.threads) % 32).astype(np.uint32) & 1 == 1
            moved |= self._let_go(number, here & (members == named), alive & lanes)
        return moved

    def members(self, here: NDArray[np.bool_]) -> NDArray[np.uint32]:
        """The member masks of the threads that wait at bar.warp.sync."""
        machine = self.machine
        members = np.zeros(machine.threads, np.uint32)
        for index in np.unique(self._at[here]):
            some = here & (self._at == index)
            members[some] = machine.spread(self._values(machine.kernel.instructions[index], 0))[some]
        return members

    def _let_go(self, number: int, here: NDArray[np.bool_], awaited: NDArray[np.bool_]) -> bool:
        """Release the waiting threads of blocks (of warps) in which all awaited threads have arrived."""
        machine = self.machine
        group = 32 if number == WHOLE_WARP else machine.block_threads
        shape = (-1, group)
        come = here.reshape(shape).sum(axis=1)
        needed = awaited.reshape(shape).sum(axis=1)
        index = int(self._at[here][0])
        instruction = machine.kernel.instructions[index]
        if number != WHOLE_WARP and _counts(instruction):
            needed = np.full(len(come), self._operand(instruction, _first(instruction) + 1, 0, here))
            come = come + self._arrived.get(number, 0)
        done = (come >= needed) & (here.reshape(shape).any(axis=1))
        if not done.any():
            return False
        leave = here & np.repeat(done, group)
        reduction = machine.program.reductions.get(index)
        if reduction is not None:
            self._reduce(reduction, leave)
        self._tell(index, number, leave, group)
        if number in self._arrived:
            self._arrived[number][done] = 0
        self._parked &= ~leave
        return True

    def _reduce(self, reduction: Reduction, leave: Mask) -> None:
        """Write the combined predicates of their block for the threads that leave bar.red."""
        machine = self.machine
        given = machine.spread(reduction.read(machine.registers))
        here = np.ones(machine.threads, bool) if leave is None else leave
        ayes = (given & here).reshape(machine.blocks, -1).sum(axis=1)
        all_ = here.reshape(machine.blocks, -1).sum(axis=1)
        made = {"popc": ayes.astype(np.uint32), "and": ayes == all_, "or": ayes > 0}[reduction.way]
        reduction.write(machine.registers, leave, np.repeat(made, machine.block_threads))

    def _tell(self, index: int, number: int, leave: NDArray[np.bool_], group: int) -> None:
        machine = self.machine
        first = np.where(leave, self._at, np.iinfo(np.int32).max).reshape(-1, group).min(axis=1)
        apart = leave & (self._at != np.repeat(first, group))
        for observer in machine.observers:
            if apart.any() and number != WHOLE_WARP:  # lanes may meet at different instructions
                observer.diverged(machine, int(self._at[apart][0]), apart)
            observer.barrier(machine, index, number, leave)

    def _pass(self, end: Instruction, mask: Mask, index: int) -> None:
        """bar.arrive: count the threads, which do not wait."""
        machine = self.machine
        numbers = self._numbers(end, 0, mask)
        every = np.ones(machine.threads, bool) if mask is None else mask
        for number in np.unique(numbers[every] if numbers.ndim else numbers).tolist():
            counts = every & (numbers == number)
            held = self._arrived.setdefault(number, np.zeros(machine.blocks, np.int64))
            held += counts.reshape(machine.blocks, -1).sum(axis=1)
            for observer in machine.observers:
                observer.barrier(machine, index, number, counts)

    def _numbers(self, instruction: Instruction, place: int, mask: Mask) -> Any:
        """Barrier numbers: one for all threads of the mask, or one per thread."""
        if place >= len(instruction.operands):
            return np.int32(0)
        values = self._values(instruction, place).astype(np.int32)
        some = values[mask] if values.ndim and mask is not None else values
        return some[0] if some.ndim and (some == some[0]).all() else values

    def _operand(self, instruction: Instruction, place: int, default: int, mask: Mask) -> int:
        """A barrier's number or its thread count."""
        if place >= len(instruction.operands):
            return default
        values = self._values(instruction, place)
        return int(values if values.ndim == 0 else values[0] if mask is None else values[mask][0])

    def _values(self, instruction: Instruction, place: int) -> Any:
        operand = instruction.operands[place]
        if isinstance(operand, Immediate):
            return np.uint32(operand.bits & 0xFFFFFFFF)
        assert isinstance(operand, Register)
        return self.machine.registers[self.machine.program.slots[operand.name]]


def operands(opcode: str) -> tuple[int, ...]:
    """The numbers of operands that a barrier may have; none if the opcode is not a barrier."""
    if opcode in REDUCTIONS:
        return 3, 4
    if opcode in ARRIVE:
        return (2,)
    return (1,) if opcode == WARP_SYNC else (1, 2) if opcode in SYNC else ()


def _first(instruction: Instruction) -> int:
    """The position of the barrier's number among the operands."""
    return 1 if instruction.opcode in REDUCTIONS else 0


def _counts(instruction: Instruction) -> bool:
    """Whether a barrier has an explicit thread count."""
    reduces = instruction.opcode in REDUCTIONS
    return len(instruction.operands) > (3 if reduces else 1) and instruction.opcode != WARP_SYNC
