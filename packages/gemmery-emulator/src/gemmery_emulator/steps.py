"""Turn an instruction into a step: a function of the machine and of the mask of active threads (None: all).

Everything known before a launch is looked up once, so that a step costs little more than its NumPy calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from gemmery.errors import EmulationError
from gemmery_emulator import specials
from gemmery_emulator.machine import Machine, UnitState
from gemmery_emulator.op import NUMPY, STORED, Mask, Op, Traits, pair
from gemmery_emulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Not,
    Opcode,
    Operand,
    PtxKernel,
    Register,
    Special,
    Symbol,
    Vector,
    names_of,
)

Step = Callable[["Machine", Mask], None]
Read = Callable[[list[Any]], Any]
Write = Callable[[list[Any], Mask, Any], None]
Faster = Mapping[Callable[..., Any], Callable[..., Any]]
CARRY = Register("%carry", "pred")  # the carry flag of each thread, which PTX does not name
WAYS_OUT = (
    "put plain C++ in its place, for example under #ifdef EMULATED and options=('-DEMULATED',); another "
    "arch= helps where the source takes another path there"
)


def drop(registers: list[Any], mask: Mask, value: Any) -> None:
    """Write to the sink `_`."""


def refused(instruction: Instruction, what: str = "instruction") -> EmulationError:
    """Return the error for an instruction that is not modeled."""
    return EmulationError(f"{what} {instruction.text!r} ({instruction.line}) is not modeled: {WAYS_OUT}")


class Lowering:
    """Turns operands into functions of the registers, and assigns slots to registers in the order of their use."""

    def __init__(self, kernel: PtxKernel, faster: Faster) -> None:
        self.kernel = kernel
        self.faster = faster
        self.slots: dict[str, int] = {}
        self.provided: dict[str, int] = {}
        self.zeros: list[Any] = []
        self.parameters = {parameter.name: parameter for parameter in kernel.parameters}
        self.shuffles = any(instruction.opcode.name == "shfl" for instruction in kernel.instructions)
        products = (each for each in kernel.instructions if each.opcode.name == "wgmma.mma_async")
        self.followed = 0  # registers that may be read before they are written, as bits by slot
        # The registers that products of warpgroups write.
        self.sums = frozenset(names_of(each.operands[0] for each in products))

    def slot(self, name: str, stored: str, provided: bool = False) -> int:
        """Return the slot of a register, or of a value that is `provided` before the launch."""
        slots = self.provided if provided else self.slots
        slot = slots.get(name)
        if slot is None:
            slot = slots[name] = len(self.zeros)
            self.zeros.append(np.dtype(stored).type(0))
        return slot

    def read(self, operand: Operand, kind: str, instruction: Instruction) -> Read:
        """Return a function that reads an operand as a PTX type."""
        dtype = NUMPY[kind]
        match operand:
            case Register("_"):
                raise refused(instruction, "the sink _ as a source of")
            case Register(name, declared):
                return viewed(itemgetter(self.slot(name, STORED[declared])), STORED[declared], dtype)
            case Immediate(bits, type_):
                value = constant(bits, type_, dtype)
                return lambda _: value
            case Special(name) if not specials.is_modeled(name):
                return partial(_raise, refused(instruction, f"special register {name} of"))
            case Special(name):
                wide = name.endswith("64") or name in ("%globaltimer",)
                stored = "?" if name.startswith("%is_") else "u8" if wide else "u4"
                return viewed(itemgetter(self.slot(name, stored, provided=True)), stored, dtype)
            case Symbol(name, offset):
                if name in self.parameters:
                    place = np.dtype(dtype).type(self.parameters[name].offset + offset)
                    return lambda _: place
                self._check_pointers(name)
                read = viewed(itemgetter(self.slot(name, "u8", provided=True)), "u8", dtype)
                distance = np.dtype(dtype).type(offset)
                return (lambda registers: read(registers) + distance) if offset else read
            case Not(register):
                inner = self.read(register, "pred", instruction)
                return lambda registers: np.logical_not(inner(registers))
        raise refused(instruction, f"operand {operand} of it")

    def _check_pointers(self, name: str) -> None:
        """Refuse a variable whose initial value is the address of a function."""
        variables = self.kernel.variables
        for _, pointed, _ in variables[name].pointers if name in variables else ():
            if variables.get(pointed) is None or variables[pointed].space not in ("global", "const"):
                raise EmulationError(
                    f"variable {name} holds the address of {pointed}, which is no variable or "
                    "function that the text defines: define it"
                )

    def address(self, memory: Operand, instruction: Instruction) -> Read:
        """Return a function that gives the address in brackets as int64; refuse another operand."""
        if not isinstance(memory, Address):
            raise refused(instruction)
        base, offset = memory.base, np.int64(memory.offset)
        if isinstance(base, Register) and STORED.get(base.type) == "u4":  # the sum wraps at 32 bits
            narrow, distance = itemgetter(self.slot(base.name, "u4")), np.uint32(memory.offset % (1 << 32))
            return lambda registers: (narrow(registers) + distance).view(np.int32).astype(np.int64)
        read = self.read(base, "s64", instruction)
        return (lambda registers: read(registers) + offset) if memory.offset else read

    def write(self, operand: Operand, kind: str, instruction: Instruction) -> Write:
        """Return a function that writes a value of a PTX type to a register; `drop` for the sink."""
        if not isinstance(operand, Register):
            raise refused(instruction, f"result {operand} of it")
        if operand.name == "_":
            return drop
        stored, dtype = STORED[operand.type], NUMPY[kind]
        number = self.slot(operand.name, stored)
        if stored == dtype:

            def put(registers: list[Any], mask: Mask, value: Any) -> None:
                registers[number] = value if mask is None else np.where(mask, value, registers[number])

            return put
        fit = viewed(lambda registers: registers[0], dtype, stored)

        def fitted(registers: list[Any], mask: Mask, value: Any) -> None:
            value = fit([value])
            registers[number] = value if mask is None else np.where(mask, value, registers[number])

        return fitted

    def flat(self, operands: tuple[Operand, ...]) -> list[Operand]:
        """Replace vectors by their elements."""
        elements: list[Operand] = []
        for operand in operands:
            elements.extend(operand.elements if isinstance(operand, Vector) else (operand,))
        return elements

    def computed(self, instruction: Instruction, op: Op) -> Step:
        """Return the step of an instruction that only computes."""
        first = instruction.operands[0] if instruction.operands else None
        count = len(first.elements) if isinstance(first, Vector) else 1
        operands = self.flat(instruction.operands)
        results, sources = operands[:count], operands[count:]
        kinds, result_kinds = op.operands, op.results
        if "in" in op.carry.split():
            sources, kinds = [*sources, CARRY], (*kinds, "pred")
        if "out" in op.carry.split():
            results, result_kinds = [*results, CARRY], (*result_kinds, "pred")
        if op.complement is not None and len(results) == 2:
            result_kinds = (*result_kinds, "pred")
        meaning = self.meaning(op)
        if op.folds and len(sources) == 3:
            kinds, meaning = (*kinds, kinds[0]), partial(_folded, meaning)
        if len(sources) != len(kinds) or len(results) > len(result_kinds):
            raise refused(instruction, f"{len(operands)} operands:")
        reads = [self.read(*pair, instruction) for pair in zip(sources, kinds, strict=True)]
        writes = [self.write(*pair, instruction) for pair in zip(results, result_kinds, strict=False)]
        if op.scope == "warp":
            return partial(_of_warps, meaning, reads, writes)
        if op.complement is not None and len(results) == 2:
            meaning = pair(meaning, op.complement)
        return lane_step(meaning, reads, writes, several=len(result_kinds) > 1)

    def meaning(self, op: Op) -> Callable[..., Any]:
        """Return an op's function, or the faster one that this launch has for it."""
        if op.core is not None and op.core in self.faster:
            return partial(op.meaning, core=self.faster[op.core])
        return self.faster.get(op.meaning, op.meaning)


Lower = Callable[[Lowering, Instruction, int], Step]


@dataclass(frozen=True, kw_only=True)
class Handler(Traits):
    """An instruction that needs the machine, or reads its operands in its own way.

    `step` lowers an instruction, which has this index in its kernel.
    """

    step: Lower
    spelled: re.Pattern[str] | None = None  # its opcodes; None if `step` refuses those that are not modeled
    operands: tuple[int, ...] = ()  # how many it may have; empty if `step` refuses other numbers
    count: Callable[[Opcode], tuple[str, int]] | None = None  # `kind` and `issues`, if they depend on the modifiers

    def takes(self, instruction: Instruction) -> bool:
        """Whether an instruction is spelled so, and has so many operands."""
        spelled = self.spelled is None or self.spelled.fullmatch(instruction.opcode.spelling) is not None
        return spelled and (not self.operands or len(instruction.operands) in self.operands)


def no_step(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """Lower an instruction that has no effect here, such as a hint to caches."""
    return lambda machine, mask: None


def on_unit(unit: Callable[[Machine], UnitState], does: Callable[[UnitState, Mask], None]) -> Lower:
    """Lower an instruction to a call of a unit of the machine, with the active threads."""
    return lambda lowering, instruction, index: lambda machine, mask: does(machine.unit(unit), mask)


def only_constant(instruction: Instruction) -> int:
    """Return the only operand, which must be a constant."""
    (operand,) = instruction.operands
    if not isinstance(operand, Immediate):
        raise refused(instruction)
    return operand.bits


def lane_step(meaning: Callable[..., Any], reads: list[Read], writes: list[Write], several: bool = False) -> Step:
    """Return a step that writes what a function makes of what is read: one result, or a tuple of several."""
    return partial(_many, meaning, reads, writes) if several else partial(_single, meaning, reads, writes[0])


def _many(meaning: Callable[..., Any], reads: list[Read], writes: list[Write], machine: Machine, mask: Mask) -> None:
    registers = machine.registers
    for write, value in zip(writes, meaning(*[read(registers) for read in reads]), strict=False):
        write(registers, mask, value)


def _single(meaning: Callable[..., Any], reads: list[Read], write: Write, machine: Machine, mask: Mask) -> None:
    registers = machine.registers
    write(registers, mask, meaning(*[read(registers) for read in reads]))


def _of_warps(
    meaning: Callable[..., Any], reads: list[Read], writes: list[Write], machine: Machine, mask: Mask
) -> None:
    registers, shape = machine.registers, (machine.warps, 32)
    active = np.ones(shape, bool) if mask is None else mask.reshape(shape)
    values = meaning(active, *[machine.spread(read(registers)).reshape(shape) for read in reads])
    for write, value in zip(writes, values if isinstance(values, tuple | list) else (values,), strict=False):
        write(registers, mask, value.reshape(-1))


def _folded(meaning: Callable[..., Any], first: Any, second: Any, third: Any) -> Any:
    return meaning(meaning(first, second), third)


def _raise(error: EmulationError, registers: list[Any]) -> Any:
    """Read an operand without a value."""
    raise error


def viewed(read: Callable[[Any], Any], stored: str, dtype: str) -> Callable[[Any], Any]:
    """Read values that are kept as one NumPy type as another: the same bits, truncated or extended."""
    if stored == dtype:
        return read
    if stored == "?" or dtype == "?":
        return lambda registers: read(registers).astype(dtype)
    if stored[1] == dtype[1]:
        return lambda registers: read(registers).view(dtype)
    # Truncate to the lower bytes, or extend: by the sign if the value is signed, else with zeros.
    source = stored if stored[0] == "i" else f"u{stored[1]}"
    target = f"{source[0]}{dtype[1]}"
    return lambda registers: read(registers).view(source).astype(target).view(dtype)


def constant(bits: int, type_: str, dtype: str) -> Any:
    """Return a constant of a PTX text as a NumPy type."""
    if dtype == "?":
        return np.bool_(bits != 0)
    size = np.dtype(dtype).itemsize
    if type_ in ("f32", "f64"):
        value = np.array(bits, "u4" if type_ == "f32" else "u8").view(NUMPY[type_])[()]
        return value.astype(dtype) if dtype[0] == "f" else value.view(f"u{value.itemsize}").astype(dtype)
    if dtype[0] == "f":
        return np.dtype(dtype).type(bits)
    return np.array(bits & ((1 << 8 * size) - 1), f"u{size}").view(dtype)[()]
