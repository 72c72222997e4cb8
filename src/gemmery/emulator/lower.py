"""Lower a parsed kernel to basic blocks of steps, ready for any launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmery.emulator import barriers, convergence, ops
from gemmery.emulator.access import HANDLERS
from gemmery.emulator.counters.merging import Merge, merged
from gemmery.emulator.machine import Machine
from gemmery.emulator.op import STORED, Mask
from gemmery.emulator.ptx import Immediate, Instruction, Kernel, Label, Not, Register
from gemmery.emulator.steps import Faster, Lowering, Read, Step, Write, refused

ENDS = frozenset(("bra", "brx", "ret", "exit", "trap", *barriers.NAMES))
WAITS = frozenset(
    (
        *(f"mbarrier.{way}{phase}" for way in ("try_wait", "test_wait") for phase in ("", ".parity")),
        "barrier.cluster.wait",
    )
)


@dataclass(frozen=True)
class Reduction:
    """The reduction of a bar.red."""

    way: str  # "popc", "and", "or"
    read: Read  # the predicate
    write: Write


@dataclass(frozen=True)
class Block:
    """A basic block: instructions first ... last - 1; the machine itself executes `end`."""

    first: int
    last: int
    steps: tuple[Step, ...]
    end: Instruction | None  # the branch, barrier or return at its end
    guard: Read | None  # whether a thread takes the branch; for a switch the index of the target
    targets: tuple[int, ...]  # blocks; `stop` is the number of blocks
    waits: bool  # a single instruction, repeated until it succeeds
    reduction: Reduction | None = None
    gathering: convergence.Gathering | None = None  # whom its threads wait for before it


@dataclass(frozen=True)
class Program:
    """A kernel, ready for any launch."""

    kernel: Kernel
    blocks: tuple[Block, ...]
    slots: dict[str, int]  # registers
    provided: dict[str, int]  # special registers and addresses of variables
    zeros: tuple[Any, ...]  # the initial value of each slot

    @property
    def stop(self) -> int:
        """The number of the block to which threads go when they end."""
        return len(self.blocks)

    @cached_property
    def reductions(self) -> Mapping[int, Reduction]:
        """The reductions of barriers, by instruction."""
        return {one.last - 1: one.reduction for one in self.blocks if one.reduction is not None}

    @cached_property
    def merges(self) -> Mapping[int, Merge]:
        """The accesses that ptxas merges."""
        return merged(self.kernel)


def lowered(kernel: Kernel, faster: Faster | None = None) -> Program:
    """Prepare a kernel; `faster` may replace `exact.fma` and `exact.chain` by functions that give the same bits.

    Raises EmulationError for an instruction that is not modelled.
    """
    lowering = Lowering(kernel, faster or {})
    starts = _starts(kernel)
    number = {start: place for place, start in enumerate(starts)}
    number[len(kernel.instructions)] = len(starts)
    blocks = [
        _block(lowering, number, start, stop)
        for start, stop in zip(starts, [*starts[1:], len(kernel.instructions)], strict=True)
    ]
    return Program(kernel, tuple(blocks), lowering.slots, lowering.provided, tuple(lowering.zeros))


def _starts(kernel: Kernel) -> list[int]:
    count = len(kernel.instructions)
    starts = {0, *kernel.labels.values()}
    for index, instruction in enumerate(kernel.instructions):
        name = instruction.opcode.name
        if name in ENDS:
            starts.add(index + 1)
        if name in WAITS:
            starts.update((index, index + 1))
        if convergence.names_lanes(instruction):
            starts.add(index)
    return sorted(start for start in starts if start < count)


def _block(lowering: Lowering, number: dict[int, int], first: int, last: int) -> Block:
    kernel = lowering.kernel
    inside = kernel.instructions[first:last]
    end = inside[-1] if inside[-1].opcode.name in ENDS else None
    steps = tuple(_step(lowering, index) for index in range(first, last - (end is not None)))
    guard = None
    targets: tuple[int, ...] = ()
    if end is not None:
        name = end.opcode.name
        if name in ("bra", "brx"):
            targets = tuple(
                number[kernel.labels[one.name]] for one in lowering.flat(end.operands) if isinstance(one, Label)
            )
            if not targets:
                raise refused(end)
        elif name in ("ret", "exit", "trap"):
            targets = (number[len(kernel.instructions)],)
        if end.guard is not None:
            if name == "brx" or name in barriers.NAMES:
                raise refused(end, "a barrier or a switch under a guard:")
            guard = lowering.read(Not(end.guard) if end.negated else end.guard, "pred", end)
        elif name == "brx":
            guard = lowering.read(end.operands[0], "u32", end)
    waits = inside[0].opcode.name in WAITS
    gathering = convergence.gathering(lowering, first, last)
    return Block(first, last, steps, end, guard, targets, waits, _reduction(lowering, end), gathering)


def _reduction(lowering: Lowering, end: Instruction | None) -> Reduction | None:
    if end is None or end.opcode.name not in barriers.NAMES:
        return None
    if len(end.operands) not in barriers.operands(end.opcode.spelling):
        raise refused(end)
    found = barriers.REDUCTIONS.get(end.opcode.spelling)
    for operand in end.operands[1:-1] if found else end.operands:  # the barrier's number, and a count of threads
        if isinstance(operand, Register) and STORED.get(operand.type) == "u4":
            lowering.slot(operand.name, "u4")
        elif not isinstance(operand, Immediate):
            raise refused(end)
    if found is None:
        return None
    way, kind = found
    write = lowering.write(end.operands[0], kind, end)
    if write is None:
        raise refused(end)
    return Reduction(way, lowering.read(end.operands[-1], "pred", end), write)


def _step(lowering: Lowering, index: int) -> Step:
    """Return the step of an instruction; refuse it if its operands are wrong in number or kind."""
    instruction = lowering.kernel.instructions[index]
    try:
        return _made(lowering, index, instruction)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise refused(instruction, "with these operands the instruction") from error


def _made(lowering: Lowering, index: int, instruction: Instruction) -> Step:
    op = ops.TABLE.get(instruction.opcode.spelling)
    if op is not None:
        step = lowering.computed(instruction, op)
    else:
        handler = HANDLERS.get(instruction.opcode.family)
        if handler is None:
            raise refused(instruction)
        step = handler(lowering, index)
    step = convergence.checked(lowering, index, step)
    if instruction.guard is None:
        return step
    return _guarded(step, lowering.read(instruction.guard, "pred", instruction), instruction.negated)


def _guarded(step: Step, read: Read, negated: bool) -> Step:
    def run(machine: Machine, mask: Mask) -> None:
        taken = read(machine.registers)
        if negated:
            taken = np.logical_not(taken)
        if taken.ndim == 0:
            if taken:
                step(machine, mask)
            return
        if mask is not None:
            taken = taken & mask
        if taken.any():
            step(machine, None if mask is None and taken.all() else taken)

    return run
