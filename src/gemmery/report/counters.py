"""What the emulator counted, line by line of a kernel's source, as a table in words."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.ladder.inspection import Emulated, LineCounts
from gemmery.problem import Problem
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
SHORT = {
    "instructions": "instr",
    "wavefronts": "waves",
    "conflicts": "confl",
    "requests": "req",
    "divergent": "div",
}
DISPENSABLE = ("divergent", "used", "requests", "ideal", "sectors", "flops")  # where there is no room, in this order
LEAST = 20  # characters of source that are worth showing
INDENT = "\N{NO-BREAK SPACE}" * 2  # of a line that another one calls
MADE = "what the compiler adds"
NOTE = (
    "Instructions are warps'. Wavefronts, their ideal number and bank conflicts are of shared memory; requests, "
    "sectors and the bytes used of each sector's 32 are of global memory. Adjacent accesses count as ptxas merges "
    "them. Indented lines are part of the line that calls them. An empty cell is a zero."
)


def table(found: Emulated) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The head, and a row for each line and for all together; columns that would be empty are left out."""
    alone = of_file(found).rpartition(" ")[2]
    rows = [_row(one, alone) for one in (*found.lines, found.total)]
    filled = [index for index in range(len(HEAD)) if any(row[index] for row in rows)]
    return tuple(HEAD[index] for index in filled), tuple(tuple(row[index] for index in filled) for row in rows)


def of_file(found: Emulated) -> str:
    """` of simt_smem.cu` where all lines are of one file; their numbers alone name them then."""
    files = {one.line.partition(":")[0] for one in found.lines if not one.depth}
    return f" of {files.pop()}" if len(files) == 1 else ""


def fitted(
    head: tuple[str, ...], rows: Sequence[tuple[str, ...]], room: int
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]:
    """The table in so many columns of a terminal, and a note on what is not there.

    The source is cropped first; then figures are rounded, the source is left out, and then columns are.
    """
    short = [(row[0], *map(_rounded, row[1:-1]), row[-1]) for row in rows]
    names = tuple(SHORT.get(name, name) for name in head)
    for titles, cells, note in ((head, rows, ""), (names, short, _note([]))):
        left = room - _taken(titles[:-1], [row[:-1] for row in cells]) - 2
        if left >= LEAST:
            return titles, tuple((*row[:-1], _cropped(row[-1], left)) for row in cells), note
    if room >= _taken(head[:-1], [row[:-1] for row in rows]):
        return head[:-1], tuple(row[:-1] for row in rows), ""
    gone: list[str] = []
    kept = list(range(len(head) - 1))
    for name in DISPENSABLE:
        if _taken([names[index] for index in kept], [[row[index] for index in kept] for row in short]) <= room:
            break
        gone += [name] if name in head else []
        kept = [index for index in kept if head[index] != name]
    return (
        tuple(names[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in short),
        _note(gone),
    )


def _note(gone: Sequence[str]) -> str:
    without = f", {', '.join(gone)} left out" if gone else ""
    return f"Figures are rounded{without}: a wider terminal, --html and --json have all of them."


def _taken(head: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Columns of a terminal: those of the cells, and two beside each."""
    return sum(2 + max(len(row[index]) for row in (head, *rows)) for index in range(len(head)))


def _cropped(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _rounded(cell: str) -> str:
    """A number in five characters.

    >>> _rounded("4,194,304"), _rounded("9,216"), _rounded("32.0"), _rounded("")
    ('4.19M', '9216', '32.0', '')
    """
    digits = cell.replace(",", "")
    if len(digits) < 5 or not digits.isdigit():
        return digits
    exponent = (len(digits) - 1) // 3
    return f"{words.digits(int(digits) / 1000**exponent)}{'kMGT'[exponent - 1]}"


def where(found: Emulated, exhibit: bool = False) -> str:
    """What was run: "at 256 × 256 × 256, on the emulator"."""
    return f"at {size(found.problem, exhibit)}, on the emulator"


def size(problem: Problem, exhibit: bool) -> str:
    """A product's sides, or the elements of an exhibit."""
    return f"{problem.n:,} elements" if exhibit else f"{problem.m} × {problem.n} × {problem.k}"


def kinds(found: Emulated) -> str:
    """Instructions by kind, the most frequent first."""
    return "Instructions by kind: " + ", ".join(f"{name} {number:,}" for name, number in found.kinds.items()) + "."


def untraced(found: Emulated) -> str:
    """Why there is no picture of a tile."""
    return (
        f"No tile of {' or '.join(found.chosen.untraced)} is shown: what lies in shared memory is known where a load "
        "from global memory is stored as it is, moved or converted, and here something else is stored."
    )


def used(one: LineCounts) -> str:
    """Bytes used of the 32 of a sector; "" without sectors."""
    return words.digits(one.used / one.sectors) if one.sectors else ""


def _row(one: LineCounts, alone: str) -> tuple[str, ...]:
    shared = (one.wavefronts, one.wavefronts_ideal, one.bank_conflicts)
    before, after = (one.instructions, *shared, one.requests, one.sectors), (one.divergent_branches, one.flops)
    line = one.line.removesuffix(":0")
    file, _, number = line.partition(":")
    return (
        INDENT * one.depth + (number if number and file == alone else line),
        *(f"{number:,}" if number else "" for number in before),
        used(one),
        *(f"{number:,}" if number else "" for number in after),
        MADE if one.line.endswith(":0") else one.code,
    )
