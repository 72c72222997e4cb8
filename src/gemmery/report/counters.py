"""The emulator's counters for each line of a kernel's source, as a table in words."""

from __future__ import annotations

from collections.abc import Sequence

from gemmery.cuda.roofline import roofs
from gemmery.ladder.inspection import Emulated, Inspection, LineCounts
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
DISPENSABLE = (
    "divergent",
    "used",
    "requests",
    "ideal",
    "sectors",
    "flops",
)  # left out in this order on narrow terminals
LEAST = 20  # characters of source that are worth showing
INDENT = "\N{NO-BREAK SPACE}" * 2  # of a line that another one calls
MADE = "added by the compiler"
IDEAL = (
    "Wavefronts for the bytes alone are the requested bytes at 128 per wavefront: the profiler's ideal. Bank "
    "conflicts are counted against the groups of lanes that shared memory serves together, so the two need not add up "
    "to the wavefronts."
)
ROOFS = (
    "Memory: sectors at its bandwidth, without caches. Compute: operations at the peak. Shared: 1 wavefront per clock "
    "and multiprocessor, issue: 4 warp instructions."
)
NOTE = (
    "Instructions are warp instructions. Wavefronts are passes over the banks of shared memory: the ideal is what the "
    "bytes alone would take, conflicts are extra passes because lanes need different words of one bank. Requests, "
    "sectors and the bytes used of each 32-byte sector are of global memory. Adjacent accesses count as ptxas merges "
    "them. Indented lines are part of the line that calls them. An empty cell is a zero."
)


def table(found: Emulated) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The head, and a row for each line and for the total, without empty columns."""
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
    """The table in `room` columns of a terminal, and a note on what is left out.

    The source is cropped first; then figures are rounded, the source is left out, and columns are.
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
    """Columns of a terminal that cells need, with two between neighbours."""
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
    """The size that was run: "at 256 × 256 × 256, on the emulator"."""
    return f"at {size(found.problem, exhibit)}, on the emulator"


def size(problem: Problem, exhibit: bool) -> str:
    """A product's sides, or the elements of an exhibit."""
    return f"{problem.n:,} elements" if exhibit else f"{problem.m} × {problem.n} × {problem.k}"


def limits(found: Inspection) -> dict[str, float]:
    """The roofs of what was emulated, in seconds; {} without counters or where a limit is not known."""
    if not found.emulated or found.exhibit or not found.device.bandwidth or not found.device.peak(found.unit):
        return {}
    total = found.emulated.total
    return roofs(found.device, found.unit, total.flops, total.sectors, total.wavefronts, total.instructions)


def roof(found: Inspection) -> str:
    """The roofs in a sentence, the longest first; "" where they are not known."""
    times = sorted(limits(found).items(), key=lambda item: -item[1])
    stated = ", ".join(f"{name} {words.digits(seconds * 1e6)} µs" for name, seconds in times)
    return f"Roofs of these counts on a full device: {stated}. {ROOFS}" if stated else ""


def kinds(found: Emulated) -> str:
    """Instructions by kind, the most frequent first."""
    return "Instructions by kind: " + ", ".join(f"{name} {number:,}" for name, number in found.kinds.items()) + "."


def untraced(found: Emulated) -> str:
    """The reason why there is no picture of a tile."""
    return (
        f"There is no picture of the tile of {' or '.join(found.chosen.untraced)}: the contents of shared memory are "
        "known only where a kernel stores what it loaded from global memory, unchanged or converted. This one stores "
        "other values."
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
