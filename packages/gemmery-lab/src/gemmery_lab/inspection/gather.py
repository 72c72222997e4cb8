"""Everything about one GPU rung or exhibit that is known without a GPU, as an `Inspection`; rungs by name.

The emulator runs it at a small size: counters by line, accesses and barriers for pictures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from numbers import Integral
from operator import add
from typing import Any

import numpy as np

from gemmery import dtypes
from gemmery.cuda import driver, nvrtc, sass
from gemmery.cuda.device import Device
from gemmery.cuda.geometry import C_NAMES, Geometry, refusal
from gemmery.cuda.roofline import loaded, occupancy, roofline, unit
from gemmery.dtypes import Array
from gemmery.errors import ArgumentError, DeviceError, EmulationError, RefusedError, brief
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.exhibits import EMULATED, Exhibit, numbers
from gemmery.ladder.exhibits import find as find_exhibit
from gemmery.ladder.rung import Rung
from gemmery.ladder.rung import find as find_rung
from gemmery.problem import Config, Problem
from gemmery_emulator.arguments import bound
from gemmery_emulator.kernels.counters import EmulatorCounts, described
from gemmery_emulator.kernels.programs import prepared
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.run import emulated
from gemmery_emulator.trace import Trace
from gemmery_emulator.trace.pipeline import WARPGROUP, PipelineTrace
from gemmery_emulator.trace.selection import select
from gemmery_lab import asked
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from gemmery_lab.inspection.cpu_rung import inspect_cpu_rung, random_operand
from gemmery_lab.inspection.records import AnyInspection, CompiledLaunch, Inspection

LARGEST = 256  # side of what is emulated: one of the largest tiles, four of its steps along k
ROW = 128  # bytes of a stage along k
Counting = Callable[[], EmulatorCounts]
ROUNDS = 2  # times that each stage of the ring is filled for a tile
TILES = 2  # tiles of one block, where it takes one after the other


def count_rung(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str, line: str = "") -> EmulatorCounts:
    """Run every launch of a rung on random operands, and return its counters.

    Raises EmulationError for an instruction that is not modeled, RefusedError where the rung refuses, ArgumentError
    for a `line` without memory accesses.
    """
    gemm, trace = _random_product(problem), Trace()
    problem = problem._replace(alignments=problem_of(gemm, problem.dtype, problem.out, problem.device).alignments)
    runs = run_rung(rung, problem, config, gemm, EmulationOptions(arch, check=False, observers=(trace,)))
    steps = {name: (array.strides[1], array.strides[2]) for name, array in (("A", gemm.a), ("B", gemm.b))}
    drawn = select(trace, steps, line)
    if not line and (barriers := trace_barriers(rung, problem, config, arch)) is not None:
        drawn = replace(drawn, copied=barriers.tiles, timeline=barriers.timeline)
    return described(problem, reduce(add, runs).counts, drawn)


def count_exhibit(exhibit: Exhibit, n: int, config: Mapping[str, int], arch: str, line: str = "") -> EmulatorCounts:
    """Run an exhibit's kernel on `n` elements, and return its counters. Raises as `count_rung` does."""
    show, trace = exhibit.show, Trace()
    geometry, y = exhibit.launch(n, config), np.zeros(show.results(n, config), np.float32)
    code = nvrtc.ptx(geometry.source, geometry.kernel, arch)
    program = prepared(code.text, code.entry)
    arguments = bound(program.kernel, (numbers(n), y, np.int32(n)))
    launch = LaunchConfig(geometry.grid, geometry.block, arguments.parameters)
    run = emulated(program, launch, arguments.memory, check=False, observers=(trace,))
    return described(Problem(1, n, 1, "f32", "f32"), run.counts, select(trace, {}, line))


def trace_barriers(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str) -> PipelineTrace | None:
    """Run a small product of one block (of one cluster), and trace it; None for a kernel without tensor maps.

    Raises EmulationError and RefusedError as `run_rung` does.
    """
    assert rung.geometry is not None
    geometry = rung.geometry(problem.by_rows(), config)
    if not geometry.maps:
        return None
    few = _few_tiles(problem, geometry, config)
    settings = {**config, "blocks": geometry.cluster} if "blocks" in config else config
    trace = _traced(rung, few, settings, arch, WARPGROUP)
    events = trace.timeline.events if trace.timeline else ()
    copying, multiplying = ({each.who for each in events if each.what == what} for what in ("copies", "multiplies"))
    if copying & multiplying:  # nobody runs ahead of the others
        trace = _traced(rung, few, settings, arch, 0)
    return trace


def _random_product(problem: Problem) -> Gemm:
    """Random operands in the layouts of a problem, and zeros for C; bf16 as bits."""

    def matrix(rows: int, columns: int, layout: str, values: Callable[[tuple[int, ...]], Array]) -> Array:
        by_columns = layout == "col"
        filled = values((1, columns, rows) if by_columns else (1, rows, columns))
        return filled.mT if by_columns else filled

    m, n, k, out = problem.m, problem.n, problem.k, dtypes.get(problem.out).stored
    a = matrix(m, k, problem.a_layout, partial(random_operand, problem.dtype))
    b = matrix(k, n, problem.b_layout, partial(random_operand, problem.dtype))
    return Gemm(a, b, matrix(m, n, problem.c_layout, partial(np.zeros, dtype=out)))


def _few_tiles(problem: Problem, geometry: Geometry, config: Mapping[str, int]) -> Problem:
    """The same product with a tile or two for each block of a cluster, and k for some rounds of the ring."""
    (bm, bn), step = geometry.tile, ROW // dtypes.get(problem.dtype).size
    wide = TILES if "blocks" in config else 1
    # A 0 in the config leaves the choice to the rung.
    cm, cn, stages = (config.get(key) or least for key, least in (("cm", 1), ("cn", 1), ("stages", 4)))
    return problem._replace(m=bm * cm, n=wide * bn * cn, k=ROUNDS * stages * step, batch=1)


def _traced(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str, ahead: int) -> PipelineTrace:
    trace = PipelineTrace()
    options = EmulationOptions(arch, check=False, observers=(trace,), ahead=ahead)
    run_rung(rung, problem, config, _random_product(problem), options)
    return trace


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

    Raises ArgumentError and RefusedError as `gm.inspect` does.
    """
    if not issubclass(type(rung), str):
        raise ArgumentError(f"rung is {brief(rung)}: pass its name as text")
    if asked.inspectable(rung) == "an exhibit":
        if m or k or dtype:
            raise ArgumentError(f"exhibit {rung} takes one array of n floats: leave out m, k and dtype")
        return _exhibit(find_exhibit(rung), n, config or {}, _device(device), line, counters)
    row, target = find_rung(CUDA, rung), _device(device)
    problem = _problem(row, m, n, k, asked.spelled(dtype) or row.dtypes[0], target)
    settings: Config = {**row.default, **asked.keys(row, {} if config is None else config)}
    reason = row.refuses(problem)
    if not reason:
        settings = {**row.resolve(problem, settings)}  # the smaller product that is counted has the same tile
    geometry = _geometry(row.geometry, problem, settings, config) if row.geometry and not reason else None
    reason = reason or (refusal(geometry, target) if geometry else "it has no launch to inspect")
    if reason or geometry is None:
        raise RefusedError(f"rung {rung}: {reason}")
    m, n, k = (min(side, LARGEST) for side in (problem.m, problem.n, problem.k))
    count = partial(count_rung, row, problem._replace(m=m, n=n, k=k), settings, target.arch, line)
    return _gathered(row, problem, row.explicit(settings), geometry, target, count if counters else None)


def inspections(
    names: Sequence[str], device: str, line: str, counters: bool = True, **product: Any
) -> list[Callable[[], AnyInspection]]:
    """Return what inspects each of these CPU rungs, GPU rungs or exhibits for a `product`: m, n, k, dtype and config.

    Raises ArgumentError for names that do not go together, and for a device or a line with CPU rungs.
    """
    if asked.inspectable(*names) != "a CPU rung":
        sides = {side: product[side] for side in ("m", "n", "k")}
        product["dtype"] = product["dtype"] or shared_dtype(names, **sides, device=device)
        return [partial(inspect_rung, name, device=device, line=line, counters=counters, **product) for name in names]
    if where := device or line:
        raise ArgumentError(f"{where!r}: {names[0]} runs on the CPU of this machine; leave out device and line")
    return [partial(inspect_cpu_rung, name, **product) for name in names]


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


def _exhibit(exhibit: Exhibit, n: int, config: Config, device: Device, line: str, counters: bool) -> Inspection:
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
    row: Rung | Exhibit, problem: Problem, config: Config, geometry: Geometry, device: Device, count: Counting | None
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


def _geometry(launch: Callable[[Any, Config], Geometry], size: Any, full: Config, config: Config | None) -> Geometry:
    """The launch; an ArgumentError where the caller's config is one that the kernel does not take."""
    try:
        return launch(size, full)
    except RefusedError as refused:
        if not config:
            raise
        text = ",".join(f"{key}={value}" for key, value in config.items())
        raise ArgumentError(f"config {text}: {refused}") from None


def _device(name: object) -> Device:
    """The device of this name, by default this machine's; the emulator's card where there is no GPU."""
    if not isinstance(name, str):
        raise ArgumentError(f"device {brief(name)}: write its name, such as 'cuda' or 'a100'")
    name = name or ("emulator" if driver.missing() else "cuda")
    return driver.find(asked.EMULATED_AS if name.strip().lower() == "emulator" else name)


def _problem(rung: Rung, m: int, n: int, k: int, dtype: str, device: Device) -> Problem:
    for option, side in (("m", m), ("n", n), ("k", k)):
        if not _is_whole(side) or side < 0:
            raise ArgumentError(f"{option}={brief(side)}: a side must be a whole number >= 1")
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
    """Compile a launch for a device, or read it from the cache.

    Raises CompileError, or DeviceError if NVRTC is not installed.
    """
    program = nvrtc.code(geometry.source, geometry.kernel, device.arch)
    resources, ptx = program.report, nvrtc.ptx(geometry.source, geometry.kernel, device.arch).text  # kept beside it
    try:
        text, missing = sass.disassembled(program.cubin, program.entry), ""
    except DeviceError as error:
        text, missing = "", str(error)
    code = sass.instructions(text)
    bm, bn = geometry.tile  # multiply-adds of a warp for a step of its block along k, 0 where there is no such step
    adds = bm * bn * config.get("bk", config.get("tile", 0)) * 32 / geometry.threads
    step, passes = sass.step(code, adds)
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
        ptx_counts=sass.ptx_counts(ptx),
        ptx=ptx,
        sass=text,
        missing=missing,
        cluster=geometry.cluster,
        roles=tuple(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx))),
    )
