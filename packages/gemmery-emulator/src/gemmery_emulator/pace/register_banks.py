"""How often multiply-adds of machine code read several registers of one bank, which takes longer."""

from __future__ import annotations

import struct

import numpy as np

FFMA, OPCODE = 0x223, 0xFFF  # of three registers, in f32; the bits that say so
CODE = 16  # bytes of an instruction, of sm_70 and later
OPERANDS = 3


def code_of(cubin: bytes, kernel: str) -> bytes:
    """Return the machine code of one kernel: the section .text.KERNEL of a 64-bit ELF file; b"" if there is none."""
    if not cubin:
        return b""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + place * size) for place in range(count)]
    for name, _, _, _, start, length in sections:
        at = sections[names][4] + name
        if cubin[at : cubin.index(b"\0", at)] == b".text." + kernel.encode():
            return cubin[start : start + length]
    return b""


def bank_conflicts(code: bytes, reads: int) -> float | None:
    """Return the clocks by which banks are late, of a multiply-add; 0 if there is none, None if there is no code.

    Registers of even and of odd numbers are two banks, each of which gives `reads` registers while a multiply-add is
    issued. An operand that the instruction before has kept at the same place (`.reuse`) is not read again.
    """
    words = np.frombuffer(code[: len(code) // CODE * CODE], np.uint64).reshape(-1, 2)
    low, high = words.T
    multiplies = low & OPCODE == FFMA
    if not multiplies.any():
        return 0.0 if code else None
    registers = np.stack([low >> 24, low >> 32, high], axis=1) & 0xFF
    keeps = np.stack([high >> 58 + place & 1 for place in range(OPERANDS)], axis=1) == 1
    read = np.ones_like(keeps)
    read[1:] = ~(keeps[:-1] & (registers[1:] == registers[:-1]))
    for place in range(1, OPERANDS):  # a register that stands twice is read once
        same = registers[:, :place] == registers[:, place, None]
        read[:, place] &= ~(same & read[:, :place]).any(axis=1)
    odd = registers % 2 == 1
    fullest = np.maximum((read & odd).sum(axis=1), (read & ~odd).sum(axis=1))
    return float(np.maximum(fullest - reads, 0)[multiplies].mean())
