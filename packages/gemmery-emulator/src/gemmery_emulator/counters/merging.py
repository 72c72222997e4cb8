"""What ptxas makes of PTX: adjacent accesses become wider ones, and short branches become predicates.

The rules come from comparing PTX with the machine code that ptxas makes of it. An access of 8 or 16 bytes must be
aligned, so ptxas merges only if it knows that: from the offsets of shared variables and arithmetic on addresses
(`low_bits`), or from an equally wide access with the same base. Merging across basic blocks is not modeled.

In the machine code of 77 kernels for sm_90a all 181 loads of global memory after a branch that skips at most LONGEST
instructions were predicated, so that all warps execute them. Longer bodies, and those that access shared memory, are
predicated in some cases only; here they remain branches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gemmery_emulator.control import End
from gemmery_emulator.instructions import find, written
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ptx import Address, Immediate, Instruction, Label, Operand, PtxKernel, Register, Symbol, Vector

MOST = 10  # bits tracked: shared memory starts at a multiple of 1024 bytes


@dataclass(frozen=True)
class Low:
    """A number whose lowest `bits` bits equal those of `value`."""

    bits: int
    value: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", min(self.bits, MOST))
        object.__setattr__(self, "value", self.value & (1 << self.bits) - 1)

    @property
    def zeros(self) -> int:
        """The number of lowest bits that are known to be zero."""
        return (self.value & -self.value).bit_length() - 1 if self.value else self.bits

    def is_known(self, size: int) -> bool:
        """Whether at least one low bit is known."""
        return size <= 1 << self.bits

    def moved(self, away: int) -> Low:
        """Return the same for the number plus `away`."""
        return Low(self.bits, self.value + away)

    def either(self, other: Low) -> Low:
        """Return what is known of both."""
        differ = self.value ^ other.value
        same = (differ & -differ).bit_length() - 1 if differ else MOST
        return Low(min(self.bits, other.bits, same), self.value)


UNKNOWN = Low(0, 0)


def low_bits(kernel: PtxKernel) -> dict[str, Low]:
    """Return the low bits of each register and shared variable on every path."""
    known = {
        name: Low(MOST, each.offset) if each.space == "shared" and each.size else Low(each.align.bit_length() - 1, 0)
        for name, each in kernel.variables.items()
    }
    carrying: list[tuple[str, Instruction]] = []
    for instruction in kernel.instructions:
        for register in written(instruction):
            # Whether the low bits of a result depend on the low bits of the operands alone.
            opcode = instruction.opcode
            floats = any(kind.startswith("f") for kind in opcode.types)
            if opcode.name in MEANINGS and "hi" not in opcode.modifiers and not floats:
                carrying.append((register.name, instruction))
            else:
                known[register.name] = UNKNOWN
    changed = True
    while changed:  # starts with too many known bits, so that a loop keeps those that every iteration keeps
        changed = False
        for name, instruction in carrying:
            before = known.get(name)
            if before is UNKNOWN:
                continue
            result = _result(instruction, known)
            if result is not None and (now := result if before is None else before.either(result)) != before:
                known[name], changed = now, True
    return known


def _result(instruction: Instruction, known: Mapping[str, Low]) -> Low | None:
    """Return the low bits of a result; None if an operand has not been computed yet."""
    name = instruction.opcode.name
    meaning, count = MEANINGS[name]
    operands = [_low(operand, known) for operand in instruction.operands[1 : 1 + count]]
    if name == "shl" and not isinstance(instruction.operands[2], Immediate):
        return UNKNOWN
    return None if None in operands else meaning(*operands)


def _low(operand: Operand, known: Mapping[str, Low]) -> Low | None:
    match operand:
        case Register(name=name):
            return known.get(name)
        case Immediate(bits=bits):
            return Low(MOST, bits)
        case Symbol(name=name, offset=offset):
            return known.get(name, UNKNOWN).moved(offset)
    return UNKNOWN


def _sum(number: Low, other: Low) -> Low:
    return Low(min(number.bits, other.bits), number.value + other.value)


def _product(number: Low, other: Low) -> Low:
    return Low(min(number.bits + other.zeros, other.bits + number.zeros), number.value * other.value)


def _conjunction(number: Low, other: Low) -> Low:
    return Low(max(min(number.bits, other.bits), number.zeros, other.zeros), number.value & other.value)


# Instructions whose low bits depend on those of the operands: the function, and the number of operands.
MEANINGS: dict[str, tuple[Callable[..., Low], int]] = {
    **dict.fromkeys(("mov", "cvta", "cvt"), (lambda number: number, 1)),
    "add": (_sum, 2),
    "sub": (lambda number, other: Low(min(number.bits, other.bits), number.value - other.value), 2),
    "mul": (_product, 2),
    "mad": (lambda number, other, third: _sum(_product(number, other), third), 3),
    "shl": (lambda number, by: Low(number.bits + by.value, number.value << by.value), 2),
    "and": (_conjunction, 2),
    "or": (lambda number, other: Low(min(number.bits, other.bits), number.value | other.value), 2),
    "xor": (lambda number, other: Low(min(number.bits, other.bits), number.value ^ other.value), 2),
    **dict.fromkeys(("selp", "min", "max"), (Low.either, 2)),
}


LEAST = {("ld", 16): 12}  # bytes needed of a wide access: three words are loaded as four
KEPT = frozenset(("volatile", "mmio"))  # ptxas never merges these; it merges relaxed, acquire and release
SMALLEST = {"ld": 4, "st": 2}  # sizes in bytes of accesses that may be merged


@dataclass(frozen=True)
class Merge:
    """Accesses of one thread that ptxas merges into one."""

    first: int  # the first of the merged instructions, which represents them
    members: tuple[int, ...]
    width: int  # bytes of all accesses together
    offset: int  # from the address of the first to the lowest address


@dataclass(frozen=True)
class _Scalar:
    """An access that may be merged."""

    index: int
    offset: int  # from its base
    width: int


# The base of an address: a register with the number of earlier writes to it, or a variable.
Base = tuple[str, int]
# Accesses must agree in these: "ld" or "st", space, base, guard, bytes of an element; stores also in their size.
AccessStream = tuple[str, str, Base, str, int, int]


def merged(kernel: PtxKernel) -> Mapping[int, Merge]:
    """Return the merge of each instruction by its index; instructions that are not merged are left out.

    Two ld.shared.f32 from [%r1] and [%r1+4] become one load of 8 bytes if %r1 is known to be a multiple of 8.
    """
    bases = _Bases(kernel)
    merges: dict[int, Merge] = {}
    for streams in _open_streams(kernel, bases):
        for (kind, _, base, *_), scalars in streams.items():
            for merge in _joined(kind, scalars, bases.low(base)):
                merges |= dict.fromkeys(merge.members, merge)
    return merges


def _open_streams(kernel: PtxKernel, bases: _Bases) -> Iterator[dict[AccessStream, list[_Scalar]]]:
    """Yield groups of accesses that may be merged."""
    streams: dict[AccessStream, list[_Scalar]] = defaultdict(list)
    starts = set(kernel.labels.values())

    def close(kinds: tuple[str, ...], space: str) -> dict[AccessStream, list[_Scalar]]:
        return {key: streams.pop(key) for key in list(streams) if key[0] in kinds and space in ("", key[1])}

    for index, instruction in enumerate(kernel.instructions):
        kind = instruction.opcode.name
        if index in starts or find(instruction.opcode).orders:
            yield close(("ld", "st"), "")
        if kind in ("atom", "red"):
            yield close(("ld", "st"), _space(instruction))
        if kind in ("ld", "st"):
            space = _space(instruction)
            yield close(("st",) if kind == "ld" else ("ld",), space)
            access = _scalar(index, instruction, bases)
            if access is not None:
                guard = f"{'!' * instruction.negated}{instruction.guard.name}" if instruction.guard else ""
                key = (kind, space, access[0], guard, _element(instruction), access[1].width if kind == "st" else 0)
                if any(scalar.offset == access[1].offset for scalar in streams.get(key, ())):
                    yield {key: streams.pop(key)}
                streams[key].append(access[1])
    yield streams


def _space(instruction: Instruction) -> str:
    """Return the space of a load or store; "" for a generic address and for one in another block's shared memory."""
    space = instruction.opcode.space
    return "" if space == "shared::cluster" else space


def _scalar(index: int, instruction: Instruction, bases: _Bases) -> tuple[Base, _Scalar] | None:
    if _space(instruction) not in ("global", "shared") or index not in bases.before:
        return None
    if not KEPT.isdisjoint(instruction.opcode.modifiers):
        return None
    if _element(instruction) < SMALLEST[instruction.opcode.name]:
        return None
    base, offset = bases.before[index]
    return base, _Scalar(index, offset, _width(instruction))


def _joined(kind: str, scalars: list[_Scalar], base: Low) -> Iterator[Merge]:
    """Merge accesses within the same aligned 16 bytes, then the remaining ones within 8, then within 4."""
    free = list(scalars)
    for size in (16, 8, 4):
        if not base.is_known(size):
            continue
        pieces = defaultdict(list)
        for scalar in free:
            pieces[(base.value + scalar.offset) // size].append(scalar)
        for piece, inside in pieces.items():
            covered = sum(scalar.width for scalar in inside)
            if len(inside) > 1 and covered >= LEAST.get((kind, size), size):
                first = min(inside, key=lambda scalar: scalar.index)
                lowest = piece * size - base.value
                yield Merge(first.index, tuple(sorted(scalar.index for scalar in inside)), size, lowest - first.offset)
                free = [scalar for scalar in free if scalar not in inside]


class _Bases:
    """Return the base and offset of each access by instruction; accesses of a basic block share bases."""

    def __init__(self, kernel: PtxKernel) -> None:
        self.before: dict[int, tuple[Base, int]] = {}
        self._low = low_bits(kernel)
        self._follow(kernel)
        self._proven: dict[Base, Low] = {}  # by another access with the same base, which must be aligned
        for index, (base, offset) in self.before.items():
            proven = Low(_width(kernel.instructions[index]).bit_length() - 1, 0).moved(-offset)
            self._proven[base] = max(proven, self._proven.get(base, proven), key=lambda low: low.bits)

    def low(self, base: Base) -> Low:
        """Return the known low bits of the base."""
        return max(self._low.get(base[0], Low(0, 0)), self._proven.get(base, Low(0, 0)), key=lambda low: low.bits)

    def _follow(self, kernel: PtxKernel) -> None:
        """Walk the instructions, and track each register as a base plus an offset."""
        writes = Counter(register.name for instruction in kernel.instructions for register in written(instruction))
        starts = set(kernel.labels.values())
        known: dict[str, tuple[Base, int]] = {}
        passing: set[str] = set()  # registers that may differ in the next basic block
        ended = False
        for index, instruction in enumerate(kernel.instructions):
            name = instruction.opcode.name
            if ended or index in starts:
                for register_name in passing:
                    del known[register_name]
                passing.clear()
            ended = isinstance(find(instruction.opcode), End)
            if name in ("ld", "st"):
                memory = instruction.operands[name == "ld"]
                if isinstance(memory, Address):
                    base, offset = _origin(memory.base, known)
                    self.before[index] = base, offset + memory.offset
            for register in written(instruction):
                at = self._moved(instruction, known) or ((register.name, index), 0)
                known[register.name] = at
                if writes[register.name] > 1 or writes[at[0][0]] > 1:  # perhaps in the next iteration of a loop
                    passing.add(register.name)

    def _moved(self, instruction: Instruction, known: Mapping[str, tuple[Base, int]]) -> tuple[Base, int] | None:
        """Return the base and offset of an instruction's result if its operands determine them."""
        name = instruction.opcode.name
        if instruction.guard is not None or name not in ("mov", "add", "sub", "or"):
            return None
        source, *rest = instruction.operands[1:]
        if name == "mov":
            return _origin(source, known) if isinstance(source, Symbol | Register) else None
        if not isinstance(source, Register) or not isinstance(rest[0], Immediate):
            return None
        base, offset = _origin(source, known)
        away = rest[0].bits if rest[0].bits < 1 << 63 else rest[0].bits - (1 << 64)
        if name == "or":  # equals an addition, because these bits are known to be zero
            low = self._low.get(source.name, Low(0, 0))
            return (base, offset + away) if 0 <= away < 1 << low.bits and not low.value & away else None
        return base, offset + (away if name == "add" else -away)


def _origin(operand: Operand, known: Mapping[str, tuple[Base, int]]) -> tuple[Base, int]:
    if isinstance(operand, Symbol):
        return (operand.name, 0), operand.offset
    if isinstance(operand, Register):
        return known.get(operand.name, ((operand.name, 0), 0))
    return ("", 0), operand.bits if isinstance(operand, Immediate) else 0


def _element(instruction: Instruction) -> int:
    """Return the bytes of an element of a load or store."""
    return int(NUMPY[instruction.opcode.type][1])


def _width(instruction: Instruction) -> int:
    """Return the bytes that a load or store moves."""
    vector = next((operand for operand in instruction.operands if isinstance(operand, Vector)), None)
    return _element(instruction) * (len(vector.elements) if vector else 1)


LONGEST = 6  # instructions that a branch skips, without moves
LOAD = "ld.global"
PLAIN = (LOAD, "fma", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "cvt", "cvta", "mov")


def predicated(kernel: PtxKernel) -> Mapping[int, int]:
    """Return the instructions that become predicated, by index, each with the branch that skips it in PTX."""
    skipped: dict[int, int] = {}
    labels = set(kernel.labels.values())
    for index, instruction in enumerate(kernel.instructions):
        target = instruction.operands[0] if instruction.operands else None
        if instruction.opcode.name != "bra" or instruction.guard is None or not isinstance(target, Label):
            continue
        body = range(index + 1, kernel.labels[target.name])
        opcodes = (kernel.instructions[at].opcode for at in body)
        # A load is named with its first modifier, which is its space.
        names = [".".join((each.family, *each.modifiers[: each.name == "ld"])) for each in opcodes]
        short = len(names) - names.count("mov") <= LONGEST and labels.isdisjoint(body)
        if short and LOAD in names and all(name in PLAIN for name in names):
            skipped |= dict.fromkeys(body, index)
    return skipped
