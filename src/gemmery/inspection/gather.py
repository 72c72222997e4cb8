"""Everything about one GPU rung or exhibit that is known without a GPU, as an `Inspection`; rungs by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

from gemmery import dtypes
from gemmery.cuda import driver, nvrtc, sass
from gemmery.cuda.device import Device
from gemmery.cuda.geometry import C_NAMES, Geometry, refusal
from gemmery.cuda.occupancy import occupancy
from gemmery.cuda.roofline import loaded, roofline, unit
from gemmery.emulation.counters import EmulatorCounts
from gemmery.errors import ArgumentError, DeviceError, EmulationError, RefusedError
from gemmery.inspection.cpu_rung import inspect_cpu_rung
from gemmery.inspection.lines import count_exhibit, count_rung, small
from gemmery.inspection.records import AnyInspection, CompiledLaunch, Inspection
from gemmery.lab import asked
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.exhibits import EMULATED, Exhibit
from gemmery.ladder.exhibits import find as find_exhibit
from gemmery.ladder.rung import Rung
from gemmery.ladder.rung import find as find_rung
from gemmery.problem import Config, Problem

SIDE = 4096


def inspect_rung(
    rung: str,
    m: int = 0,
    n: int = 0,
    k: int = 0,
    dtype: str = "",
    config: Mapping[str, int] | None = None,
    device: str = "",
    line: str = "",
    counters: bool = True,
) -> Inspection:
    """Return the resources, occupancy, rooflines, code and counters by line of a GPU rung or an exhibit.

    The arguments are those of `gm.inspect`; `dtype` defaults to the rung's first.

    >>> inspection = inspect_rung("simt_naive", n=1024, device="sm_80")
    >>> inspection.kernels[-1].spilled, inspection.loads.intensity
    (0, 0.25)

    Raises ArgumentError for an unknown rung, an unknown key of its config, or a line without memory
    accesses; RefusedError where the rung or the device does not take the product.
    """
    if not issubclass(type(rung), str):
        raise ArgumentError(f"rung is {rung!r}: pass its name as text")
    if asked.inspectable(rung) == "an exhibit":
        if m or k or dtype:
            raise ArgumentError(f"exhibit {rung} takes one array of n floats: leave out m, k and dtype")
        return _exhibit(find_exhibit(rung), n, config or {}, _device(device), line, counters)
    row, target = find_rung(CUDA, rung), _device(device)
    problem = _problem(row, m, n, k, asked.spelled(dtype) or row.dtypes[0], target)
    settings: Config = {**row.default, **asked.keys(row, config or {})}
    reason = row.refuses(problem)
    if not reason:
        settings = {**row.resolve(problem, settings)}  # the smaller product that is counted has the same tile
    geometry = _geometry(row.geometry, problem, settings, config) if row.geometry and not reason else None
    reason = reason or (refusal(geometry, target) if geometry else "it has no launch to inspect")
    if reason or geometry is None:
        raise RefusedError(f"rung {rung}: {reason}")
    count = partial(count_rung, row, small(problem), settings, target.arch, line)
    return _gathered(row, problem, row.explicit(settings), geometry, target, count if counters else None)


def inspections(
    names: Sequence[str],
    m: int,
    n: int,
    k: int,
    dtype: str,
    config: Mapping[str, int] | None,
    device: str,
    line: str,
    counters: bool = True,
) -> list[Callable[[], AnyInspection]]:
    """Return what inspects each of these CPU rungs, GPU rungs or exhibits.

    Raises ArgumentError for names that do not go together, and for a device or a line with CPU rungs.
    """
    if asked.inspectable(*names) != "a CPU rung":
        dtype = dtype or shared_dtype(names, m, n, k, device)
        return [partial(inspect_rung, name, m, n, k, dtype, config, device, line, counters) for name in names]
    if device or line:
        raise ArgumentError(
            f"{device or line!r}: {names[0]} runs on the CPU of this machine; leave out device and line"
        )
    return [partial(inspect_cpu_rung, name, m, n, k, dtype, config) for name in names]


def shared_dtype(rungs: Sequence[str], m: int = 0, n: int = 0, k: int = 0, device: str = "") -> str:
    """The first element type of the first rung that all rungs take for such a product; "" where there is none."""
    rows, target = [rung for name in rungs for rung in CUDA if rung.name == name], _device(device)
    if len(rows) < 2:
        return ""
    for dtype in rows[0].dtypes:
        if dtype in C_NAMES and all(
            dtype in row.dtypes and not row.refuses(_problem(row, m, n, k, dtype, target)) for row in rows
        ):
            return dtype
    return ""


def _exhibit(
    exhibit: Exhibit, n: int, config: Mapping[str, int], device: Device, line: str, counters: bool
) -> Inspection:
    """The inspection of an exhibit for n elements, by default as many as fill a GPU; EMULATED of them are counted."""
    show = exhibit.show
    if not _is_whole(n) or n < 0:
        raise ArgumentError(f"n={n!r}: a number of elements must be a whole number >= 1")
    settings, elements = {**exhibit.default, **asked.keys(exhibit, config)}, n or show.n
    geometry = _geometry(exhibit.launch, elements, settings, config)
    reason = refusal(geometry, device)
    if reason:
        raise RefusedError(f"exhibit {exhibit.name}: {reason}")
    problem = Problem(1, elements, 1, "f32", "f32", device=device.name)
    count = partial(count_exhibit, exhibit, min(elements, EMULATED), settings, device.arch, line)
    inspection = _gathered(exhibit, problem, settings, geometry, device, count if counters else None)
    moved = 4 * (elements + show.results(elements, settings))
    once = roofline(show.operations(elements, settings), moved, device.peak(inspection.unit), device.bandwidth)
    return replace(inspection, loads=once, once=once, exhibit=True)


def _gathered(
    row: Rung | Exhibit,
    problem: Problem,
    config: Config,
    geometry: Geometry,
    device: Device,
    count: Callable[[], EmulatorCounts] | None,
) -> Inspection:
    """Compile the launches, and take the emulator's counters unless `count` is None."""
    kernels = tuple(compiled(launch, device, config) for launch in geometry.launches)
    multiplier = unit(problem.dtype, (opcode for kernel in kernels for opcode in kernel.ptx_counts))
    peak, counts, missing = device.peak(multiplier), None, ""
    if count is not None:
        try:
            counts = count()
        except (EmulationError, RefusedError) as error:
            missing = str(error)
    return Inspection(
        rung=row.name,
        idea=row.idea,
        problem=problem,
        config=dict(config),
        device=device,
        kernels=kernels,
        tile=geometry.tile,
        workspace=geometry.workspace,
        unit=multiplier,
        loads=roofline(problem.flops, loaded(problem, *geometry.tile), peak, device.bandwidth),
        once=roofline(problem.flops, problem.bytes, peak, device.bandwidth),
        emulated=counts,
        not_emulated=missing,
    )


def _geometry(
    launch: Callable[[Any, Config], Geometry], size: Any, settings: Config, config: Mapping[str, int] | None
) -> Geometry:
    """The launch; an ArgumentError where the caller's config is one that the kernel does not take."""
    try:
        return launch(size, settings)
    except RefusedError as refused:
        if not config:
            raise
        text = ",".join(f"{key}={value}" for key, value in config.items())
        raise ArgumentError(f"config {text}: {refused}") from None


def _device(name: object) -> Device:
    """The device of this name, by default this machine's; the emulator's card where there is no GPU."""
    if not isinstance(name, str):
        raise ArgumentError(f"device {name!r}: write its name, such as 'cuda' or 'a100'")
    name = name or ("emulator" if driver.missing() else "cuda")
    return driver.find(asked.EMULATED_AS if name.strip().lower() == "emulator" else name)


def _problem(rung: Rung, m: int, n: int, k: int, dtype: str, device: Device) -> Problem:
    for option, side in (("m", m), ("n", n), ("k", k)):
        if not _is_whole(side) or side < 0:
            raise ArgumentError(f"{option}={side!r}: a side must be a whole number >= 1")
    precision = "tf32" if dtype == "tf32" else ""
    element = "f32" if precision else dtype
    if element not in C_NAMES or element not in rung.dtypes:
        raise ArgumentError(f"dtype {dtype!r}: rung {rung.name} takes {', '.join(rung.dtypes)}")
    side = n or SIDE
    place = f"cuda:{device.ordinal}" if device.ordinal >= 0 else device.name
    layout = "col" if dtypes.get(element).size == 1 else "row"  # as wgmma reads B of 8-bit types
    square = Problem(m or side, side, k or side, element, asked.result_type(element), device=place)
    square = square._replace(precision=precision, b_layout=layout)
    if m in (0, 1) and rung.refuses(square._replace(m=side)):
        row = square._replace(m=1, b_layout="col")
        return square if rung.refuses(row) else row
    return square


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def compiled(geometry: Geometry, device: Device, config: Mapping[str, int]) -> CompiledLaunch:
    """Compile a launch for a device. Raises CompileError, or DeviceError if NVRTC is not installed."""
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
