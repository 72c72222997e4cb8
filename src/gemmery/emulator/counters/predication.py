"""The short branches that ptxas turns into predicates, so that all warps execute the instructions they skip.

The rules come from the machine code of 77 kernels for sm_90a: all 181 loads of global memory after a branch that skips
at most this many instructions were predicated. Longer bodies, and those that access shared memory, are predicated in
some cases only; here they remain branches.
"""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.emulator.ptx import Label, Opcode, PtxKernel

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
        names = [_name(kernel.instructions[at].opcode) for at in body]
        short = len(names) - names.count("mov") <= LONGEST and labels.isdisjoint(body)
        if short and LOAD in names and all(name in PLAIN for name in names):
            skipped |= dict.fromkeys(body, index)
    return skipped


def _name(opcode: Opcode) -> str:
    """Return the name of an instruction; for a load with its first modifier, which is its space.

    >>> from gemmery.emulator.ptx.opcodes import opcode
    >>> [_name(opcode(text)) for text in ("ld.global.v4.f32", "ld.shared.f32", "add.s64")]
    ['ld.global', 'ld.shared', 'add']
    """
    return ".".join(("ld", *opcode.modifiers[:1])) if opcode.name == "ld" else opcode.family
