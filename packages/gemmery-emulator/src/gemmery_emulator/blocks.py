"""Basic blocks, and their instructions that only compute as functions of the registers alone.

A step alone reads its operands in the type that it takes and writes its result under the mask of the active threads.
In a basic block most of that can be left out, which costs small launches the most. A result is written to a slot of its
own and put under the mask once, before an instruction that may read it, or at the end of the block if another block
reads it. A register that only this block uses is never put under the mask. A value that was read as another type is
kept for the next instruction that reads it so, and NumPy's operators take the place of its functions, which are slower
for numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gemmery_emulator.control import LoweredBarrier
from gemmery_emulator.convergence import Gathering
from gemmery_emulator.machine import Machine
from gemmery_emulator.op import NUMPY, STORED, Mask
from gemmery_emulator.ptx import Immediate, Instruction, Not, Operand, Register, names_of
from gemmery_emulator.steps import LaneStep, Lowering, Read, Step, viewed

OnRegisters = Callable[[list[Any]], None]  # a function of the registers

# Python's operators do the same to two operands of one type; to numbers several times as fast.
OPERATORS: Mapping[Any, Callable[..., Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.bitwise_and: operator.and_,
    np.bitwise_or: operator.or_,
    np.bitwise_xor: operator.xor,
    np.left_shift: operator.lshift,
    np.right_shift: operator.rshift,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
}


@dataclass(frozen=True)
class Block:
    """A basic block: instructions first ... last - 1; the machine itself executes `end`."""

    first: int
    last: int
    steps: tuple[Step, ...]
    way: str  # how it ends, as End.way says; "" if the next block follows
    guard: Read | None  # whether a thread takes the branch; for a switch the index of the target
    targets: tuple[int, ...]  # blocks; `stop` is the number of blocks
    waits: bool  # a single instruction, repeated until it succeeds
    barrier: LoweredBarrier | None = None  # at its end
    gathering: Gathering | None = None  # whom its threads wait for before it


@dataclass(frozen=True)
class Usage:
    """Registers as bits of an integer, by their slots."""

    mentioned: int  # in the block
    read: int  # before the block has written them
    written: int  # in the block, by all threads that execute it


def joined(lowering: Lowering, blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks with the steps that only compute joined; their further slots come to those of `lowering`."""
    instructions = lowering.kernel.instructions
    pinned = _bits(lowering, (each for each in instructions if each.opcode.family == "wgmma"))
    uses = [_usage(lowering, block) for block in blocks]
    _, later = live(blocks, uses)
    once = several = 0
    for use in uses:
        several |= once & use.mentioned
        once |= use.mentioned
    slots = _Slots(lowering)
    result = []
    for block, use, after in zip(blocks, uses, later, strict=True):
        slots.start()
        own = use.mentioned & ~several & ~use.read & ~pinned
        if block.barrier is not None:  # its operands are read again when other threads have come
            own &= ~_bits(lowering, instructions[block.last - 1 : block.last])
        ending = _bits(lowering, instructions[block.first + len(block.steps) : block.last])
        result.append(replace(block, steps=_Joining(lowering, slots, own, pinned).steps(block, after | ending)))
    return result


def _usage(lowering: Lowering, block: Block) -> Usage:
    instructions = lowering.kernel.instructions[block.first : block.last]
    read = written = 0
    for place, instruction in enumerate(instructions):
        step = block.steps[place] if place < len(block.steps) else None
        if isinstance(step, LaneStep):
            read |= slots_of(lowering, (source for source, _ in step.sources)) & ~written
            written |= _written(lowering, step)
        else:
            read |= _bits(lowering, [instruction]) & ~written
    return Usage(_bits(lowering, instructions), read, written)


def live(blocks: Sequence[Block], uses: Sequence[Usage]) -> tuple[list[int], list[int]]:
    """Return for each block the registers that a thread may read from its start on, and those after it."""
    before, after = [use.read for use in uses] + [0], [0] * len(blocks)
    grown = True
    while grown:
        grown = False
        for number in reversed(range(len(blocks))):
            leaves = blocks[number].way in ("branch", "exit", "trap") and blocks[number].guard is None
            following = (*blocks[number].targets, *(() if leaves else (number + 1,)))
            live = 0
            for target in following:
                live |= before[target]
            if live != after[number]:
                grown = True
                after[number] = live
                before[number] = uses[number].read | live & ~uses[number].written
    return before, after


def _bits(lowering: Lowering, instructions: Iterable[Instruction]) -> int:
    """Return the registers that instructions name, in any place."""
    bits = 0
    for instruction in instructions:
        guard = () if instruction.guard is None else (instruction.guard,)
        bits |= slots_of(lowering, (*instruction.operands, *guard))
    return bits


def slots_of(lowering: Lowering, operands: Iterable[Operand]) -> int:
    """Return the registers among operands, as bits of an integer."""
    bits = 0
    for name in names_of(operands):
        bits |= 1 << lowering.slots[name] if name in lowering.slots else 0
    return bits


class _Slots:
    """Slots besides those of registers: constants, and places that each block uses anew."""

    def __init__(self, lowering: Lowering) -> None:
        self._zeros = lowering.zeros
        self.first = len(lowering.zeros)  # before it: registers, and values provided before the launch
        self._constants: dict[tuple[str, bytes], int] = {}
        self._places: list[int] = []
        self._used = 0

    def start(self) -> None:
        """Start a block."""
        self._used = 0

    def place(self) -> int:
        """Return a place that this block has not used."""
        if self._used == len(self._places):
            self._places.append(self._new(np.uint8(0)))
        self._used += 1
        return self._places[self._used - 1]

    def constant(self, value: Any) -> int:
        """Return the slot of a constant."""
        key = value.dtype.str, value.tobytes()
        if key not in self._constants:
            self._constants[key] = self._new(value)
        return self._constants[key]

    def _new(self, value: Any) -> int:
        self._zeros.append(value)
        return len(self._zeros) - 1


class _Joining:
    """Joins the steps of one block."""

    def __init__(self, lowering: Lowering, slots: _Slots, own: int, pinned: int) -> None:
        self._lowering, self._slots = lowering, slots
        self._own = own  # registers that only this block uses
        self._pinned = pinned  # those that are also written while other instructions run
        self._steps: list[Step] = []
        self._runs: list[OnRegisters] = []
        # By a register's slot or another operand: where it is placed as a type.
        self._at: dict[Any, dict[str, int]] = {}
        self._unmasked: dict[int, int] = {}  # registers with a newer value, and where it is

    def steps(self, block: Block, read_later: int) -> tuple[Step, ...]:
        """Return the steps; `read_later` are registers that the end of the block, or other blocks, may read."""
        for index, step in enumerate(block.steps, block.first):
            instruction = self._lowering.kernel.instructions[index]
            if isinstance(step, LaneStep) and not _written(self._lowering, step) & self._pinned:
                self._compute(step, instruction)
                continue
            mentioned = _bits(self._lowering, [instruction])
            self._mask(mentioned)
            self._end_run()
            self._steps.append(step)
            for slot in _common(mentioned | self._pinned, self._at):  # the step may have written it
                del self._at[slot]
        self._mask(read_later)
        self._end_run()
        return tuple(self._steps)

    def _compute(self, step: LaneStep, instruction: Instruction) -> None:
        sources = [self._source(operand, kind, instruction) for operand, kind in step.sources]
        if step.meaning is None:
            self._move(step, sources[0])
            return
        places = [self._target(*target) for target in step.targets]
        self._runs.append(_applied(OPERATORS.get(step.meaning, step.meaning), sources, places, step.several))
        for (target, kind), place in zip(step.targets, places, strict=True):
            self._keep(target, kind, place)

    def _move(self, step: LaneStep, at: int) -> None:
        ((target, kind),) = step.targets
        if at < self._slots.first:  # which may be written while the copy is in use
            place = self._target(target, kind)
            self._runs.append(partial(_copied, at, place))
            at = place
        self._keep(target, kind, at)

    def _source(self, operand: Operand, kind: str, instruction: Instruction) -> int:
        """Return where an operand is as a PTX type."""
        dtype = NUMPY[kind]
        if isinstance(operand, Immediate):
            return self._slots.constant(self._lowering.read(operand, kind, instruction)([]))
        if isinstance(operand, Not):
            at = self._slots.place()
            self._runs.append(_applied(np.logical_not, [self._source(operand.register, "pred", instruction)], [at]))
            return at
        if isinstance(operand, Register):
            stored, slot = STORED[operand.type], self._lowering.slots[operand.name]
            places = self._at.setdefault(slot, {stored: slot})
            if dtype not in places:
                places[dtype] = self._converted(places[stored], stored, dtype)
            return places[dtype]
        places = self._at.setdefault(operand, {})
        if dtype not in places:
            places[dtype] = self._slots.place()
            self._runs.append(partial(_read, self._lowering.read(operand, kind, instruction), places[dtype]))
        return places[dtype]

    def _target(self, target: Operand, kind: str) -> int:
        """Return where a result is written: in the register itself if only this block uses it and keeps it so."""
        if isinstance(target, Register) and target.name != "_" and STORED[target.type] == NUMPY[kind]:
            slot = self._lowering.slots[target.name]
            if self._own >> slot & 1:
                return slot
        return self._slots.place()

    def _keep(self, target: Operand, kind: str, place: int) -> None:
        """Note that a register's new value is at a place, as a PTX type."""
        assert isinstance(target, Register)
        if target.name == "_":
            return
        stored, dtype, slot = STORED[target.type], NUMPY[kind], self._lowering.slots[target.name]
        places = self._at[slot] = {dtype: place}
        if stored != dtype:
            if stored == "?" or dtype == "?" or stored[1] != dtype[1]:
                places.clear()
            place = places[stored] = self._converted(place, dtype, stored)
        self._unmasked.pop(slot, None)
        if place != slot:
            self._unmasked[slot] = place

    def _converted(self, at: int, stored: str, dtype: str) -> int:
        place = self._slots.place()
        self._runs.append(_applied(viewed(lambda value: value, stored, dtype), [at], [place]))
        return place

    def _mask(self, registers: int) -> None:
        """Bring registers up to date, under the mask where other threads may need the values that they have."""
        pairs = [(self._unmasked.pop(slot), slot) for slot in _common(registers, self._unmasked)]
        self._runs.extend(partial(_copied, *pair) for pair in pairs if self._own >> pair[1] & 1)
        others = [pair for pair in pairs if not self._own >> pair[1] & 1]
        if others:
            self._end_run()
            self._steps.append(partial(_masked, others))

    def _end_run(self) -> None:
        if self._runs:
            self._steps.append(partial(_in_turn, self._runs))
            self._runs = []


def _written(lowering: Lowering, step: LaneStep) -> int:
    return slots_of(lowering, (target for target, _ in step.targets))


def _common(registers: int, places: Mapping[Any, Any]) -> list[int]:
    """Return the slots that both have, by a walk along the fewer of the two: there may be hundreds."""
    if registers.bit_count() > len(places):
        return [slot for slot in places if isinstance(slot, int) and registers >> slot & 1]
    return [slot for slot in each_bit(registers) if slot in places]


def each_bit(registers: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while registers:
        lowest = registers & -registers
        yield lowest.bit_length() - 1
        registers ^= lowest


def _applied(
    function: Callable[..., Any], sources: Sequence[int], targets: Sequence[int], several: bool = False
) -> OnRegisters:
    """Apply a function to slots; the usual numbers of operands have functions of their own, for speed."""
    first, *others = sources
    target = targets[0]

    def run_of_one(registers: list[Any]) -> None:
        registers[target] = function(registers[first])

    def run_of_two(registers: list[Any]) -> None:
        registers[target] = function(registers[first], registers[second])

    def run_of_three(registers: list[Any]) -> None:
        registers[target] = function(registers[first], registers[second], registers[third])

    def run_of_any(registers: list[Any]) -> None:
        results = function(*[registers[source] for source in sources])
        for place, result in zip(targets, results if several else (results,), strict=False):
            registers[place] = result

    if several or len(sources) > 3:
        return run_of_any
    second, third = (*others, first, first)[:2]
    return (run_of_one, run_of_two, run_of_three)[len(others)]


def _read(read: Callable[[list[Any]], Any], target: int, registers: list[Any]) -> None:
    registers[target] = read(registers)


def _copied(source: int, target: int, registers: list[Any]) -> None:
    registers[target] = registers[source]


def _in_turn(runs: Sequence[OnRegisters], machine: Machine, mask: Mask) -> None:
    registers = machine.registers
    for run in runs:
        run(registers)


def _masked(pairs: Sequence[tuple[int, int]], machine: Machine, mask: Mask) -> None:
    registers = machine.registers
    for source, target in pairs:
        value = registers[source]
        registers[target] = value if mask is None else np.where(mask, value, registers[target])
