"""Which instructions of a kernel have code, and what that reads and writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count, repeat

from gemmery.cpu.target import Target
from gemmery_emulator import access, specials
from gemmery_emulator.convergence import FULL
from gemmery_emulator.findings.orders import orders
from gemmery_emulator.instructions import find, makers
from gemmery_emulator.kernels.native.block_operations import TYPES, Emit, emitter, exchange
from gemmery_emulator.lower import Block, LoweredKernel
from gemmery_emulator.op import NUMPY, STORED, Op
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
from gemmery_emulator.steps import only_constant

NEVER = 1 << 62
_ORDERED = frozenset(("volatile", "relaxed", "acquire", "release", "mmio"))


@dataclass(frozen=True)
class Compute:
    """An instruction that only computes."""

    emit: Emit
    sources: tuple[tuple[Operand, str], ...]  # with the PTX type that each is read as
    targets: tuple[tuple[Operand, str], ...]


@dataclass(frozen=True)
class Move:
    """An access to memory."""

    stores: bool
    space: str
    kind: str  # of each element, a PTX type
    width: int
    place: Address
    elements: tuple[Operand, ...]
    what: str = ""  # the kind of its events; "" for that of loads and stores


@dataclass(frozen=True)
class AsyncCopy:
    """A copy from global to shared memory, of the first `size` bytes; a true predicate in its place reads nothing."""

    ends: tuple[Move, Move]
    size: tuple[Operand, str] | None


@dataclass(frozen=True)
class CopyGroup:
    """The end of a group of copies, a wait for all groups but the latest ones, or both."""

    commits: bool
    pending: int


@dataclass(frozen=True)
class WarpExchange:
    """An instruction of whole warps; `emit` takes what each lane holds of the first operand, and the others."""

    emit: Emit
    passed: tuple[Operand, str]
    sources: tuple[tuple[Operand, str], ...]
    targets: tuple[tuple[Operand, str], ...]


@dataclass(frozen=True)
class BlockParameter:
    """A load of a parameter of the kernel."""

    offset: int
    kind: str
    elements: tuple[Operand, ...]


InstructionForm = Compute | Move | AsyncCopy | CopyGroup | WarpExchange | BlockParameter


class Translation:
    """Which instructions of a kernel have code, and the code of its blocks."""

    def __init__(self, program: LoweredKernel, target: Target) -> None:
        self.program, self.target = program, target
        self._publishes = orders(program.kernel).publishes
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
        self.stored = [value.dtype.str[1:] if value.dtype.kind != "b" else "?" for value in program.zeros]

    # ---- forms ----

    def _form(self, instruction: Instruction) -> InstructionForm | None:
        opcode, operands = instruction.opcode, instruction.operands
        op = find(opcode)
        if instruction.guard is not None:
            return None
        if any(isinstance(each, Special) and each.name in specials.CLOCKS for each in operands):
            return None
        if opcode.name in ("ld", "st"):
            return self._move(instruction)
        if opcode.name.startswith("cp.async"):
            return self._copy(instruction) if opcode.name == "cp.async" else _group(instruction)
        if opcode.name in ("mov", "cvta"):
            plain = opcode.name == "mov" or opcode.modifiers[-1:] == ("global",)
            plain = plain and len(operands) == 2 and not any(isinstance(each, Vector) for each in operands)
            return self._compute(lambda f, a: a, operands, (opcode.types[-1:] * 2)) if plain else None
        if isinstance(op, Op) and op.lanes == "mask":
            return self._exchange(instruction, op)
        return self._computed(instruction, op) if isinstance(op, Op) and op.scope == "lane" and not op.carry else None

    def _computed(self, instruction: Instruction, op: Op) -> Compute | None:
        (first, *sources), kinds = instruction.operands, op.results
        results = first.elements if isinstance(first, Vector) else (first,)
        both = len(results) == 2 and op.complement is not None
        kinds = (*kinds, "pred") if both else kinds
        if len(sources) != len(op.operands) or len(results) > len(kinds):
            return None
        constants = tuple(isinstance(each, Immediate) for each in sources)
        code = emitter(op, self.target, constants, both)
        if code is None:
            return None
        return self._compute(code, (*results, *sources), (*kinds[: len(results)], *op.operands), len(results))

    def _compute(
        self, code: Emit, operands: Sequence[Operand], kinds: Sequence[str], results: int = 1
    ) -> Compute | None:
        """Return the code of an instruction with these operands, the results first, unless one of them has none."""
        pairs = tuple(zip(operands, kinds, strict=True))
        targets, sources = pairs[:results], pairs[results:]
        fine = all(self._readable(*source) for source in sources) and all(map(_writable, targets))
        return Compute(code, sources, targets) if fine else None

    def _readable(self, operand: Operand, kind: str) -> bool:
        dtype = NUMPY[kind]
        if dtype not in TYPES:
            return False
        match operand:
            case Immediate(type=type_):
                return type_ in ("", "f32", "f64", "pred")
            case Register(name, type=declared):
                return name != "_" and (STORED[declared] == "?") == (dtype == "?")
            case Not(register):
                return STORED[register.type] == "?" and dtype == "?"
            case Special(name):
                return specials.is_modeled(name) and not name.startswith("%is_") and dtype != "?"
            case Symbol():
                return dtype in ("u4", "u8")
        return False

    def _exchange(self, instruction: Instruction, op: Op) -> WarpExchange | None:
        """A shuffle, vote or reduction of all lanes, by which no lane may publish what others have written."""
        code, (first, passed, *sources) = exchange(instruction.opcode.spelling), instruction.operands
        members = self._constant(sources[-1]) if sources else 0
        if code is None or self._publishes or members & FULL != FULL:
            return None
        results = first.elements if isinstance(first, Vector) else (first,)
        reads = tuple(zip(sources[:-1], op.operands[1:], strict=False))
        targets = tuple(zip(results, op.results, strict=False))
        fine = all(self._readable(*each) for each in ((passed, op.operands[0]), *reads)) and all(
            map(_writable, targets)
        )
        return WarpExchange(code, (passed, op.operands[0]), reads, targets) if fine else None

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
        size, ends = rest[: len(rest) - ("policy" in words)], []
        for place, space in ((source, "global"), (target, "shared")):
            if not isinstance(place, Address) or not self._addressed(place):
                return None
            ends.append(Move(space == "shared", space, "b32", width.bits, place, (), "cp.async"))
        if not size:
            return AsyncCopy((ends[0], ends[1]), None)
        skips = isinstance(size[0], Not) or (isinstance(size[0], Register) and size[0].type == "pred")
        kind = "pred" if skips else "u32"
        return AsyncCopy((ends[0], ends[1]), (size[0], kind)) if self._readable(size[0], kind) else None

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
        elements = data.elements if isinstance(data, Vector) else (data,)
        if not isinstance(place, Address) or place.coordinates or len(elements) != spelled.count:
            return None
        kind = spelled.kind
        if loads and not all(_writable((each, kind)) for each in elements):
            return None
        if not loads and not all(self._readable(each, kind) for each in elements):
            return None
        if NUMPY[kind] not in TYPES or kind == "pred":
            return None
        if spelled.space == "param":
            base = self._pointed(place.base)
            return None if base is None else BlockParameter(base + place.offset, kind, elements)
        if spelled.space not in ("global", "shared") or instruction.opcode.space not in ("global", "shared"):
            return None
        if not self._addressed(place):
            return None
        return Move(not loads, spelled.space, kind, spelled.width, place, elements)

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
        operands: Sequence[Operand] = ()
        match self.forms[index]:
            case Compute(sources=sources):
                operands = [source for source, _ in sources]
            case Move(stores=False, place=place):
                operands = (place,)
            case form if not isinstance(form, BlockParameter):
                return set(self.slots[index])
        return {self.program.slots[name] for name in names_of(operands) if name in self.program.slots}

    @cached_property
    def uniform(self) -> dict[int, int]:
        """The registers whose values come from parameters alone, and the instruction that gives each."""
        slots, known, writers = self.program.slots, dict[int, int](), makers(self.program.kernel)
        for index, form in enumerate(self.forms):
            names = [name for name in names_of(_targets(form)) if name != "_"]
            alone = all(len(writers.get(name, ())) == 1 for name in names)
            sources = form.sources if isinstance(form, Compute) else ()
            plain = all(isinstance(each, Immediate) or _slot(slots, each) in known for each, _ in sources)
            if names and alone and plain and (isinstance(form, BlockParameter) or sources):
                known.update((slots[name], index) for name in names)
        return known

    def address_slot(self, form: InstructionForm | None, size: str = "8") -> int | None:
        """Return the register of so many bytes that has the addresses of an access, but for `offset`, if one does."""
        base = form.place.base if isinstance(form, Move) and not form.what else None
        if not isinstance(base, Register) or base in _targets(form):  # its own elements would change the addresses
            return None
        return self.program.slots[base.name] if STORED[base.type][1] == size else None

    def offset(self, form: Move) -> int:
        """Return what an access adds to the addresses that it takes."""
        slots = [self.address_slot(form, size) for size in "48"]
        return 0 if slots == [None, None] else form.place.offset

    def written(self, index: int) -> list[int]:
        """Return the slots that an instruction writes, all of one without code."""
        form, known = self.forms[index], self.program.slots
        return [known[name] for name in names_of(_targets(form)) if name in known] if form else self.slots[index]

    def share(self, block: Block) -> float:
        """Return the part of a block's instructions that have code."""
        forms = self.forms[block.first : block.last - bool(block.way)]
        return sum(form is not None for form in forms) / len(forms) if forms else 1.0


def _group(instruction: Instruction) -> CopyGroup | None:
    what = instruction.opcode.name.removeprefix("cp.async.")
    if what == "wait_group":
        return CopyGroup(False, only_constant(instruction))
    return CopyGroup(True, NEVER if what == "commit_group" else 0) if what in ("commit_group", "wait_all") else None


def _targets(form: InstructionForm | None) -> tuple[Operand, ...]:
    if isinstance(form, BlockParameter) or (isinstance(form, Move) and not form.stores):
        return form.elements
    return tuple(target for target, _ in form.targets) if isinstance(form, Compute | WarpExchange) else ()


def _slot(slots: dict[str, int], operand: Operand) -> int | None:
    return slots.get(operand.name) if isinstance(operand, Register) else None


def _writable(target: tuple[Operand, str]) -> bool:
    operand, kind = target
    if not isinstance(operand, Register) or NUMPY[kind] not in TYPES:
        return False
    return operand.name == "_" or (STORED[operand.type] == "?") == (NUMPY[kind] == "?")
