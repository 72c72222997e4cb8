"""All instructions that are modelled: each file of instructions has a table, and stands here once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gemmery.emulator import access, atomics, control, matrices, printing, textures
from gemmery.emulator.blackwell import tcgen05_memory, tcgen05_operations
from gemmery.emulator.hopper import cluster, mbarrier, transfers, wgmma
from gemmery.emulator.op import Op, Traits
from gemmery.emulator.ops import compare, convert, floating, half, integer, logic, mma, warp
from gemmery.emulator.ptx import Instruction, Opcode, Register, Vector

Form = TypeVar("Form")
UNKNOWN = Traits()  # of an instruction that is not modelled


def merged(*tables: Mapping[str, Form]) -> dict[str, Form]:
    """Merge tables; raises ValueError for an instruction that two of them define."""
    merged: dict[str, Form] = {}
    for table in tables:
        twice = merged.keys() & table.keys()
        if twice:
            raise ValueError(f"{sorted(twice)} are defined twice: keep each instruction in one file")
        merged |= table
    return merged


# Instructions that only compute, by their full opcodes.
COMPUTED: dict[str, Op] = merged(
    *(file.TABLE for file in (integer, logic, compare, floating, half, convert, mma, warp))
)
# Those that need the machine, by their names; barriers by their full opcodes.
OTHERS: dict[str, Traits] = merged(
    *(file.TABLE for file in (access, matrices, atomics, printing, textures, control)),
    *(file.TABLE for file in (mbarrier, transfers, wgmma, cluster, tcgen05_memory, tcgen05_operations)),
)
TABLE: dict[str, Traits] = merged(COMPUTED, OTHERS)


def find(opcode: Opcode) -> Traits:
    """Return what the table says of an instruction; UNKNOWN if it is not modelled."""
    return TABLE.get(opcode.spelling) or TABLE.get(opcode.name) or UNKNOWN


def written(instruction: Instruction) -> tuple[Register, ...]:
    """Return the registers that an instruction writes."""
    if not instruction.operands or not find(instruction.opcode).writes:
        return ()
    first = instruction.operands[0]
    parts = first.elements if isinstance(first, Vector) else (first,)
    return tuple(part for part in parts if isinstance(part, Register))
