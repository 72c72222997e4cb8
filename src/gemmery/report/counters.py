"""What the emulator counted, line by line of a kernel's source, as a table in words."""

from __future__ import annotations

from gemmery.ladder.inspection import Emulated, LineCounts
from gemmery.report import words

HEAD = (
    "line",
    "instructions",
    "wavefronts",
    "ideal",
    "conflicts",
    "requests",
    "sectors",
    "used",
    "divergent",
    "flops",
    "source",
)
MADE = "what the compiler adds"
NOTE = (
    "Instructions are warps'. Wavefronts, their ideal number and bank conflicts are of shared memory; requests, "
    "sectors and the bytes used of each sector's 32 are of global memory. Adjacent accesses count as ptxas merges them."
)


def table(found: Emulated) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The head, and a row for each line of the kernels and for their sum; columns that would be empty are left out."""
    alone = bool(of_file(found))
    rows = [_row(one, alone) for one in (*found.lines, found.total)]
    filled = [index for index in range(len(HEAD)) if any(row[index] for row in rows)]
    return tuple(HEAD[index] for index in filled), tuple(tuple(row[index] for index in filled) for row in rows)


def of_file(found: Emulated) -> str:
    """` of simt_smem.cu` where all lines are of one file; their numbers alone name them then."""
    files = {one.line.partition(":")[0] for one in found.lines}
    return f" of {files.pop()}" if len(files) == 1 else ""


def where(found: Emulated) -> str:
    """What was run: "at 128 × 128 × 128"."""
    problem = found.problem
    return f"at {problem.m} × {problem.n} × {problem.k}, on the emulator"


def kinds(found: Emulated) -> str:
    """Instructions by kind, the most frequent first."""
    return "Instructions by kind: " + ", ".join(f"{name} {number:,}" for name, number in found.kinds.items()) + "."


def used(one: LineCounts) -> str:
    """Bytes used of the 32 of a sector; "" without sectors."""
    return words.digits(one.used / one.sectors) if one.sectors else ""


def _row(one: LineCounts, alone: bool) -> tuple[str, ...]:
    shared = (one.wavefronts, one.wavefronts_ideal, one.bank_conflicts)
    before, after = (one.instructions, *shared, one.requests, one.sectors), (one.divergent_branches, one.flops)
    line = one.line.removesuffix(":0")
    return (
        line.rpartition(":")[2] if alone and line != one.line.partition(":")[0] else line,
        *(f"{number:,}" if number else "" for number in before),
        used(one),
        *(f"{number:,}" if number else "" for number in after),
        MADE if one.line.endswith(":0") else one.code,
    )
