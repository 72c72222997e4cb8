"""The emulator's counters for each line of a kernel's source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gemmery.cuda import nvrtc
from gemmery.emulator.counters.counts import Counts, Frames
from gemmery.emulator.ptx import Line, calling
from gemmery.emulator.run import EmulatedRun
from gemmery.emulator.trace.selection import Selection, select
from gemmery.problem import Problem

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


def _line_counts(line: str, code: str, counts: Counts, depth: int = 0) -> LineCounts:
    return LineCounts(
        line,
        code,
        sum(counts.instructions.values()),
        counts.shared.wavefronts,
        counts.shared.wavefronts_ideal,
        counts.shared.bank_conflicts,
        counts.global_.requests,
        counts.global_.sectors,
        counts.global_.used,
        counts.divergent_branches,
        counts.flops,
        depth,
    )


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
