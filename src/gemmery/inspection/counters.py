"""The emulator's counters for each line of a kernel's source, as a table in words."""

from __future__ import annotations

from gemmery.cuda.roofline import roofs
from gemmery.inspection.records import AnyInspection, EmulatorCounts, Inspection, LineCounts
from gemmery.pages import numerals

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
INDENT = "\N{NO-BREAK SPACE}" * 2  # of a line that another one calls
COMPILER_CODE = "added by the compiler"
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


def table(counts: EmulatorCounts) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The head, and a row for each line and for the total, without empty columns."""
    file = of_file(counts).rpartition(" ")[2]
    rows = [_row(line, file) for line in (*counts.lines, counts.total)]
    columns = [index for index in range(len(HEAD)) if any(row[index] for row in rows)]
    return tuple(HEAD[index] for index in columns), tuple(tuple(row[index] for index in columns) for row in rows)


def of_file(counts: EmulatorCounts) -> str:
    """` of simt_smem.cu` where all lines are of one file; their numbers alone name them then."""
    files = {line.line.partition(":")[0] for line in counts.lines if not line.depth}
    return f" of {files.pop()}" if len(files) == 1 else ""


def size(inspection: AnyInspection | EmulatorCounts, exhibit: bool) -> str:
    """A product's sides, or the elements of an exhibit."""
    problem = inspection.problem
    return f"{problem.n:,} elements" if exhibit else f"{problem.m} × {problem.n} × {problem.k}"


def roof_seconds(inspection: Inspection) -> dict[str, float]:
    """The roofs of what was emulated, in seconds; {} without counters or where a limit is not known."""
    device, counts = inspection.device, inspection.emulated
    if not counts or inspection.exhibit or not device.bandwidth or not device.peak(inspection.unit):
        return {}
    total = counts.total
    return roofs(device, inspection.unit, total.flops, total.sectors, total.wavefronts, total.instructions)


def notes(inspection: Inspection, counts: EmulatorCounts) -> tuple[str, ...]:
    """What the columns are; instructions by kind; the roofs, the longest first."""
    times = sorted(roof_seconds(inspection).items(), key=lambda item: -item[1])
    limits = ", ".join(f"{name} {numerals.digits(seconds * 1e6)} µs" for name, seconds in times)
    roof = (f"Roofs of these counts on a full device: {limits}. {ROOFS}",) if limits else ()
    return NOTE, by_kind(counts), *roof


def by_kind(counts: EmulatorCounts) -> str:
    """Instructions by kind, the most frequent first."""
    return f"Instructions by kind: {', '.join(f'{name} {number:,}' for name, number in counts.kinds.items())}."


def untraced(counts: EmulatorCounts) -> str:
    """The reason why there is no picture of a tile."""
    return (
        f"There is no picture of the tile of {' or '.join(counts.chosen.untraced)}: the contents of shared memory are "
        "known only where a kernel stores what it loaded from global memory, unchanged or converted. This one stores "
        "other values."
    )


def used_per_sector(line: LineCounts) -> str:
    """Bytes used of the 32 of a sector; "" without sectors."""
    return numerals.digits(line.used / line.sectors) if line.sectors else ""


def _row(counts: LineCounts, file: str) -> tuple[str, ...]:
    """The cells of a line; in a kernel of one `file` its number names it."""
    shared = (counts.wavefronts, counts.wavefronts_ideal, counts.bank_conflicts)
    before = (counts.instructions, *shared, counts.requests, counts.sectors)
    place = counts.line.removesuffix(":0")
    name, _, number = place.partition(":")
    return (
        INDENT * counts.depth + (number if number and name == file else place),
        *(f"{count:,}" if count else "" for count in before),
        used_per_sector(counts),
        *(f"{count:,}" if count else "" for count in (counts.divergent_branches, counts.flops)),
        COMPILER_CODE if counts.line.endswith(":0") else counts.code,
    )
