"""The inner loop of a compiled function, and what each of its instructions is, on x86-64 and 64-bit ARM."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

# Bytes of an operand for each multiply-add, by the end of an instruction's name.
_EACH = {"ps": 4, "pd": 8, "ld": 4, "lw": 2, "lq": 8, "wd": 2, "wssd": 2, "busd": 1, "bf16ps": 2}
_MULTIPLIES = re.compile(r"v?(?:fn?m(?:add|sub)\d+|mul|pmul|pmadd|pdp|dp)(ss|sd|" + "|".join(_EACH) + r")$")
_ADDS = re.compile(r"v?(?:fn?m(?:add|sub)\d+|add)[sp][sd]$")
_REGISTERS = {"%xmm": 16, "%ymm": 32, "%zmm": 64}
# Multiply-adds for each lane of the sums of ARM's instructions, whose first operand they are.
_LANES = {"fmla": 1, "mla": 1, "fmlal": 1, "fmlal2": 1, "sdot": 4, "udot": 4, "bfmmla": 4, "smmla": 8, "ummla": 8}
_BY_ARM = re.compile(r"(" + "|".join(_LANES) + r") (?:v\d+\.(\d+)|z\d+\.([sd]))")
_SEGMENT = {"s": 4, "d": 2}  # lanes in 128 bits
_JUMP = re.compile(r"(?:j\w+|b\.\w+|cbn?z \w+,)\s+(\.L\w+)$")


def inner_loop(text: str, function: str) -> tuple[str, ...]:
    """Return the instructions of the innermost loop whose multiply-adds are closest together; () where none has any."""
    body = text.partition(f"\n{function}:\n")[2].partition(".Lfunc_end")[0]
    lines = [" ".join(line.split()) for line in body.splitlines() if not re.match(r"\s+\.|\.L\w+\$local", line)]
    labels, begin, loops = dict[str, int](), 0, list[tuple[str, ...]]()
    for place, line in enumerate(lines):
        if line.endswith(":"):
            labels[line[:-1]] = place
        elif (jump := _JUMP.match(line)) and labels.get(jump[1], -1) >= begin:  # backwards, around no other loop
            begin = place
            loops.append(tuple(line for line in lines[labels[jump[1]] : place + 1] if not line.endswith(":")))
    best = max(loops, key=lambda loop: sum(map(multiply_adds, loop)) / len(loop), default=())
    return best if any(map(multiply_adds, best)) else ()


def multiply_adds(line: str) -> int:
    """Return the multiply-adds of an instruction.

    >>> [multiply_adds(line) for line in ("vfmadd231ps (%rax), %ymm1, %ymm2", "mulsd %xmm0, %xmm1", "addq $8, %rax")]
    [8, 1, 0]
    >>> [multiply_adds(line) for line in ("fmla v6.4s, v11.4s, v9.s[0]", "smmla v0.4s, v1.16b, v2.16b", "ldr q0, [x1]")]
    [4, 32, 0]
    """
    if match := _BY_ARM.match(line):
        lanes = int(match[2]) if match[2] else _SEGMENT[match[3]]  # of SVE, those of a segment
        return lanes * _LANES[match[1]]
    match = _MULTIPLIES.match(line.partition(" ")[0])
    return max(1, _REGISTERS.get(line.rpartition(" ")[2][:4], 0) // _EACH.get(match[1], 64)) if match else 0


def kinds(line: str) -> tuple[str, ...]:
    """Return what an instruction does.

    >>> kinds("vfmadd231ps (%rax), %ymm1, %ymm2"), kinds("vmovups %ymm2, (%r13,%r12,4)"), kinds("leaq (%rax), %rbx")
    (('load', 'multiply-add'), ('store',), ('other',))
    >>> kinds("ldp q10, q11, [x12, #-32]"), kinds("b.lt .LBB10_31"), kinds("prfm pldl1keep, [x1, #384]")
    (('load',), ('branch',), ('prefetch',))
    """
    name, _, operands = line.partition(" ")
    does = ["multiply-add"] if multiply_adds(line) else []
    if name.startswith(("prefetch", "prfm")):
        return ("prefetch",)
    if "[x" in operands or "[sp" in operands:  # of ARM
        return ("store" if name.startswith("st") else "load",)
    if "(" in operands and not name.startswith("lea"):
        writes = operands.endswith(")") and "mov" in name
        does.insert(0, "store" if writes else "load")
    return tuple(does) or ("branch" if _JUMP.match(line) else "other",)


def chain(loop: Sequence[str]) -> int:
    """Return the most additions of a pass that wait for one another: those to a register that the next pass adds to."""
    ends = Counter(line.split()[-1] for line in loop if _ADDS.match(line.partition(" ")[0]))
    fresh = {line.split()[-1] for line in loop if not _ADDS.match(line.partition(" ")[0])}
    return max((number for register, number in ends.items() if register not in fresh), default=0)
