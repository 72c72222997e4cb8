"""A launch as compiled for a device, which need not be present: registers, occupancy and instructions."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gemmery.cuda import nvrtc, sass
from gemmery.cuda.device import Device
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.occupancy import occupancy
from gemmery.errors import DeviceError
from gemmery.inspection.records import CompiledLaunch


def compiled_launches(geometry: Geometry, device: Device, config: Mapping[str, int]) -> tuple[CompiledLaunch, ...]:
    """Compile every launch of a geometry for a device: the preparing ones, then the product.

    Raises CompileError, or DeviceError if NVRTC is not installed.
    """
    return tuple(_compiled(launch, device, config) for launch in geometry.launches)


def _compiled(geometry: Geometry, device: Device, config: Mapping[str, int]) -> CompiledLaunch:
    program = nvrtc.compiled(geometry.source, geometry.kernel, device.arch)
    resources = nvrtc.report(program.log, program.entry)
    try:
        text, missing = sass.disassembled(program.cubin, program.entry), ""
    except DeviceError as error:
        text, missing = "", str(error)
    code = sass.instructions(text)
    step, passes = sass.step(code, _multiply_adds(geometry, config))
    blocks = geometry.grid[0] * geometry.grid[1] * geometry.grid[2]
    shared = resources.shared + geometry.shared
    return CompiledLaunch(
        name=geometry.kernel,
        source=geometry.source,
        arch=device.arch,
        grid=geometry.grid,
        block=geometry.block,
        registers=resources.registers,
        spilled=resources.spill_stores + resources.spill_loads,
        stack=resources.stack,
        static_shared=resources.shared,
        dynamic_shared=geometry.shared,
        occupancy=occupancy(device, geometry.threads, resources.registers, shared, blocks),
        counts=sass.counts(code),
        loop=sass.counts(sass.main_loop(code)),
        step=step,
        passes=passes,
        multiply_adds=sass.multiply_adds(step),
        ptx_counts=sass.ptx_counts(program.ptx),
        ptx=program.ptx,
        sass=text,
        missing=missing,
        cluster=geometry.cluster,
        roles=tuple(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", program.ptx))),
    )


def _multiply_adds(geometry: Geometry, config: Mapping[str, int]) -> float:
    """Multiply-adds that a warp needs for one step of its block along k, 0 where the config has no such step."""
    bm, bn = geometry.tile
    return bm * bn * config.get("bk", config.get("tile", 0)) * 32 / geometry.threads
