"""Which accesses ptxas merges into wider ones: at adjacent addresses, off one base, with nothing between to forbid it.

Found by comparing PTX with the machine code that ptxas made of it. An access of 8 or 16 bytes has to be aligned, so
ptxas merges where it can tell that: from where shared variables lie and from arithmetic on addresses (alignment.py), or
from an access as wide off the same base. What ptxas does across basic blocks, unrolling loops, is not modelled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gemmery.emulator.counters.alignment import Low, low_bits, written
from gemmery.emulator.op import NUMPY
from gemmery.emulator.ptx import Immediate, Instruction, Kernel, Memory, Operand, Register, Symbol, Vector

LEAST = {("ld", 16): 12}  # bytes asked for of a wide access, if not all: three words are loaded as four
KEPT = (".volatile", ".mmio")  # those that ptxas leaves as written; it merges relaxed, acquire and release
SMALLEST = {"ld": 4, "st": 2}  # bytes of an access that may be merged
SPACES = frozenset(("global", "shared", "shared::cta", "local", "const", "param", "param::entry"))
ENDS = ("bra", "brx", "ret", "exit", "trap", "bar", "barrier", "call")
ORDERS = ("membar", "fence", "cp", "mbarrier")  # no access is moved across


@dataclass(frozen=True)
class Merge:
    """Accesses of one thread that become one."""

    first: int  # the instruction, of those merged, that is executed first and stands for all
    members: tuple[int, ...]
    width: int  # bytes, of all together
    offset: int  # from the address of the first to the lowest


@dataclass(frozen=True)
class _Scalar:
    """One access that may be merged."""

    index: int
    offset: int  # from its base
    width: int


# Where an address starts: a register and how often it was written before, or a variable.
Base = tuple[str, int]
# What accesses have to share: "ld" or "st", space, base, guard, bytes of an element; stores also all their bytes.
Stream = tuple[str, str, Base, str, int, int]


def merged(kernel: Kernel) -> Mapping[int, Merge]:
    """The merge that each instruction is part of, by its index; those that stay alone are not in it.

    Loads of ld.shared.f32 from [%r1] and [%r1+4] become one of 8 bytes, when %r1 is known to be a multiple of 8.
    """
    bases = _Bases(kernel)
    found: dict[int, Merge] = {}
    for streams in _open_streams(kernel, bases):
        for (kind, _, base, *_), scalars in streams.items():
            for merge in _joined(kind, scalars, bases.low(base)):
                found |= dict.fromkeys(merge.members, merge)
    return found


def _open_streams(kernel: Kernel, bases: _Bases) -> Iterator[dict[Stream, list[_Scalar]]]:
    """Scalars that nothing keeps apart, stream by stream."""
    streams: dict[Stream, list[_Scalar]] = defaultdict(list)
    starts = set(kernel.labels.values())

    def close(kinds: tuple[str, ...], space: str) -> dict[Stream, list[_Scalar]]:
        return {key: streams.pop(key) for key in list(streams) if key[0] in kinds and space in ("", key[1])}

    for index, instruction in enumerate(kernel.instructions):
        kind = instruction.opcode.partition(".")[0]
        if index in starts or kind in ENDS or kind in ORDERS:
            yield close(("ld", "st"), "")
        if kind in ("atom", "red"):
            yield close(("ld", "st"), _space(instruction))
        if kind in ("ld", "st"):
            space = _space(instruction)
            yield close(("st",) if kind == "ld" else ("ld",), space)
            found = _scalar(index, instruction, bases)
            if found is not None:
                guard = f"{'!' * instruction.negated}{instruction.guard.name}" if instruction.guard else ""
                key = (kind, space, found[0], guard, _element(instruction), found[1].width if kind == "st" else 0)
                if any(one.offset == found[1].offset for one in streams.get(key, ())):
                    yield {key: streams.pop(key)}
                streams[key].append(found[1])
    yield streams


def _space(instruction: Instruction) -> str:
    """The space of a load or store, "" for what may lie in any."""
    return next((word.partition("::")[0] for word in instruction.opcode.split(".") if word in SPACES), "")


def _scalar(index: int, instruction: Instruction, bases: _Bases) -> tuple[Base, _Scalar] | None:
    if _space(instruction) not in ("global", "shared") or index not in bases.before:
        return None
    if any(word in instruction.opcode for word in KEPT):
        return None
    if _element(instruction) < SMALLEST[instruction.opcode[:2]]:
        return None
    base, offset = bases.before[index]
    return base, _Scalar(index, offset, _width(instruction))


def _joined(kind: str, scalars: list[_Scalar], base: Low) -> Iterator[Merge]:
    """Merge what lies in the same aligned 16 bytes, then what is left in the same 8, then in 4."""
    free = list(scalars)
    for size in (16, 8, 4):
        if not base.is_known(size):
            continue
        pieces = defaultdict(list)
        for one in free:
            pieces[(base.value + one.offset) // size].append(one)
        for piece, inside in pieces.items():
            covered = sum(one.width for one in inside)
            if len(inside) > 1 and covered >= LEAST.get((kind, size), size):
                first = min(inside, key=lambda one: one.index)
                lowest = piece * size - base.value
                yield Merge(first.index, tuple(sorted(one.index for one in inside)), size, lowest - first.offset)
                free = [one for one in free if one not in inside]


class _Bases:
    """Where each access starts, `before` by instruction: a base that accesses of a basic block share, and bytes."""

    def __init__(self, kernel: Kernel) -> None:
        self.before: dict[int, tuple[Base, int]] = {}
        self._low = low_bits(kernel)
        self._follow(kernel)
        self._proven: dict[Base, Low] = {}  # by an access off the same base, which has to be aligned itself
        for index, (base, offset) in self.before.items():
            proven = Low(_width(kernel.instructions[index]).bit_length() - 1, 0).moved(-offset)
            self._proven[base] = max(proven, self._proven.get(base, proven), key=lambda low: low.bits)

    def low(self, base: Base) -> Low:
        """What is known of the base's low bits."""
        return max(self._low.get(base[0], Low(0, 0)), self._proven.get(base, Low(0, 0)), key=lambda low: low.bits)

    def _follow(self, kernel: Kernel) -> None:
        """Walk the instructions, and keep of each register from which base it is how far away."""
        writes = Counter(register.name for one in kernel.instructions for register in written(one))
        starts = set(kernel.labels.values())
        known: dict[str, tuple[Base, int]] = {}
        passing: set[str] = set()  # registers that may be others in the next basic block
        ended = False
        for index, instruction in enumerate(kernel.instructions):
            name = instruction.opcode.partition(".")[0]
            if ended or index in starts:
                for one in passing:
                    del known[one]
                passing.clear()
            ended = name in ENDS
            if name in ("ld", "st"):
                memory = instruction.operands[name == "ld"]
                if isinstance(memory, Memory):
                    base, offset = _origin(memory.base, known)
                    self.before[index] = base, offset + memory.offset
            for register in written(instruction):
                at = self._moved(instruction, known) or ((register.name, index), 0)
                known[register.name] = at
                if writes[register.name] > 1 or writes[at[0][0]] > 1:  # written again, perhaps in a loop's next turn
                    passing.add(register.name)

    def _moved(self, instruction: Instruction, known: Mapping[str, tuple[Base, int]]) -> tuple[Base, int] | None:
        """The base and distance of an instruction's result, when they follow from its operands."""
        name = instruction.opcode.partition(".")[0]
        if instruction.guard is not None or name not in ("mov", "add", "sub", "or"):
            return None
        source, *rest = instruction.operands[1:]
        if name == "mov":
            return _origin(source, known) if isinstance(source, Symbol | Register) else None
        if not isinstance(source, Register) or not isinstance(rest[0], Immediate):
            return None
        base, offset = _origin(source, known)
        away = rest[0].bits if rest[0].bits < 1 << 63 else rest[0].bits - (1 << 64)
        if name == "or":  # an addition where the bits are known to be free
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
    """Bytes of an element that a load or store moves."""
    return int(NUMPY[instruction.opcode.rpartition(".")[2]][1])


def _width(instruction: Instruction) -> int:
    """Bytes that it moves."""
    vector = next((one for one in instruction.operands if isinstance(one, Vector)), None)
    return _element(instruction) * (len(vector.elements) if vector else 1)
