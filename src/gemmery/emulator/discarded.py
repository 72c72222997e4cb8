"""Results of instructions that a program may throw away.

A shuffle at the end of a tree reads lanes outside its mask, and a condition after it drops what they return:
`u = __shfl_down_sync(mask, v, 8); if (lane + 8 < count) v += u;`. Compilers compute the sum anyway and select.
"""

from __future__ import annotations

from gemmery.emulator.instructions import find, written
from gemmery.emulator.ptx import Instruction, Label, PtxKernel, names_of


def used(kernel: PtxKernel, index: int) -> tuple[bool, dict[int, bool]]:
    """Whether every way through the kernel uses the first result of an instruction, and the selections that may not.

    Selections, guarded instructions and conjunctions of predicates may leave a value out, and so may code that only
    one side of a branch executes. Selections are told by index, with whether the value is the first of the two.
    """
    first = names_of(kernel.instructions[index].operands[:1])[:1]
    selections: dict[int, bool] = {}
    return _reaches(kernel, index + 1, frozenset(first), {}, selections), selections


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


def _reaches(
    kernel: PtxKernel,
    at: int,
    values: frozenset[str],
    answers: dict[tuple[int, frozenset[str]], bool],
    selections: dict[int, bool],
) -> bool:
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
            each_way = [_reaches(kernel, way, values, answers, selections) for way in ways]  # all, for their selections
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
