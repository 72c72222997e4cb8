"""Lower a parsed kernel to basic blocks of steps, ready for any launch.

A kernel may read registers and local memory that a thread has not written. Registers that some way through it reads
first, and those computed from them, are followed thread by thread; a kernel without such registers and local memory
pays nothing. Moves, sums and selections pass a value on, because compilers also compute what a condition then drops; a
store, an address or a branch uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from gemmery_emulator import access, convergence, reach, specials
from gemmery_emulator.control import Barrier, End, LoweredBarrier, lowered_barrier
from gemmery_emulator.convergence import Gathering
from gemmery_emulator.counters.merging import Merge, merged
from gemmery_emulator.hopper.wgmma import checked_sums
from gemmery_emulator.instructions import find, written
from gemmery_emulator.machine import Machine
from gemmery_emulator.op import Mask, Op
from gemmery_emulator.ptx import Address, Immediate, Instruction, Label, Not, Operand, PtxKernel, Special, names_of
from gemmery_emulator.ptx.body import SWITCH, case
from gemmery_emulator.ptx.module import without_collection
from gemmery_emulator.steps import Faster, Handler, Lowering, Read, Step, refused


class Engine(Protocol):
    """Runs compiled blocks of a chunk, in place of steps."""

    ran: Mask  # the threads of the latest run

    def run(self, allowance: int) -> int:
        """Run at most so many basic blocks from where the threads are; return how many ran."""

    def lend(self, at: int) -> None:
        """A basic block is about to be executed by steps."""

    def lend_all(self) -> None:
        """All registers are about to be read."""

    def finish(self) -> None:
        """The chunk has ended."""


@dataclass(frozen=True)
class Block:
    """A basic block: instructions first ... last - 1, of which the machine itself executes the one that ends it."""

    first: int
    last: int
    steps: tuple[Step, ...]
    way: str  # how it ends, as End.way says; "" if the next block follows
    guard: Read | None  # whether a thread takes the branch; for a switch the index of the target
    targets: tuple[int, ...]  # blocks; `stop` is the number of blocks
    waits: bool  # a single instruction, repeated until it succeeds
    barrier: LoweredBarrier | None  # at its end
    gathering: Gathering | None  # whom its threads wait for before it


@dataclass(frozen=True)
class LoweredKernel:
    """A kernel, ready for any launch."""

    kernel: PtxKernel
    blocks: tuple[Block, ...]
    slots: dict[str, int]  # registers
    provided: dict[str, int]  # special registers and addresses of variables
    zeros: tuple[Any, ...]  # the initial value of each slot
    followed: frozenset[int] = frozenset()  # slots of registers that may be read before they are written
    engine: Callable[[Any], Engine | None] | None = None  # what runs compiled blocks of a machine, if there is any
    sibling: Callable[[str], LoweredKernel] | None = None  # another kernel of the module, which it may launch
    native: Any = None  # the compiled blocks, which the engine keeps here

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

    Raises EmulationError for an instruction that is not modeled.
    """
    lowering = Lowering(kernel, faster or {})
    starts = _starts(kernel)
    number = {start: place for place, start in enumerate(starts)}
    number[len(kernel.instructions)] = len(starts)
    ranges = list(zip(starts, [*starts[1:], len(kernel.instructions)], strict=True))
    blocks = [_block(lowering, number, *each) for each in ranges]
    lowering.followed = followed(lowering, blocks)
    if lowering.followed or kernel.local:
        blocks = [_block(lowering, number, *each) for each in ranges]
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
            kind = np.dtype(specials.CLOCKS[operand.name]).type
            step = partial(_timed, index, lowering.provided[operand.name], kind, step)
    step = convergence.checked(lowering, instruction, index, step)
    if lowering.followed or lowering.kernel.local:
        step = checked(lowering, instruction, index, step)
    if instruction.guard is None:
        return step
    return partial(_guarded, step, lowering.read(instruction.guard, "pred", instruction), instruction.negated)


def _timed(index: int, slot: int, kind: Callable[..., Any], step: Step, machine: Machine, mask: Mask) -> None:
    """Set a clock's slot to the number of instructions before this one, then execute the step."""
    machine.registers[slot] = kind((machine.elapsed + index) % (1 << 8 * kind().itemsize))
    step(machine, mask)


def _guarded(step: Step, read: Read, negated: bool, machine: Machine, mask: Mask) -> None:
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


WGMMA = "wgmma.mma_async"


class Unwritten:
    """Which threads of a chunk have not written each register that is followed, and each byte of local memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._registers: dict[int, Any] = {}  # by slot a flag for all threads, or for each; absent for not written
        self._read_at: dict[int, int] = {}  # the instruction that read it, or what it is computed from, from nowhere
        self._local = np.ones(machine.local.data.size if machine.kernel.local else 0, np.bool_)

    def read(self, index: int, slots: Iterable[int]) -> tuple[Any, int]:
        """Return the threads that have not written one of these registers, and the instruction that read it first."""
        bad, first = np.False_, index
        for slot in slots:
            flags = self._registers.get(slot, np.True_)
            if flags.any():
                bad, first = bad | flags, self._read_at.get(slot, first)
        return bad, first

    def write(self, slots: Iterable[int], bad: Any, mask: Mask, first: int) -> None:
        """Threads write registers, with values from nowhere where `bad`."""
        for slot in slots:
            old = self._registers.get(slot, np.True_)
            self._registers[slot] = bad if mask is None else np.where(mask, bad, old)
            self._read_at[slot] = first

    def places(self, spelled: access.Spelled, address: Any, mask: Mask) -> tuple[Any, Any] | None:
        """Return the threads that access local memory, and the bytes that each accesses; None without any."""
        machine = self._machine
        for space, part, some in reach.placed(machine, spelled.space, address, mask):
            if space == "local":
                inside = machine.spread((part >= 0) & (part <= machine.local.size - spelled.width))
                threads = np.flatnonzero(inside if some is None else inside & some)
                return threads, (machine.spread(part) + machine.local.base)[threads, None] + np.arange(spelled.width)
        return None

    def load(self, places: tuple[Any, Any] | None, count: int) -> Any:
        """Return the threads that load one of `count` elements of which they have written no byte."""
        bad = np.zeros(self._machine.threads, np.bool_)
        if places is not None:
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
            self._machine.observers.undefined(
                self._machine, first, threads, self._machine.kernel.instructions[index].line
            )


def checked(lowering: Lowering, instruction: Instruction, index: int, step: Step) -> Step:
    """The step of an instruction, with a report of threads that use what they have not written."""
    opcode, operands = instruction.opcode, instruction.operands
    reads, writes = (list(each_bit(slots & lowering.followed)) for slots in _accessed(lowering, instruction))
    local = lowering.kernel.local and opcode.name in ("ld", "st") and opcode.space in ("local", "")
    if not (reads or writes or local):
        return step
    passes, spelled = not find(opcode).effect, access.read(opcode) if local else None
    place = next((each for each in operands if isinstance(each, Address)), None)
    address = lowering.address(place, instruction) if spelled and place else None
    deciding = operands[3:4] if opcode.name in (WGMMA, "selp") else ()  # whether what comes from nowhere matters
    if opcode.name in ("and", "or") and opcode.type == "pred":
        deciding = operands[1:]
    values = [lowering.read(each, "pred", instruction) for each in deciding]
    sides = [list(each_bit(slots_of(lowering, [each]) & lowering.followed)) for each in operands[1:3]]
    if joins := opcode.spelling == "prmt.b32":
        sides = _joined(operands[3], sides)

    def run(machine: Machine, mask: Mask) -> None:
        unit, accessed = machine.unit(Unwritten), None
        bad, first = unit.read(index, reads)
        if (values or joins) and bad.any():
            known = [read(machine.registers) for read in values]
            bad = _selected(opcode.name, known, [unit.read(index, side)[0] for side in sides], bad)
        if address is not None and spelled is not None:
            accessed = unit.places(spelled, address(machine.registers), mask)
        if not passes and bad.any() and (opcode.name != "st" or accessed is None):
            unit.report(index, bad, mask, first)
        step(machine, mask)
        if opcode.name == "st":
            unit.store(accessed, bad)
        elif not passes:
            bad, first = unit.load(accessed, spelled.count if spelled else 1), index
        unit.write(writes, bad, mask, first)

    return run


def _joined(selector: Operand, sides: list[list[int]]) -> list[list[int]]:
    """Return those of two operands of which a constant selector takes bytes."""
    if not isinstance(selector, Immediate):
        return sides
    numbers = {selector.bits >> 4 * byte + 2 & 1 for byte in range(4)}
    return [sides[number] for number in sorted(numbers)]


def _selected(name: str, known: list[Any], sides: list[Any], bad: Any) -> Any:
    """Return the threads whose selection, conjunction or product depends on a value from nowhere."""
    if name == WGMMA:  # a product that does not add to its sums
        return bad & known[0]
    if name == "selp":
        return np.where(known[0], *sides)
    if name == "prmt":  # as for loads, of bytes of which some are written: NVRTC pads what dp2a.lo reads half of
        return sides[0] & sides[-1]
    decides = [(value == (name == "or")) & ~side for value, side in zip(known, sides, strict=True)]
    return bad & ~(decides[0] | decides[1])  # the value of one operand alone gives the result


def _accessed(lowering: Lowering, instruction: Instruction) -> tuple[int, int]:
    """The registers that an instruction reads, of a matrix product those of A and of the sums, and those it writes."""
    targets, operands = written(instruction), instruction.operands
    entry = find(instruction.opcode)
    if isinstance(entry, Op) and entry.scope == "warp":
        operands = (*operands[:2], *operands[3:]) if instruction.opcode.family in ("mma", "wmma") else operands[:1]
    if instruction.opcode.name == WGMMA:
        operands = (operands[0], operands[0])
    return slots_of(lowering, operands[1:] if targets else operands), slots_of(lowering, targets)


def followed(lowering: Lowering, blocks: Sequence[Block]) -> int:
    """The registers that some way through a kernel reads first, and those computed from them, as bits by slot."""
    kernel, uses = lowering.kernel, list[tuple[int, int]]()
    accesses = [_accessed(lowering, instruction) for instruction in kernel.instructions]
    for block in blocks:
        read = wrote = 0
        for index in range(block.first, block.last):
            (reads, writes), guard = accesses[index], kernel.instructions[index].guard
            read |= (reads | slots_of(lowering, [guard] if guard else [])) & ~wrote
            wrote |= 0 if guard else writes
        uses.append((read, wrote))
    if any(instruction.opcode.name == "brx" for instruction in kernel.instructions):
        return 0  # calls through pointers: what a function returns is written in a block that this order does not show
    first = _read_first(blocks, uses)
    passing = []
    for instruction, (reads, writes) in zip(kernel.instructions, accesses, strict=True):
        if kernel.local and instruction.opcode.name == "ld" and instruction.opcode.space in ("local", ""):
            first |= writes
        if not find(instruction.opcode).effect:
            passing.append((reads, writes))
    before = 0
    while first != before:
        before = first
        for reads, writes in passing:
            first |= writes if reads & first else 0
    return first


def _read_first(blocks: Sequence[Block], uses: Sequence[tuple[int, int]]) -> int:
    """The registers that a thread may read before it writes them, from those that each block so reads and writes."""
    before, grown = [read for read, _ in uses] + [0], True
    while grown:
        grown = False
        for number in reversed(range(len(blocks))):
            block, (read, wrote) = blocks[number], uses[number]
            leaves = block.way in ("branch", "exit", "trap") and block.guard is None
            for target in (*block.targets, *(() if leaves else (number + 1,))):
                read |= before[target] & ~wrote
            grown |= read != before[number]
            before[number] = read
    return before[0]


def slots_of(lowering: Lowering, operands: Iterable[Operand]) -> int:
    """Return the registers among operands, as bits of an integer."""
    bits = 0
    for name in names_of(operands):
        bits |= 1 << lowering.slots[name] if name in lowering.slots else 0
    return bits


def each_bit(registers: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while registers:
        lowest = registers & -registers
        yield lowest.bit_length() - 1
        registers ^= lowest
