"""Records about a rung: its launches as compiled, and the emulator's counters at a small size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gemmery.cuda import inspection
from gemmery.emulator.trace.chosen import Chosen
from gemmery.problem import Problem


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
class Emulated:
    """All launches of a rung, run on the emulator."""

    problem: Problem  # at most as large as the one that was asked for
    lines: tuple[LineCounts, ...]  # each followed by inlined lines that access memory, or have many instructions
    total: LineCounts
    kinds: Mapping[str, int]  # instructions by kind
    chosen: Chosen = field(default_factory=Chosen)  # for pictures
    source: Mapping[str, str] = field(default_factory=dict)  # the text of lines that a picture may show


@dataclass(frozen=True)
class Inspection(inspection.Inspection):
    """A rung for one problem on one device, with the emulator's counters."""

    emulated: Emulated | None = None
    not_emulated: str = ""  # why there are no counters
    exhibit: bool = False  # not a product: `problem.n` is the number of elements


@dataclass(frozen=True)
class Comparison:
    """Two rungs for the same product on the same device."""

    old: Inspection
    new: Inspection
