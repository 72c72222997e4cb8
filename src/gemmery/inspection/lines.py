"""A rung or an exhibit on the emulator at a small size: counters by line, accesses and barriers for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from gemmery import dtypes
from gemmery.cuda import nvrtc
from gemmery.cuda.geometry import Geometry
from gemmery.emulation.counters import EmulatorCounts, described
from gemmery.emulation.programs import prepared
from gemmery.emulator.arguments import bound
from gemmery.emulator.machine import LaunchConfig
from gemmery.emulator.run import emulated
from gemmery.emulator.trace import Trace
from gemmery.emulator.trace.pipeline import WARPGROUP, PipelineTrace, Timeline
from gemmery.emulator.trace.selection import select
from gemmery.lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from gemmery.ladder.exhibits import Exhibit, numbers
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

LARGEST = 256  # side of what is emulated: one of the largest tiles, four of its steps along k
ROW = 128  # bytes of a stage along k
ROUNDS = 2  # times that each stage of the ring is filled for a tile
TILES = 2  # tiles of one block, where it takes one after the other


def small(problem: Problem) -> Problem:
    """The same product with no side above LARGEST."""
    return problem._replace(m=min(problem.m, LARGEST), n=min(problem.n, LARGEST), k=min(problem.k, LARGEST))


def count_rung(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str, line: str = "") -> EmulatorCounts:
    """Run every launch of a rung on random operands, and return its counters.

    Raises EmulationError for an instruction that is not modelled, RefusedError where the rung refuses, ArgumentError
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
    if trace.timeline is not None and _copies_and_multiplies(trace.timeline):  # nobody runs ahead of the others
        trace = _traced(rung, few, settings, arch, 0)
    return trace


def random_operand(dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Standard normal numbers; bf16 and float8 as bits, integers from -8 to 8."""
    random = np.random.default_rng(0)
    row = dtypes.get(dtype)
    if row.kind == "i":
        return random.integers(-8, 9, shape).astype(row.numpy)
    if dtype in dtypes.FLOAT8:  # numbers from 1 to 4 with either sign
        least, most = (exponent - row.normal << row.fraction for exponent in (1, 3))
        return (random.integers(least, most, shape) | random.integers(0, 2, shape) << 7).astype(np.uint8)
    values = random.standard_normal(shape)
    if dtype == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(row.numpy)


def _random_product(problem: Problem) -> Gemm:
    """Random operands in the layouts of a problem, and zeros for C."""
    sides = ((problem.m, problem.k), problem.a_layout), ((problem.k, problem.n), problem.b_layout)
    a, b = (
        random_operand(problem.dtype, (1, *shape))
        if layout != "col"
        else random_operand(problem.dtype, (1, *shape[::-1])).mT
        for shape, layout in sides
    )
    return Gemm(a, b, empty_result(problem))


def empty_result(problem: Problem) -> NDArray[np.generic]:
    """Zeros of a result; bf16 as bits."""
    by_columns = problem.c_layout == "col"
    sides = (problem.n, problem.m) if by_columns else (problem.m, problem.n)
    zeros = np.zeros((1, *sides), dtypes.get(problem.out).stored)
    return zeros.mT if by_columns else zeros


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


def _copies_and_multiplies(timeline: Timeline) -> bool:
    """Whether a warpgroup that starts copies also multiplies."""
    does = {what: {event.who for event in timeline.events if event.what == what} for what in ("copies", "multiplies")}
    return not does["copies"].isdisjoint(does["multiplies"])
