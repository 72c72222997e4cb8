"""How often multiply-adds of machine code read several registers of one bank, which takes longer."""

from __future__ import annotations

import numpy as np

FFMA, OPCODE = 0x223, 0xFFF  # of three registers, in f32; the bits that say so
CODE = 16  # bytes of an instruction, of sm_70 and later
OPERANDS = 3


def bank_conflicts(cubin: bytes, reads: int) -> float | None:
    """Return the clocks by which banks are late, of a multiply-add; 0 if there is none, None if there is no code.

    Registers of even and of odd numbers are two banks, each of which gives `reads` registers while a multiply-add is
    issued. An operand that the instruction before has kept at the same place (`.reuse`) is not read again.
    """
    words = np.frombuffer(cubin[: len(cubin) // CODE * CODE], np.uint64).reshape(-1, 2)
    low, high = words.T
    multiplies = low & OPCODE == FFMA
    if not multiplies.any():
        return 0.0 if cubin else None
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
