"""Which instructions of a kernel have code, and what that reads and writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count, repeat
from typing import Any

from gemmery.cpu.target import Target
from gemmery_emulator import access, specials
from gemmery_emulator.convergence import FULL
from gemmery_emulator.findings.orders import orders
from gemmery_emulator.instructions import find, makers, written
from gemmery_emulator.kernels.native.block_operations import FASTER, Exchange, exchange, has_code
from gemmery_emulator.lower import Block, LoweredKernel
from gemmery_emulator.op import Mask, Op
from gemmery_emulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Not,
    Operand,
    Register,
    Special,
    Symbol,
    Vector,
    names_of,
)
from gemmery_emulator.steps import Handler, Lowering, Read, Write, only_constant

NEVER = 1 << 62
_ORDERED = frozenset(("volatile", "relaxed", "acquire", "release", "mmio"))


@dataclass(frozen=True)
class Compute:
    """An instruction that only computes: its step writes code, if the registers are those of `block_functions`."""

    step: Callable[[Any, Mask], None]


@dataclass(frozen=True)
class Move:
    """An access to memory."""

    stores: bool
    space: str
    kind: str  # of each element, a PTX type
    width: int
    place: Address
    address: Read
    reads: tuple[Read, ...] = ()  # of the elements of a store
    writes: tuple[Write, ...] = ()  # of those of a load
    offset: int = 0  # what it adds to `address`
    what: str = ""  # the kind of its events; "" for that of loads and stores


@dataclass(frozen=True)
class AsyncCopy:
    """A copy from global to shared memory, of the first `size` bytes; a true predicate in its place reads nothing."""

    ends: tuple[Move, Move]
    size: Read | None
    skips: bool  # whether `size` is a predicate


@dataclass(frozen=True)
class CopyGroup:
    """The end of a group of copies, a wait for all groups but the latest ones, or both."""

    commits: bool
    pending: int


@dataclass(frozen=True)
class WarpExchange:
    """An instruction of whole warps; `emit` takes what each lane holds of the first operand, and the others."""

    emit: Exchange
    passed: Read
    kind: str  # of what is passed, a PTX type
    sources: tuple[Read, ...]
    targets: tuple[Write, ...]


@dataclass(frozen=True)
class BlockParameter:
    """A load of a parameter of the kernel."""

    offset: int
    kind: str
    writes: tuple[Write, ...]


InstructionForm = Compute | Move | AsyncCopy | CopyGroup | WarpExchange | BlockParameter


class Translation:
    """Which instructions of a kernel have code, and the code of its blocks."""

    def __init__(self, program: LoweredKernel, target: Target) -> None:
        self.program, self.target = program, target
        self._publishes = orders(program.kernel).publishes
        self._lowering = Lowering(program.kernel, FASTER)
        self._lowering.slots, self._lowering.provided = program.slots, program.provided
        self.stored = [value.dtype.str[1:] if value.dtype.kind != "b" else "?" for value in program.zeros]
        self.forms: list[InstructionForm | None] = [
            self._form(instruction) for instruction in program.kernel.instructions
        ]
        # What has a record: each access by its instruction, both ends of a copy; and the place of an instruction's.
        self.records: list[tuple[int, Move | CopyGroup]] = []
        self.number: dict[int, int] = {}
        for index, form in enumerate(self.forms):
            if isinstance(form, Move | AsyncCopy | CopyGroup):
                self.number[index] = len(self.records)
                self.records += [(index, each) for each in (form.ends if isinstance(form, AsyncCopy) else (form,))]
        self.slots = [self._slots_of(instruction) for instruction in program.kernel.instructions]

    # ---- forms ----

    def _form(self, instruction: Instruction) -> InstructionForm | None:
        opcode, operands, entry = instruction.opcode, instruction.operands, find(instruction.opcode)
        if instruction.guard is not None:
            return None
        if any(isinstance(each, Special) and each.name in specials.CLOCKS for each in operands):
            return None
        if opcode.name in ("ld", "st"):
            return self._move(instruction)
        if opcode.name.startswith("cp.async"):
            return self._copy(instruction) if opcode.name == "cp.async" else _group(instruction)
        if isinstance(entry, Op) and entry.lanes == "mask":
            return self._exchange(instruction, entry)
        if entry.effect or not isinstance(entry, Op | Handler) or (isinstance(entry, Op) and entry.carry):
            return None
        if isinstance(entry, Op):
            step = self._lowering.computed(instruction, entry)
        else:
            step = entry.step(self._lowering, instruction, 0)
        return Compute(step) if self._coded(instruction, step) else None

    def _coded(self, instruction: Instruction, step: Callable[..., object]) -> bool:
        """Whether a step writes code, as all do whose operands are of the same kinds."""
        kinds = instruction.opcode.spelling, *map(_kind_of, instruction.operands)
        return has_code(self.target, kinds, step, self.stored)

    def _exchange(self, instruction: Instruction, op: Op) -> WarpExchange | None:
        """A shuffle, vote or reduction of all lanes, by which no lane may publish what others have written."""
        code, (first, passed, *sources) = exchange(instruction.opcode.spelling), instruction.operands
        members = self._constant(sources[-1]) if sources else 0
        if code is None or self._publishes or members & FULL != FULL:
            return None
        pairs = zip((passed, *sources[:-1]), op.operands, strict=False)
        passes, *reads = (self._lowering.read(*pair, instruction) for pair in pairs)
        results = zip(self._lowering.flat((first,)), op.results, strict=False)
        writes = tuple(self._lowering.write(*pair, instruction) for pair in results)
        return WarpExchange(code, passes, op.operands[0], tuple(reads), writes)

    def _constant(self, operand: Operand) -> int:
        """Return a constant, also one in a register that nothing else writes; 0 for no constant."""
        if isinstance(operand, Register) and len(writers := makers(self.program.kernel).get(operand.name, [])) == 1:
            only = self.program.kernel.instructions[writers[0]]
            operand = only.operands[-1] if only.opcode.name == "mov" and only.guard is None else operand
        return operand.bits if isinstance(operand, Immediate) else 0

    def _copy(self, instruction: Instruction) -> AsyncCopy | None:
        words, (target, source, width, *rest) = access.read_copy(instruction.opcode), instruction.operands
        if words is None or not isinstance(width, Immediate):
            return None
        ends = []
        for place, space in ((source, "global"), (target, "shared")):
            if not isinstance(place, Address) or not self._addressed(place):
                return None
            address = self._lowering.address(place, instruction)
            ends.append(Move(space == "shared", space, "b32", width.bits, place, address, what="cp.async"))
        if not (size := rest[: len(rest) - ("policy" in words)]):
            return AsyncCopy((ends[0], ends[1]), None, skips=False)
        skips = isinstance(size[0], Not) or (isinstance(size[0], Register) and size[0].type == "pred")
        read = self._lowering.read(size[0], "pred" if skips else "u32", instruction)
        return AsyncCopy((ends[0], ends[1]), read, skips)

    def _addressed(self, place: Address) -> bool:
        """Whether an address is in a register, or that of a variable."""
        base = place.base
        in_place = isinstance(base, Register | Symbol) and base.name not in ("_", *self.parameters)
        return in_place and not place.coordinates

    def _move(self, instruction: Instruction) -> Move | BlockParameter | None:
        spelled, loads = access.read(instruction.opcode), instruction.opcode.name == "ld"
        if spelled is None or len(instruction.operands) != 2 or not _ORDERED.isdisjoint(instruction.opcode.modifiers):
            return None
        data, place = instruction.operands if loads else instruction.operands[::-1]
        if not isinstance(place, Address) or place.coordinates:
            return None
        elements, kind = self._lowering.flat((data,)), spelled.kind
        reads = tuple(self._lowering.read(each, kind, instruction) for each in elements if not loads)
        writes = tuple(self._lowering.write(each, kind, instruction) for each in elements if loads)
        if not self._coded(instruction, lambda machine, mask: [read(machine.registers) for read in reads] and None):
            return None
        if spelled.space == "param":
            base = self._pointed(place.base)
            return None if base is None else BlockParameter(base + place.offset, kind, writes)
        if spelled.space not in ("global", "shared") or instruction.opcode.space not in ("global", "shared"):
            return None
        if not self._addressed(place):
            return None
        address = self._lowering.address(replace(place, offset=0), instruction)  # so that others may share it
        return Move(not loads, spelled.space, kind, spelled.width, place, address, reads, writes, place.offset)

    def _pointed(self, base: Operand) -> int | None:
        """Return the offset among the parameters that an address stands for, also one in a register."""
        if isinstance(base, Symbol) and base.name in self.parameters:
            return self.parameters[base.name] + base.offset
        writers = makers(self.program.kernel).get(base.name, []) if isinstance(base, Register) else []
        if len(writers) != 1:
            return None
        only = self.program.kernel.instructions[writers[0]]
        if only.guard is not None or only.opcode.spelling not in ("mov.b64", "mov.u64", "add.s64", "add.u64"):
            return None
        offsets = only.operands[2:]
        if not all(isinstance(each, Immediate) for each in offsets):
            return None
        start = self._pointed(only.operands[1])
        away = sum(each.bits for each in offsets if isinstance(each, Immediate))
        return None if start is None else start + (away + 2**63) % 2**64 - 2**63

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The offset of each parameter."""
        return {parameter.name: parameter.offset for parameter in self.program.kernel.parameters}

    # ---- registers ----

    @cache  # noqa: B019
    def slots_of(self, at: int) -> list[int]:
        """Return the slots of registers that a block names, but for those whose values stay in it."""
        block = self.program.blocks[at]
        slots = dict.fromkeys(slot for index in range(block.first, block.last) for slot in self.slots[index])
        return [slot for slot in slots if slot not in self.rows]

    def _slots_of(self, instruction: Instruction) -> list[int]:
        guard = () if instruction.guard is None else (instruction.guard,)
        known = self.program.slots
        return list(dict.fromkeys(known[name] for name in names_of((*instruction.operands, *guard)) if name in known))

    @cached_property
    def mentions(self) -> Counter[int]:
        """In how many instructions each register is named."""
        return Counter(slot for slots in self.slots for slot in slots)

    def private(self, indices: range) -> dict[int, tuple[int, int]]:
        """Return the registers that only these instructions name, and write first, with the first and the last."""
        inside, spans = Counter[int](), dict[int, tuple[int, int]]()
        for index in indices:
            inside.update(self.slots[index])
            read = self._read(index)
            for slot in self.slots[index]:
                spans[slot] = spans.get(slot, (-1 if slot in read else index,))[0], index
        return {slot: span for slot, span in spans.items() if span[0] >= 0 and inside[slot] == self.mentions[slot]}

    @cached_property
    def rows(self) -> dict[int, tuple[str, int]]:
        """The registers of one block alone, with the size and number of a row that others have before and after."""
        rows, ends = dict[int, tuple[str, int]](), dict[tuple[str, int], int]()
        for block in self.program.blocks:
            spans = self.private(range(block.first, block.last))
            for slot, (first, last) in sorted(spans.items(), key=lambda each: each[1]):
                size = self.stored[slot][1:]
                rows[slot] = next(row for row in zip(repeat(size), count()) if ends.get(row, -1) < first)
                ends[rows[slot]] = last
        return rows

    def _read(self, index: int) -> set[int]:
        """Return the slots that an instruction reads, perhaps with some that it writes."""
        form, operands = self.forms[index], self.program.kernel.instructions[index].operands[1:]
        if not isinstance(form, Compute) and not (isinstance(form, Move | BlockParameter) and form.writes):
            return set(self.slots[index])
        return {self.program.slots[name] for name in names_of(operands) if name in self.program.slots}

    @cached_property
    def uniform(self) -> dict[int, int]:
        """The registers whose values come from parameters alone, and the instruction that gives each."""
        known, writers = dict[int, int](), makers(self.program.kernel)
        for index, form in enumerate(self.forms):
            instruction = self.program.kernel.instructions[index]
            plain = all(isinstance(each, Immediate | Register) for each in instruction.operands[1:])
            plain = plain and isinstance(form, Compute) and self._read(index) <= known.keys()
            alone = all(len(writers[each.name]) == 1 for each in written(instruction) if each.name != "_")
            if alone and (plain or isinstance(form, BlockParameter)):
                known.update((slot, index) for slot in self.written(index))
        return known

    def written(self, index: int) -> list[int]:
        """Return the slots that an instruction writes, all of one without code."""
        targets, known = written(self.program.kernel.instructions[index]), self.program.slots
        return [known[each.name] for each in targets if each.name in known] if self.forms[index] else self.slots[index]

    def share(self, block: Block) -> float:
        """Return the part of a block's instructions that have code."""
        forms = self.forms[block.first : block.last - bool(block.way)]
        return sum(form is not None for form in forms) / len(forms) if forms else 1.0


def _group(instruction: Instruction) -> CopyGroup | None:
    what = instruction.opcode.name.removeprefix("cp.async.")
    if what == "wait_group":
        return CopyGroup(False, only_constant(instruction))
    return CopyGroup(True, NEVER if what == "commit_group" else 0) if what in ("commit_group", "wait_all") else None


def _kind_of(operand: Operand) -> object:
    """What decides whether an operand has code, which its value and its name do not."""
    match operand:
        case Immediate(type=kind) | Register(type=kind):
            return type(operand), kind
        case Vector(elements=elements):
            return tuple(map(_kind_of, elements))
    return operand if isinstance(operand, Special) else type(operand)
