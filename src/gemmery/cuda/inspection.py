"""Properties of a launch before it runs, on any machine: registers, occupancy, instructions, traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gemmery.cuda import nvrtc, sass
from gemmery.cuda import roofline as roofs
from gemmery.cuda.device import Device
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.occupancy import Occupancy, occupancy
from gemmery.cuda.roofline import Roofline, loaded, roofline
from gemmery.errors import DeviceError
from gemmery.problem import Problem


@dataclass(frozen=True)
class Kernel:
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


@dataclass(frozen=True)
class Inspection:
    """A rung for one problem on one device."""

    rung: str
    idea: str
    problem: Problem
    config: dict[str, int]
    device: Device
    kernels: tuple[Kernel, ...]  # the preparing launches, then the product
    tile: tuple[int, int]  # of C, for which a block loads A and B once
    workspace: int  # bytes of scratch memory, for all launches
    unit: str  # the unit that multiplies: a field of device.Rates
    loads: Roofline  # if every load of A and B goes to memory
    once: Roofline  # if each element moves once


def inspected(
    rung: str, idea: str, problem: Problem, config: Mapping[str, int], geometry: Geometry, device: Device
) -> Inspection:
    """Compile every launch of a geometry for a device and return its resources, occupancy and traffic.

    Raises CompileError, or DeviceError if NVRTC is not installed.
    """
    kernels = tuple(_kernel(one, device, config) for one in (*geometry.before, geometry))
    last = kernels[-1]
    tensor = sass.on_tensor_cores(last.counts or last.ptx_counts)
    unit = roofs.unit(problem.dtype, tensor)
    peak = device.peak(unit)
    return Inspection(
        rung=rung,
        idea=idea,
        problem=problem,
        config=dict(config),
        device=device,
        kernels=kernels,
        tile=geometry.tile,
        workspace=geometry.workspace,
        unit=unit,
        loads=roofline(problem.flops, loaded(problem, *geometry.tile), peak, device.bandwidth),
        once=roofline(problem.flops, problem.bytes, peak, device.bandwidth),
    )


def without_code(found: Inspection, ptx: bool = False, machine: bool = False) -> Inspection:
    """Return a copy without the text of PTX and SASS, except those requested."""
    return replace(
        found,
        kernels=tuple(
            replace(one, ptx=one.ptx if ptx else "", sass=one.sass if machine else "") for one in found.kernels
        ),
    )


def _multiplies(geometry: Geometry, config: Mapping[str, int]) -> float:
    """Multiply-adds that a warp needs for one step of its block along k, 0 where the config has no such step."""
    bm, bn = geometry.tile
    return bm * bn * config.get("bk", config.get("tile", 0)) * 32 / geometry.threads


def _kernel(geometry: Geometry, device: Device, config: Mapping[str, int]) -> Kernel:
    made = nvrtc.compiled(geometry.source, geometry.kernel, device.arch)
    said = nvrtc.report(made.log, made.entry)
    try:
        text, missing = sass.disassembled(made.cubin, made.entry), ""
    except DeviceError as error:
        text, missing = "", str(error)
    code = sass.instructions(text)
    step, passes = sass.step(code, _multiplies(geometry, config))
    blocks = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
    return Kernel(
        name=geometry.kernel,
        source=geometry.source,
        arch=device.arch,
        grid=geometry.grid,
        block=geometry.block,
        registers=said.registers,
        spilled=said.spill_stores + said.spill_loads,
        stack=said.stack,
        static_shared=said.shared,
        dynamic_shared=geometry.shared,
        occupancy=occupancy(device, geometry.threads, said.registers, said.shared + geometry.shared, blocks),
        counts=sass.counts(code),
        loop=sass.counts(sass.main_loop(code)),
        step=step,
        passes=passes,
        multiply_adds=sass.multiply_adds(step),
        ptx_counts=sass.ptx_counts(made.ptx),
        ptx=made.ptx,
        sass=text,
        missing=missing,
    )
