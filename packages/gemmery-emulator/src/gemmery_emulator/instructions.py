"""All instructions that are modelled: each file of instructions has a table, and stands here once.

Also whether a program uses their results, or may throw them away: a shuffle at the end of a tree reads lanes outside
its mask, and a condition after it drops what they return, as in
`u = __shfl_down_sync(mask, v, 8); if (lane + 8 < count) v += u;`. Compilers compute the sum anyway and select.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gemmery_emulator import access, atomics, control, matrices, printing, textures
from gemmery_emulator.blackwell import tcgen05_memory, tcgen05_operations
from gemmery_emulator.hopper import cluster, mbarrier, transfers, wgmma
from gemmery_emulator.op import Op, Traits
from gemmery_emulator.ops import compare, convert, floating, half, integer, logic, mma, warp
from gemmery_emulator.ptx import Instruction, Label, Opcode, PtxKernel, Register, Vector, names_of

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


def used(kernel: PtxKernel, index: int) -> tuple[bool, dict[int, bool]]:
    """Whether every way through the kernel uses the first result of an instruction, and the selections that may not.

    Selections, guarded instructions and conjunctions of predicates may leave a value out, and so may code that only
    one side of a branch executes. Selections are told by index, with whether the value is the first of the two.
    """
    first = names_of(kernel.instructions[index].operands[:1])[:1]
    selections: dict[int, bool] = {}
    answers: dict[tuple[int, frozenset[str]], bool] = {}

    def reaches(at: int, values: frozenset[str]) -> bool:
        """Whether all ways from an instruction use one of these registers."""
        while values and at < len(kernel.instructions):
            instruction = kernel.instructions[at]
            name = instruction.opcode.name
            if name == "bra":
                if instruction.guard is not None and instruction.guard.name in values:
                    return True
                if (at, values) in answers:
                    return answers[at, values]
                answers[at, values] = False  # a loop that does not use the values drops them
                ways = [kernel.labels[each.name] for each in instruction.operands if isinstance(each, Label)]
                ways += [at + 1] if instruction.guard is not None else []
                each_way = [reaches(way, values) for way in ways]  # all, for their selections
                answers[at, values] = all(each_way)
                return answers[at, values]
            if name in ("ret", "exit", "trap", "brx") and instruction.guard is None:
                return False
            if name == "selp" and instruction.guard is None:
                sources = [not values.isdisjoint(names_of([operand])) for operand in instruction.operands[1:3]]
                if sources[0] != sources[1]:
                    selections[at] = sources[0]
            after = _after(instruction, name, values)
            if after is None:
                return True
            at, values = at + 1, after
        return False

    return reaches(index + 1, frozenset(first)), selections


def stores(kernel: PtxKernel, index: int) -> frozenset[int]:
    """The stores that some way through the kernel may give a value computed from the first result of an instruction."""
    values = set(names_of(kernel.instructions[index].operands[:1])[:1])
    count = 0
    while count < len(values):
        count = len(values)
        for instruction in kernel.instructions:
            if not find(instruction.opcode).effect and not values.isdisjoint(names_of(instruction.operands[1:])):
                values.update(register.name for register in written(instruction))
    return frozenset(
        place
        for place, instruction in enumerate(kernel.instructions)
        if instruction.opcode.name == "st" and not values.isdisjoint(names_of(instruction.operands[1:]))
    )


def _after(instruction: Instruction, name: str, values: frozenset[str]) -> frozenset[str] | None:
    """The registers that hold the value after an instruction; None if the instruction uses it."""
    results = {register.name for register in written(instruction)}
    sources = instruction.operands[1:] if results else instruction.operands
    if instruction.guard is not None:
        return None if instruction.guard.name in values else values
    may_drop = name == "selp" or (name in ("and", "or") and instruction.opcode.type == "pred")
    reads = not values.isdisjoint(names_of(sources[-1:] if name == "selp" else () if may_drop else sources))
    if reads and (name == "selp" or find(instruction.opcode).effect):
        return None
    return values | results if reads else values - results
