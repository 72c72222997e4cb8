"""cp.async, and the groups in which threads wait for their copies.

PTX ISA 9.0, "Data Movement and Conversion Instructions: Non-bulk copy".
"""

from __future__ import annotations

import re

import numpy as np

from gemmery.emulator import reach
from gemmery.emulator.machine import Machine
from gemmery.emulator.op import FETCHES, POLICY, SPACES, STORED, Kinds, Mask, sort_by_kind
from gemmery.emulator.ptx import Address, Immediate, Instruction, Not, Opcode, Register
from gemmery.emulator.reach import Copies
from gemmery.emulator.steps import Handler, Lower, Lowering, Read, Step, only_constant, refused

_MODIFIERS: Kinds = {"space": ("shared", "shared::cta"), "cache": ("ca", "cg"), "fetch": FETCHES, "policy": (POLICY,)}


def _read(opcode: Opcode) -> dict[str, str] | None:
    """Read the opcode of cp.async from global to shared memory, by kind; returns None if ptxas refuses it.

    >>> from gemmery.emulator.ptx.opcodes import opcode
    >>> _read(opcode("cp.async.cg.shared.global.L2::128B"))
    {'cache': 'cg', 'space': 'shared', 'fetch': 'L2::128B'}
    """
    spaces = [word for word in opcode.modifiers if word in SPACES]
    words = sort_by_kind([word for word in opcode.modifiers if word != "global"], _MODIFIERS)
    if words is None or opcode.types or "cache" not in words or spaces[1:] != ["global"] or "space" not in words:
        return None
    return words


def _commit(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    return lambda machine, mask: machine.unit(Copies).commit(mask)


def _wait_all(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    return lambda machine, mask: machine.unit(Copies).wait_all(mask)


def _wait(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    pending = only_constant(instruction)
    return lambda machine, mask: machine.unit(Copies).wait(mask, pending)


def _copy(lowering: Lowering, instruction: Instruction, index: int) -> Step:
    """cp.async of 4, 8 or 16 bytes."""
    words = _read(instruction.opcode)
    if words is None:
        raise refused(instruction)
    match instruction.operands[: len(instruction.operands) - ("policy" in words)]:
        case Address() as target, Address() as source, Immediate(width), *fourth if len(fourth) < 2:
            pass
        case _:
            raise refused(instruction)
    if width not in ((16,) if words["cache"] == "cg" else (4, 8, 16)):
        raise refused(instruction, f"{width} bytes:")
    to, out_of = lowering.address(target, instruction), lowering.address(source, instruction)
    # The fourth operand is the number of bytes to read (the rest is zeros), or a predicate: true reads nothing.
    extra: Read | None = None
    ignored = False
    match fourth:
        case [Not() | Register(type="pred") as predicate]:
            extra, ignored = lowering.read(predicate, "pred", instruction), True
        case [Immediate(count)] if count > width:
            raise refused(instruction, f"{count} of {width} bytes:")
        case [Immediate() | Register() as size] if not (isinstance(size, Register) and STORED[size.type] != "u4"):
            extra = lowering.read(size, "u32", instruction)
        case [_]:
            raise refused(instruction)

    def step(machine: Machine, mask: Mask) -> None:
        registers = machine.registers
        size = None
        if extra is not None:
            size = np.where(extra(registers), 0, width) if ignored else extra(registers).astype(np.int64)
        reach.copy(machine, index, to(registers), out_of(registers), mask, width, size)

    return step


def _group(step: Lower, name: str, operands: int) -> Handler:
    return Handler(step=step, spelled=re.compile(re.escape(name)), operands=(operands,), kind=name, orders=True)


TABLE = {
    "cp.async": Handler(step=_copy, kind="cp.async", orders=True),
    "cp.async.commit_group": _group(_commit, "cp.async.commit_group", 0),
    "cp.async.wait_group": _group(_wait, "cp.async.wait_group", 1),
    "cp.async.wait_all": _group(_wait_all, "cp.async.wait_all", 0),
}
