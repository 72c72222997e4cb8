"""Values from nowhere: registers and local memory that a thread reads before it has written them.

A register is a candidate if some way through the kernel reads it first. Candidates and what is computed from them are
followed thread by thread; a kernel without candidates and local memory pays nothing. Moves, sums and selections pass a
value on, because compilers also compute what a condition then drops; a store, an address or a branch uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from gemmery.emulator import access, reach
from gemmery.emulator.instructions import find, written
from gemmery.emulator.machine import Machine
from gemmery.emulator.op import Mask, Op
from gemmery.emulator.ptx import Address, Instruction, Label, PtxKernel, names_of
from gemmery.emulator.steps import Lowering, Read, Step

WGMMA = "wgmma.mma_async"
_ENDS = frozenset(("ret", "exit", "trap"))


class Unwritten:
    """Which threads of a chunk have not written each register that is followed, and each byte of local memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._registers: dict[str, Any] = {}  # one flag for all threads, or one for each; absent for not written
        self._read_at: dict[str, int] = {}  # the instruction that read a register from nowhere, or what came of it
        self._local = np.ones(machine.local.data.size if machine.kernel.local else 0, np.bool_)

    def read(self, index: int, names: Iterable[str]) -> tuple[Any, int]:
        """Return the threads that have not written one of these registers, and the instruction that read it first."""
        bad, first = np.False_, index
        for name in names:
            flags = self._registers.get(name, np.True_)
            if flags.any():
                bad, first = bad | flags, self._read_at.get(name, first)
        return bad, first

    def write(self, names: Iterable[str], bad: Any, mask: Mask, first: int) -> None:
        """Threads write registers, with values from nowhere where `bad`."""
        for name in names:
            old = self._registers.get(name, np.True_)
            self._registers[name] = bad if mask is None else np.where(mask, bad, old)
            self._read_at[name] = first

    def places(self, space: str, width: int, address: Any, mask: Mask) -> tuple[Any, Any] | None:
        """Return the threads that access local memory, and the bytes that each accesses; None without any."""
        machine = self._machine
        for name, part, some in reach.placed(machine, space, address, mask):
            if name == "local":
                threads = np.arange(machine.threads) if some is None else np.flatnonzero(some)
                base = np.broadcast_to(machine.local.base, (machine.threads,))
                first = (machine.spread(part) + base)[threads]
                return threads, np.clip(first[:, None] + np.arange(width), 0, self._local.size - 1)
        return None

    def load(self, places: tuple[Any, Any] | None, count: int) -> Any:
        """Return the threads that load an element of which they have written no byte."""
        if places is None:
            return np.False_
        bad = np.zeros(self._machine.threads, np.bool_)
        bad[places[0]] = self._local[places[1]].reshape(len(places[0]), count, -1).all(axis=2).any(axis=1)
        return bad if bad.any() else np.False_

    def store(self, places: tuple[Any, Any] | None, bad: Any) -> None:
        """Threads store to local memory."""
        if places is not None:
            self._local[places[1]] = np.broadcast_to(bad, (self._machine.threads,))[places[0], None]

    def report(self, index: int, bad: Any, mask: Mask, first: int) -> None:
        """Report threads that use a value from nowhere."""
        threads = np.flatnonzero(np.broadcast_to(bad if mask is None else bad & mask, (self._machine.threads,)))
        if threads.size:
            use = self._machine.kernel.instructions[index].line
            for observer in self._machine.observers:
                observer.undefined(self._machine, first, threads, use)


def checked(lowering: Lowering, instruction: Instruction, index: int, step: Step) -> Step:
    """The step of an instruction, with a report of threads that use what they have not written."""
    names, kernel, opcode = followed(lowering.kernel), lowering.kernel, instruction.opcode
    targets, sources = _accessed(instruction)
    reads, writes = [name for name in sources if name in names], [name for name in targets if name in names]
    local = kernel.local and opcode.name in ("ld", "st") and opcode.space in ("local", "")
    if not (reads or writes or local):
        return step
    operands, passes = instruction.operands, not find(opcode).effect
    place = next((each for each in operands if isinstance(each, Address)), None)
    address = lowering.address(place, instruction) if local and place is not None else None
    values: list[Read] = []
    if opcode.name == "selp" or (opcode.name in ("and", "or") and opcode.type == "pred"):
        values = [lowering.read(each, "pred", instruction) for each in operands[3 if opcode.name == "selp" else 1 :]]
    adds = lowering.read(operands[3], "pred", instruction) if opcode.name == WGMMA and len(operands) > 3 else None
    sides = [[name for name in names_of([each]) if name in names] for each in operands[1:3]]
    spelled = access.read(opcode) if address is not None else None

    def run(machine: Machine, mask: Mask) -> None:
        unit = machine.unit(Unwritten)
        bad, first = unit.read(index, reads)
        if values and bad.any():
            bad = _chosen(opcode.name, values, [unit.read(index, side)[0] for side in sides], bad, machine)
        if adds is not None:
            sums = unit.read(index, writes)[0] & adds(machine.registers)
            unit.report(index, sums, mask, index)
        accessed = None
        if address is not None and spelled is not None:
            accessed = unit.places(spelled.space, spelled.width, address(machine.registers), mask)
        if not passes and bad.any() and not (opcode.name == "st" and accessed is not None):
            unit.report(index, bad, mask, first)
        step(machine, mask)
        if opcode.name == "st":
            unit.store(accessed, bad)
        elif not passes:
            bad, first = unit.load(accessed, spelled.count if spelled else 1), index
        unit.write(writes, bad, mask, first)

    return run


def _chosen(name: str, values: list[Read], sides: list[Any], bad: Any, machine: Machine) -> Any:
    """Return the threads whose selection, or conjunction of predicates, depends on a value from nowhere."""
    first, second = sides
    if name == "selp":
        return np.where(values[0](machine.registers), first, second)
    decides = name == "or"  # the value of one operand that alone gives the result
    known = [(read(machine.registers) == decides) & ~side for read, side in zip(values, sides, strict=True)]
    return bad & ~(known[0] | known[1])


def _accessed(instruction: Instruction) -> tuple[list[str], list[str]]:
    """The registers that an instruction writes and reads; of a matrix product those of A and of the sums."""
    targets, operands = [register.name for register in written(instruction)], instruction.operands
    entry = find(instruction.opcode)
    if isinstance(entry, Op) and entry.scope == "warp":
        operands = (*operands[:2], *operands[3:]) if instruction.opcode.family in ("mma", "wmma") else operands[:1]
    if instruction.opcode.name == WGMMA:
        operands = operands[:1]
    return targets, names_of(operands[1:] if targets else operands)


@lru_cache(maxsize=64)
def followed(kernel: PtxKernel) -> frozenset[str]:
    """The registers that some way through a kernel reads first, and those computed from them."""
    names = _read_first(kernel, False)
    accesses = [_accessed(instruction) for instruction in kernel.instructions]
    if kernel.local:
        loads = (
            each for each in kernel.instructions if each.opcode.name == "ld" and each.opcode.space in ("local", "")
        )
        names.update(register.name for each in loads for register in written(each))
    count = 0
    while names and count < len(names):
        count = len(names)
        for instruction, (targets, sources) in zip(kernel.instructions, accesses, strict=True):
            if not find(instruction.opcode).effect and not names.isdisjoint(sources):
                names.update(targets)
    if any(instruction.opcode.name == WGMMA for instruction in kernel.instructions):
        names |= _read_first(kernel, True)
    return frozenset(names - {"_"})


def _read_first(kernel: PtxKernel, sums: bool) -> set[str]:
    """The registers that may be read before they are written; with `sums` products of warpgroups read their sums."""
    count = len(kernel.instructions)
    ends = (at + 1 for at, each in enumerate(kernel.instructions) if each.opcode.name in (*_ENDS, "bra", "brx"))
    starts = sorted(start for start in {0, *kernel.labels.values(), *ends} if start < count)
    number = {start: place for place, start in enumerate(starts)} | {count: len(starts)}
    bits: dict[str, int] = {}
    blocks = []
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        read = written_here = 0
        for instruction in kernel.instructions[start:stop]:
            targets, sources = _accessed(instruction)
            guard = [] if instruction.guard is None else [instruction.guard.name]
            more = targets if sums and instruction.opcode.name == WGMMA else []
            read |= _mask([*sources, *guard, *more], bits) & ~written_here
            written_here |= 0 if guard else _mask(targets, bits)
        last = kernel.instructions[stop - 1]
        labels = [each for operand in last.operands for each in getattr(operand, "elements", (operand,))]
        after = [number[kernel.labels[each.name]] for each in labels if isinstance(each, Label)]
        if last.guard is not None or last.opcode.name not in (*_ENDS, "bra", "brx"):
            after.append(number[stop])
        blocks.append((read, written_here, after))
    before, grown = [0] * (len(blocks) + 1), True
    while grown:
        grown = False
        for place in reversed(range(len(blocks))):
            read, written_here, after = blocks[place]
            live = 0
            for target in after:
                live |= before[target]
            live = read | live & ~written_here
            grown |= live != before[place]
            before[place] = live
    return {name for name, bit in bits.items() if before[0] >> bit & 1}


def _mask(names: Iterable[str], bits: dict[str, int]) -> int:
    mask = 0
    for name in names:
        mask |= 1 << bits.setdefault(name, len(bits))
    return mask
