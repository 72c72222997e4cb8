"""Derive the low bits of addresses before a kernel runs, as ptxas does to know whether an access is aligned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gemmery.emulator.instructions import written
from gemmery.emulator.ptx import Immediate, Instruction, Operand, PtxKernel, Register, Symbol, Variable

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
    known = {name: _of_variable(variable) for name, variable in kernel.variables.items()}
    carrying: list[tuple[str, Instruction]] = []
    for instruction in kernel.instructions:
        for register in written(instruction):
            if _carries(instruction):
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


def _of_variable(variable: Variable) -> Low:
    placed = variable.space == "shared" and variable.size
    return Low(MOST, variable.offset) if placed else Low(variable.align.bit_length() - 1, 0)


def _carries(instruction: Instruction) -> bool:
    """Whether the low bits of a result depend on the low bits of the operands alone."""
    opcode = instruction.opcode
    floats = any(kind.startswith("f") for kind in opcode.types)
    return opcode.name in MEANINGS and "hi" not in opcode.modifiers and not floats


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


def _difference(number: Low, other: Low) -> Low:
    return Low(min(number.bits, other.bits), number.value - other.value)


def _product(number: Low, other: Low) -> Low:
    return Low(min(number.bits + other.zeros, other.bits + number.zeros), number.value * other.value)


def _conjunction(number: Low, other: Low) -> Low:
    return Low(max(min(number.bits, other.bits), number.zeros, other.zeros), number.value & other.value)


# Instructions whose low bits depend on those of the operands: the function, and the number of operands.
MEANINGS: dict[str, tuple[Callable[..., Low], int]] = {
    **dict.fromkeys(("mov", "cvta", "cvt"), (lambda number: number, 1)),
    "add": (_sum, 2),
    "sub": (_difference, 2),
    "mul": (_product, 2),
    "mad": (lambda number, other, third: _sum(_product(number, other), third), 3),
    "shl": (lambda number, by: Low(number.bits + by.value, number.value << by.value), 2),
    "and": (_conjunction, 2),
    "or": (lambda number, other: Low(min(number.bits, other.bits), number.value | other.value), 2),
    "xor": (lambda number, other: Low(min(number.bits, other.bits), number.value ^ other.value), 2),
    **dict.fromkeys(("selp", "min", "max"), (Low.either, 2)),
}
