"""Lower a parsed kernel to basic blocks of steps, ready for any launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmery_emulator import convergence, specials, unwritten
from gemmery_emulator.blocks import Block, joined
from gemmery_emulator.control import Barrier, End, LoweredBarrier, lowered_barrier
from gemmery_emulator.counters.merging import Merge, merged
from gemmery_emulator.hopper.wgmma import checked_sums
from gemmery_emulator.instructions import find
from gemmery_emulator.machine import Machine
from gemmery_emulator.op import Mask, Op
from gemmery_emulator.ptx import Instruction, Label, Not, PtxKernel, Special
from gemmery_emulator.ptx.body import SWITCH, case
from gemmery_emulator.ptx.module import without_collection
from gemmery_emulator.steps import Faster, Handler, Lowering, Read, Step, refused


@dataclass(frozen=True)
class LoweredKernel:
    """A kernel, ready for any launch."""

    kernel: PtxKernel
    blocks: tuple[Block, ...]
    slots: dict[str, int]  # registers
    provided: dict[str, int]  # special registers and addresses of variables
    zeros: tuple[Any, ...]  # the initial value of each slot
    followed: frozenset[int] = frozenset()  # slots of registers that may be read before they are written

    @property
    def stop(self) -> int:
        """The number of the block to which threads go when they end."""
        return len(self.blocks)

    @cached_property
    def barriers(self) -> Mapping[int, LoweredBarrier]:
        """The barriers, by instruction."""
        return {block.last - 1: block.barrier for block in self.blocks if block.barrier is not None}

    @cached_property
    def merges(self) -> Mapping[int, Merge]:
        """The accesses that ptxas merges."""
        return merged(self.kernel)


@without_collection()
def lowered(kernel: PtxKernel, faster: Faster | None = None) -> LoweredKernel:
    """Prepare a kernel; `faster` may replace functions, such as `exact.fma`, by others that give the same bits.

    Raises EmulationError for an instruction that is not modelled.
    """
    lowering = Lowering(kernel, faster or {})
    starts = _starts(kernel)
    number = {start: place for place, start in enumerate(starts)}
    number[len(kernel.instructions)] = len(starts)
    ranges = list(zip(starts, [*starts[1:], len(kernel.instructions)], strict=True))
    blocks = [_block(lowering, number, *each) for each in ranges]
    lowering.followed = unwritten.followed(lowering, blocks)
    if lowering.followed or kernel.local:
        blocks = [_block(lowering, number, *each) for each in ranges]
    blocks = joined(lowering, blocks)
    slots = frozenset(slot for slot in lowering.slots.values() if lowering.followed >> slot & 1)
    return LoweredKernel(kernel, tuple(blocks), lowering.slots, lowering.provided, tuple(lowering.zeros), slots)


def _starts(kernel: PtxKernel) -> list[int]:
    count = len(kernel.instructions)
    starts = {0, *kernel.labels.values()}
    for index, instruction in enumerate(kernel.instructions):
        entry = find(instruction.opcode)
        if isinstance(entry, End):
            starts.add(index + 1)
        if entry.waits:
            starts.update((index, index + 1))
        if entry.lanes and convergence.names_lanes(instruction):
            starts.add(index)
    return sorted(start for start in starts if start < count)


def _block(lowering: Lowering, number: dict[int, int], first: int, last: int) -> Block:
    kernel = lowering.kernel
    inside = kernel.instructions[first:last]
    last_entry = find(inside[-1].opcode)
    entry = last_entry if isinstance(last_entry, End) else None
    end = None if entry is None else inside[-1]
    steps = tuple(
        checked_sums(lowering, first, [_step(lowering, index) for index in range(first, last - (end is not None))])
    )
    guard = None
    targets: tuple[int, ...] = ()
    barrier = None
    if end is not None and entry is not None:
        if entry.way in ("branch", "switch"):
            labels = [operand for operand in lowering.flat(end.operands) if isinstance(operand, Label)]
            targets = tuple(number[kernel.labels[label.name]] for label in labels)
            if not targets:
                raise refused(end)
        elif entry.way in ("exit", "trap"):
            targets = (number[len(kernel.instructions)],)
        if end.guard is not None:
            if entry.way in ("switch", "barrier"):
                raise refused(end, "a barrier or a switch under a guard:")
            guard = lowering.read(Not(end.guard) if end.negated else end.guard, "pred", end)
        elif entry.way == "switch":
            through = end.opcode.spelling == SWITCH  # by the address of a function: its place in the call's table
            read = lowering.read(end.operands[0], "u64" if through else "u32", end)
            guard = (lambda registers: case(read(registers))) if through else read
        if isinstance(entry, Barrier):
            barrier = lowered_barrier(lowering, end, entry)
    waits = find(inside[0].opcode).waits
    gathering = convergence.gathering(lowering, first, last)
    way = "" if entry is None else entry.way
    return Block(first, last, steps, way, guard, targets, waits, barrier, gathering)


def _step(lowering: Lowering, index: int) -> Step:
    """Return the step of an instruction; refuse it if its operands are wrong in number or kind."""
    instruction = lowering.kernel.instructions[index]
    try:
        return _lower(lowering, index, instruction)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refused(instruction, "with these operands the instruction") from error


def _lower(lowering: Lowering, index: int, instruction: Instruction) -> Step:
    match find(instruction.opcode):
        case Op() as op:
            step = lowering.computed(instruction, op)
        case Handler() as handler if handler.takes(instruction):
            step = handler.step(lowering, instruction, index)
        case _:
            raise refused(instruction)
    for operand in instruction.operands:
        if isinstance(operand, Special) and operand.name in specials.CLOCKS:
            step = _timed(step, index, lowering.provided[operand.name], specials.CLOCKS[operand.name])
    step = convergence.checked(lowering, instruction, index, step)
    if lowering.followed or lowering.kernel.local:
        step = unwritten.checked(lowering, instruction, index, step)
    if instruction.guard is None:
        return step
    return _guarded(step, lowering.read(instruction.guard, "pred", instruction), instruction.negated)


def _timed(step: Step, index: int, slot: int, stored: str) -> Step:
    """Set a clock's slot to the number of instructions before this one, then execute the step."""
    kind = np.dtype(stored).type

    def run(machine: Machine, mask: Mask) -> None:
        machine.registers[slot] = kind((machine.elapsed + index) % (1 << 8 * kind().itemsize))
        step(machine, mask)

    return run


def _guarded(step: Step, read: Read, negated: bool) -> Step:
    def run(machine: Machine, mask: Mask) -> None:
        active = read(machine.registers)
        if negated:
            active = np.logical_not(active)
        if active.ndim == 0:
            if active:
                step(machine, mask)
            return
        if mask is not None:
            active = active & mask
        if active.any():
            step(machine, None if mask is None and active.all() else active)

    return run
