"""The records of `inspect`: a rung's launches as compiled, its rooflines, and the emulator's counters by line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gemmery.cuda.device import Device
from gemmery.cuda.roofline import Occupancy, Roofline, roofs
from gemmery.problem import Problem
from gemmery_emulator.kernels.counters import EmulatorCounts


@dataclass(frozen=True)
class CompiledLaunch:
    """One launch, compiled for a device."""

    name: str  # the instance: "simt_smem<float, float, 0, 32>"
    source: str
    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int  # per thread
    spilled: int  # bytes spilled per thread
    stack: int  # bytes of local memory per thread
    static_shared: int  # bytes per block
    dynamic_shared: int
    occupancy: Occupancy
    counts: dict[str, int]  # instructions by kind; {} without SASS
    loop: dict[str, int]  # those of its main loop
    step: dict[str, int]  # those of one pass of the loop that loads from global memory; {} where it is not known
    passes: int  # of the main loop in such a step
    multiply_adds: int  # of a warp, in such a step; 0 where it is not known
    ptx_counts: dict[str, int]
    ptx: str
    sass: str
    missing: str  # why there is no SASS, "" if there is
    cluster: int = 1  # blocks
    roles: tuple[int, ...] = ()  # registers a thread, which warpgroups set (setmaxnreg), in the order of the code


@dataclass(frozen=True)
class Inspection:
    """A rung for one problem on one device."""

    rung: str
    idea: str
    problem: Problem
    config: dict[str, int]
    device: Device
    kernels: tuple[CompiledLaunch, ...]  # the preparing launches, then the product
    tile: tuple[int, int]  # of C, for which a block loads A and B once
    workspace: int  # bytes of scratch memory, for all launches
    unit: str  # the unit that multiplies: a field of device.Rates
    loads: Roofline  # if every load of A and B goes to memory
    once: Roofline  # if each element moves once
    emulated: EmulatorCounts | None = None
    not_emulated: str = ""  # why there are no counters
    exhibit: bool = False  # not a product: `problem.n` is the number of elements


@dataclass(frozen=True)
class Cost:
    """What 1,000 multiply-adds need of one part of a core, and the least time for that."""

    count: float
    cycles: float
    rate: str  # the assumed rate: "2 a cycle"


@dataclass(frozen=True)
class Accesses:
    """The accesses of a whole product to one operand, and the lines and pages that came for them."""

    loads: int = 0
    stores: int = 0
    prefetches: int = 0
    l1: int = 0  # lines that came into L1
    l2: int = 0  # lines that came into L2
    pages: int = 0  # translations


@dataclass(frozen=True)
class CpuInspection:
    """A CPU rung for one problem on this machine."""

    rung: str
    idea: str
    problem: Problem
    config: dict[str, int]
    cpu: str  # its name, instruction set and caches
    loops: str  # pseudocode
    function: str  # the one with most accesses
    loop: tuple[str, ...]  # its inner loop, instructions
    step: int  # multiply-adds of a pass of it; 0 where none is known
    costs: Mapping[str, Cost]
    operands: Mapping[str, Accesses]
    ir: str
    assembly: str
    emulated: ClassVar[None] = None  # what a GPU rung has
    exhibit: ClassVar[bool] = False


@dataclass(frozen=True)
class SideBySide:
    """Two rungs for the same product on the same device."""

    old: Inspection
    new: Inspection


@dataclass(frozen=True)
class CpuSideBySide:
    """Two CPU rungs for the same product."""

    old: CpuInspection
    new: CpuInspection


AnyInspection = Inspection | CpuInspection
AnyPair = SideBySide | CpuSideBySide


def paired(old: AnyInspection, new: AnyInspection) -> AnyPair:
    """Return two inspections of one kind side by side."""
    if isinstance(old, Inspection) and isinstance(new, Inspection):
        return SideBySide(old, new)
    assert isinstance(old, CpuInspection)
    assert isinstance(new, CpuInspection)
    return CpuSideBySide(old, new)


def without_code(inspection: AnyInspection, ptx: bool = False, sass: bool = False) -> AnyInspection:
    """Return a copy without the text of PTX (LLVM IR of a CPU rung) and SASS (assembly), except those requested."""
    if isinstance(inspection, CpuInspection):
        return replace(inspection, ir=inspection.ir if ptx else "", assembly=inspection.assembly if sass else "")
    kernels = tuple(replace(x, ptx=x.ptx if ptx else "", sass=x.sass if sass else "") for x in inspection.kernels)
    return replace(inspection, kernels=kernels)


def roof_seconds(inspection: Inspection) -> dict[str, float]:
    """The roofs of what was emulated, in seconds; {} without counters or where a limit is not known."""
    device, counts = inspection.device, inspection.emulated
    if not counts or inspection.exhibit or not device.bandwidth or not device.peak(inspection.unit):
        return {}
    total = counts.total
    return roofs(device, inspection.unit, total.flops, total.sectors, total.wavefronts, total.instructions)


def size(inspection: AnyInspection | EmulatorCounts, exhibit: bool) -> str:
    """A product's sides, or the elements of an exhibit."""
    problem = inspection.problem
    return f"{problem.n:,} elements" if exhibit else f"{problem.m} × {problem.n} × {problem.k}"
