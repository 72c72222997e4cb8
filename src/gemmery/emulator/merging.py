"""Which accesses ptxas merges into wider ones: at adjacent addresses off one base, with nothing between that forbids it.

Found by comparing PTX with the machine code that ptxas made of it. An access of 8 or 16 bytes has to be aligned, so
ptxas merges where it can tell that: from where shared variables lie and from arithmetic on addresses (alignment.py), or
from an access as wide off the same base. What ptxas does across basic blocks, unrolling loops, is not modelled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gemmery.emulator.alignment import Low, low_bits, written
from gemmery.emulator.op import NUMPY
from gemmery.emulator.ptx import Immediate, Instruction, Kernel, Memory, Operand, Register, Symbol, Vector

WIDEST = 16  # bytes
ENDS = ("bra", "brx", "ret", "exit", "trap", "bar", "barrier", "call")
ORDERS = ("membar", "fence", "atom", "red", "cp", "mbarrier")  # no access is moved across


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


SPACES = frozenset(("global", "shared", "shared::cta", "local", "const", "param", "param::entry"))

# Where an address starts: a register and how often it was written before, or a variable.
Base = tuple[str, int]
# What accesses have to share: "ld" or "st", space, base, guard, bytes of an element.
Stream = tuple[str, str, Base, str, int]


def merged(kernel: Kernel) -> Mapping[int, Merge]:
    """The merge that each instruction is part of, by its index; those that stay alone are not in it.

    >>> merged(parse(ptx).kernels["sum"])  # ld.shared.f32 of [%r1], [%r1+4], instructions 3 and 4
    {3: Merge(first=3, members=(3, 4), width=8, offset=0), 4: Merge(first=3, members=(3, 4), width=8, offset=0)}
    """
    bases = _Bases(kernel)
    found: dict[int, Merge] = {}
    for streams in _open_streams(kernel, bases):
        for (_, _, base, *_), scalars in streams.items():
            for merge in _joined(scalars, bases.low(base)):
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
        if kind in ("ld", "st"):
            space = _space(instruction)
            yield close(("st",) if kind == "ld" else ("ld",), space)
            found = _scalar(index, instruction, bases)
            if found is not None:
                guard = f"{'!' * instruction.negated}{instruction.guard.name}" if instruction.guard else ""
                key = (kind, space, found[0], guard, found[1].width)
                if any(one.offset == found[1].offset for one in streams.get(key, ())):
                    yield {key: streams.pop(key)}
                streams[key].append(found[1])
    yield streams


def _space(instruction: Instruction) -> str:
    """The space of a load or store, "" for what may lie in any."""
    return next((word.partition("::")[0] for word in instruction.opcode.split(".") if word in SPACES), "")


def _scalar(index: int, instruction: Instruction, bases: _Bases) -> tuple[Base, _Scalar] | None:
    if _space(instruction) not in ("global", "shared") or index not in bases.before or "volatile" in instruction.opcode:
        return None
    base, offset = bases.before[index]
    return base, _Scalar(index, offset, _width(instruction))


def _joined(scalars: list[_Scalar], base: Low) -> Iterator[Merge]:
    """The widest aligned runs of adjacent scalars, from the lowest address up."""
    places = {one.offset: one for one in scalars}
    free = sorted(places)
    while free:
        lowest, width = free[0], places[free[0]].width
        for count in (count for count in (8, 4, 2) if count * width <= WIDEST):
            run = [lowest + width * step for step in range(count)]
            size = width * count
            if base.moved(lowest).is_multiple(size) and all(place in places for place in run):
                members = tuple(sorted(places[place].index for place in run))
                first = next(one for one in scalars if one.index == members[0])
                yield Merge(members[0], members, size, lowest - first.offset)
                free = [place for place in free if place not in run]
                break
        else:
            free.pop(0)


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
        ended = False
        for index, instruction in enumerate(kernel.instructions):
            name = instruction.opcode.partition(".")[0]
            if ended or index in starts:  # what is written again elsewhere may come here in another turn of a loop
                known = {one: at for one, at in known.items() if writes[one] == 1 and writes[at[0][0]] <= 1}
            ended = name in ENDS
            if name in ("ld", "st"):
                memory = instruction.operands[name == "ld"]
                if isinstance(memory, Memory):
                    base, offset = _origin(memory.base, known)
                    self.before[index] = base, offset + memory.offset
            for register in written(instruction):
                known[register.name] = self._moved(instruction, known) or ((register.name, index), 0)

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


def _width(instruction: Instruction) -> int:
    vector = next((one for one in instruction.operands if isinstance(one, Vector)), None)
    return int(NUMPY[instruction.opcode.rpartition(".")[2]][1]) * (len(vector.elements) if vector else 1)
