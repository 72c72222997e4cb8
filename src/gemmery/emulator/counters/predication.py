"""Which short branches ptxas turns into predicates: what they skip is then executed by all warps, by some in vain.

Found by reading the machine code of 77 kernels for sm_90a: all 181 loads of global memory behind a branch that skips no
more than this were under a predicate. Of longer bodies some are and some are not, as of those that store or load shared
memory: they stay branches.
"""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.emulator.ptx import Kernel, Label

LONGEST = 6  # instructions that a branch skips, moves left out
LOAD = "ld.global"
PLAIN = (LOAD, "fma", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "cvt", "cvta", "mov")


def predicated(kernel: Kernel) -> Mapping[int, int]:
    """The instructions that become predicated, by index, each with the branch that they stand behind in PTX."""
    found: dict[int, int] = {}
    labels = set(kernel.labels.values())
    for index, instruction in enumerate(kernel.instructions):
        target = instruction.operands[0] if instruction.operands else None
        if not instruction.opcode.startswith("bra") or instruction.guard is None or not isinstance(target, Label):
            continue
        body = range(index + 1, kernel.labels[target.name])
        names = [_name(kernel.instructions[at].opcode) for at in body]
        short = len(names) - names.count("mov") <= LONGEST and labels.isdisjoint(body)
        if short and LOAD in names and all(name in PLAIN for name in names):
            found |= dict.fromkeys(body, index)
    return found


def _name(opcode: str) -> str:
    """What an instruction does; of a load also where.

    >>> [_name(opcode) for opcode in ("ld.global.v4.f32", "ld.shared.f32", "add.s64")]
    ['ld.global', 'ld.shared', 'add']
    """
    name, _, rest = opcode.partition(".")
    return f"{name}.{rest.partition('.')[0]}" if name == "ld" else name
