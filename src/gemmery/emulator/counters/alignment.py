"""Derive the low bits of addresses before a kernel runs, as ptxas does to know whether an access is aligned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gemmery.emulator.ptx import Immediate, Instruction, Kernel, Operand, Register, Symbol, Vector

MOST = 10  # bits tracked: shared memory starts at a multiple of 1024 bytes
NO_RESULT = ("st", "red", "bra", "brx", "ret", "exit", "trap", "bar", "barrier", "cp")


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


def low_bits(kernel: Kernel) -> dict[str, Low]:
    """Return the low bits of each register and shared variable on every path."""
    found = {
        name: Low(MOST, one.offset) if one.space == "shared" and one.size else Low(one.align.bit_length() - 1, 0)
        for name, one in kernel.variables.items()
    }
    carrying: list[tuple[str, Instruction]] = []
    for instruction in kernel.instructions:
        for register in written(instruction):
            if _carries(instruction):
                carrying.append((register.name, instruction))
            else:
                found[register.name] = UNKNOWN
    changed = True
    while (
        changed
    ):  # start with too many known bits and reduce them, so that a loop keeps those that every iteration keeps
        changed = False
        for name, instruction in carrying:
            before = found.get(name)
            if before is UNKNOWN:
                continue
            result = _result(instruction, found)
            if result is not None and (now := result if before is None else before.either(result)) != before:
                found[name], changed = now, True
    return found


def written(instruction: Instruction) -> tuple[Register, ...]:
    """Return the registers that an instruction writes."""
    if not instruction.operands or instruction.opcode.family in NO_RESULT:
        return ()
    first = instruction.operands[0]
    parts = first.elements if isinstance(first, Vector) else (first,)
    return tuple(one for one in parts if isinstance(one, Register))


def _carries(instruction: Instruction) -> bool:
    """Whether the low bits of a result depend on the low bits of the operands alone."""
    opcode = instruction.opcode
    floats = any(kind.startswith("f") for kind in opcode.types)
    return opcode.name in MEANINGS and "hi" not in opcode.modifiers and not floats


def _result(instruction: Instruction, found: Mapping[str, Low]) -> Low | None:
    """Return the low bits of a result; None if an operand has not been computed yet."""
    name = instruction.opcode.name
    meaning, count = MEANINGS[name]
    given = [_low(operand, found) for operand in instruction.operands[1 : 1 + count]]
    if name == "shl" and not isinstance(instruction.operands[2], Immediate):
        return UNKNOWN
    return None if None in given else meaning(*given)


def _low(operand: Operand, found: Mapping[str, Low]) -> Low | None:
    match operand:
        case Register(name=name):
            return found.get(name)
        case Immediate(bits=bits):
            return Low(MOST, bits)
        case Symbol(name=name, offset=offset):
            return found.get(name, UNKNOWN).moved(offset)
    return UNKNOWN


def _sum(one: Low, other: Low) -> Low:
    return Low(min(one.bits, other.bits), one.value + other.value)


def _difference(one: Low, other: Low) -> Low:
    return Low(min(one.bits, other.bits), one.value - other.value)


def _product(one: Low, other: Low) -> Low:
    return Low(min(one.bits + other.zeros, other.bits + one.zeros), one.value * other.value)


def _conjunction(one: Low, other: Low) -> Low:
    return Low(max(min(one.bits, other.bits), one.zeros, other.zeros), one.value & other.value)


# Instructions whose low bits depend on those of the operands: the function, and the number of operands.
MEANINGS: dict[str, tuple[Callable[..., Low], int]] = {
    **dict.fromkeys(("mov", "cvta", "cvt"), (lambda one: one, 1)),
    "add": (_sum, 2),
    "sub": (_difference, 2),
    "mul": (_product, 2),
    "mad": (lambda one, other, third: _sum(_product(one, other), third), 3),
    "shl": (lambda one, by: Low(one.bits + by.value, one.value << by.value), 2),
    "and": (_conjunction, 2),
    "or": (lambda one, other: Low(min(one.bits, other.bits), one.value | other.value), 2),
    "xor": (lambda one, other: Low(min(one.bits, other.bits), one.value ^ other.value), 2),
    **dict.fromkeys(("selp", "min", "max"), (Low.either, 2)),
}
