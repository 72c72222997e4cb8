"""The emulator's counters by line of a kernel's source, as records and in words, also of two kernels side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from gemmery.cuda import nvrtc
from gemmery.problem import Problem
from gemmery_emulator.counters.counts import Counts, Frames
from gemmery_emulator.pages import numerals
from gemmery_emulator.ptx import Line, calling
from gemmery_emulator.run import EmulatedRun
from gemmery_emulator.trace.selection import Selection, select

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
NOTE = (
    "Instructions are warp instructions. Wavefronts are passes over the banks of shared memory: the ideal is what the "
    "bytes alone would take, conflicts are extra passes because lanes need different words of one bank. Requests, "
    "sectors and the bytes used of each 32-byte sector are of global memory. Adjacent accesses count as ptxas merges "
    "them. Indented lines are part of the line that calls them. An empty cell is a zero."
)
IDEAL_WAVEFRONTS = (
    "Wavefronts for the bytes alone are the requested bytes at 128 per wavefront: the profiler's ideal. Bank "
    "conflicts are counted against the groups of lanes that shared memory serves together, so the two need not add up "
    "to the wavefronts."
)
SOURCE = HEAD[-1]  # a column of code
COUNTS = {
    "instructions": "instructions of warps",
    "bank_conflicts": "bank conflicts",
    "wavefronts": "wavefronts of shared memory",
    "wavefronts_ideal": "wavefronts for the bytes alone",
    "sectors": "sectors of global memory",
    "requests": "accesses to global memory",
    "used": "bytes used of the sectors",
    "divergent_branches": "divergent branches",
    "flops": "flops",
}
COSTS = ("instructions", "bank_conflicts", "wavefronts", "sectors", "divergent_branches")
FEWER, MORE, DIFFERS = "fewer", "more", "differs"  # a lower or a higher cost, another fact
Row = tuple[str, ...]  # a name, the values of both, and for numbers the second as a multiple of the first
NOTABLE = 0.05  # share of all instructions from which an inlined line without accesses is listed


@dataclass(frozen=True)
class LineCounts:
    """Counters of one line of a kernel's source with all that it calls, or of all lines together."""

    line: str  # "simt_smem.cu:18"
    code: str
    instructions: int = 0  # warps that executed one
    wavefronts: int = 0  # of shared memory
    wavefronts_ideal: int = 0  # for the bytes alone
    bank_conflicts: int = 0
    requests: int = 0  # to global memory
    sectors: int = 0
    used: int = 0  # bytes of the sectors that some lane asked for
    divergent_branches: int = 0
    flops: int = 0
    depth: int = 0  # 1 for a line that is called by the last line of depth 0 before it, and so on


@dataclass(frozen=True)
class EmulatorCounts:
    """Counters of all launches together, run on the emulator."""

    problem: Problem  # at most as large as the one that was asked for
    lines: tuple[LineCounts, ...]  # each followed by inlined lines that access memory, or have many instructions
    total: LineCounts
    kinds: Mapping[str, int]  # instructions by kind
    chosen: Selection = field(default_factory=Selection)  # for pictures
    source: Mapping[str, str] = field(default_factory=dict)  # the text of lines that a picture may show


def count_run(run: EmulatedRun, line: str = "") -> EmulatorCounts:
    """Return the counters of a run of any kernel by line of its source. Raises ArgumentError as `count_rung` does."""
    drawable = run.drawable
    if drawable is None:
        return described(Problem(1, 1, 1, "f32", "f32"), run.counts, Selection(), {})
    drawn = select(drawable.trace, drawable.steps, line)
    return described(Problem(1, 1, 1, "f32", "f32"), run.counts, drawn, drawable.texts)


def described(
    problem: Problem, counts: Counts, drawn: Selection, texts: Mapping[str, str] | None = None
) -> EmulatorCounts:
    """Counters by line, with the text of the lines that pictures name; `texts` as in `source_line`."""
    total, kinds = _line_counts("total", "", counts), dict(counts.instructions.most_common())
    return EmulatorCounts(problem, tuple(_tree(counts, texts)), total, kinds, drawn, source_lines(drawn, texts))


def _tree(counts: Counts, texts: Mapping[str, str] | None) -> Iterator[LineCounts]:
    """The lines of the kernel's file, each followed by the lines inlined into it; a line includes all that it calls."""
    sums: dict[Frames, Counts] = {}
    for frames, here in counts.frames.items():
        lines = calling(frames)
        for depth in range(1, len(lines) + 1):
            place = lines[:depth]
            sums[place] = sums[place] + here if place in sums else here
    least = NOTABLE * sum(counts.instructions.values())
    for place in sorted(sums, key=lambda frames: [(line.file, line.number) for line in frames]):
        here, last = sums[place], place[-1]
        moves = here.shared.requests or here.global_.requests or here.flops or here.divergent_branches
        if len(place) == 1 or moves or sum(here.instructions.values()) >= least:
            yield _line_counts(str(last), source_line(last, texts), here, len(place) - 1)


_OF_LINE: Callable[[Counts], tuple[int, int, int, int, int, int, int, int]] = attrgetter(
    *("shared.wavefronts", "shared.wavefronts_ideal", "shared.bank_conflicts"),
    *("global_.requests", "global_.sectors", "global_.used", "divergent_branches", "flops"),
)  # the fields of LineCounts in their order


def _line_counts(line: str, code: str, counts: Counts, depth: int = 0) -> LineCounts:
    return LineCounts(line, code, sum(counts.instructions.values()), *_OF_LINE(counts), depth)


def source_lines(drawn: Selection, texts: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Return the text of each line that a picture of these accesses names; `texts` as in `source_line`."""
    accesses = [access for tile in drawn.tiles for access in (tile.store, tile.load) if access is not None]
    frames = [access.frames for access in (*accesses, *drawn.shared, *drawn.global_)]
    frames += [divergence.frames for divergence in drawn.divergences]
    places = {calling(lines)[-1] for lines in frames if lines}
    places |= {stretch.busiest or stretch.first for branch in drawn.divergences for stretch in branch.stretches}
    return {str(place): source_line(place, texts) for place in sorted(places, key=str)}


def source_line(place: Line, texts: Mapping[str, str] | None = None) -> str:
    """Return a line of a kernel's source; "" for code that the compiler adds, at line 0.

    `texts` holds the files of a kernel that is not a rung's, by name.
    """
    if not place.number or (texts is not None and place.file not in texts):
        return ""
    lines = (nvrtc.text(place.file) if texts is None else texts[place.file]).splitlines()
    return lines[place.number - 1].strip() if place.number <= len(lines) else ""


@dataclass(frozen=True)
class Section:
    """Facts in two columns, or a table with a head."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    head: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()  # of each row of two rungs side by side: "fewer", "more", "differs", or ""
    alarm: bool = False  # faults, which a page shows in color

    @property
    def numbers(self) -> bool:
        """True for a table of numbers; two rungs side by side have a column of ratios then."""
        return len(self.head) > 3 if self.marks else bool(self.head)


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


def by_kind(counts: EmulatorCounts) -> str:
    """Instructions by kind, the most frequent first."""
    return f"Instructions by kind: {', '.join(f'{name} {number:,}' for name, number in counts.kinds.items())}."


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


def counts_section(names: tuple[str, str], title: str, before: EmulatorCounts, after: EmulatorCounts) -> Section:
    """The counters of two kernels, with the costs that differ marked."""
    old, new = ({text: getattr(run.total, name) for name, text in COUNTS.items()} for run in (before, after))
    means = zip(("bytes used per sector", "sectors per access"), _means(before), _means(after), strict=True)
    rows = (*number_rows(old, new, zeros=True), *((*mean, "") for mean in means if any(mean[1:])))
    note = IDEAL_WAVEFRONTS if before.total.wavefronts or after.total.wavefronts else ""
    return marked(names, title, rows, note, costs=[COUNTS[cost] for cost in COSTS])


def marked(
    names: tuple[str, str], title: str, rows: Iterable[Row], note: str = "", costs: Collection[str] = ()
) -> Section:
    """Return a section with two names as its head; of the rows that are `costs` the lower number is better."""
    rows = tuple(rows)
    numbers = any(len(row) > 3 and row[3] for row in rows)
    head = ("", *names, *([""] if numbers else []))
    marks = tuple(_mark(row[0], row[1], row[2], costs) for row in rows)
    return Section(title, tuple(row[: len(head)] for row in rows), head, (note,) if note else (), marks)


def _mark(name: str, old: str, new: str, costs: Collection[str]) -> str:
    """FEWER or MORE for a cost, DIFFERS for another fact; "" where both are the same."""
    if old == new:
        return ""
    if name not in costs:
        return DIFFERS
    return FEWER if float(new.replace(",", "")) < float(old.replace(",", "")) else MORE


def _means(counts: EmulatorCounts) -> tuple[str, str]:
    """Bytes used per sector, and sectors per access; "" without any."""
    total = counts.total
    return used_per_sector(total), numerals.digits(total.sectors / total.requests) if total.requests else ""


def number_rows(old: Mapping[str, float], new: Mapping[str, float], zeros: bool = False) -> tuple[Row, ...]:
    """A row for each name; names that both lack are left out unless `zeros`."""
    rows = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, 0), new.get(name, 0)
        if zeros or before or after:
            ratio = numerals.times(after / before) if before and after and after != before else ""
            rows.append((name, _figure(before), _figure(after), ratio))
    return tuple(rows)


def _figure(number: float) -> str:
    return f"{round(number):,}" if number == round(number) else numerals.digits(number)
