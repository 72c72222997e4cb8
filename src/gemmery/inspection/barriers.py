"""A rung that uses tensor copies on the emulator: the first tiles that they bring, and its barriers over time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gemmery import dtypes
from gemmery.cuda.geometry import Geometry
from gemmery.emulator.trace.pipeline import WARPGROUP, PipelineTrace, Timeline
from gemmery.lab.emulated_product import EmulationOptions, Gemm, run_rung
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

ROW = 128  # bytes of a stage along k
ROUNDS = 2  # times that each stage of the ring is filled for a tile
TILES = 2  # tiles of one block, where it takes one after the other


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
    if dtype in dtypes.FP8:  # numbers from 1 to 4 with either sign
        least, most = (0x38, 0x48) if dtype == "e4m3" else (0x3C, 0x44)
        return (random.integers(least, most, shape) | random.integers(0, 2, shape) << 7).astype(np.uint8)
    values = random.standard_normal(shape)
    if dtype == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(row.numpy)


def empty_result(problem: Problem) -> NDArray[np.generic]:
    """Zeros of a result; bf16 as bits."""
    by_columns = problem.c_layout == "col"
    sides = (problem.n, problem.m) if by_columns else (problem.m, problem.n)
    zeros = np.zeros((1, *sides), "uint16" if problem.out == "bf16" else dtypes.get(problem.out).numpy)
    return zeros.mT if by_columns else zeros


def _few_tiles(problem: Problem, geometry: Geometry, config: Mapping[str, int]) -> Problem:
    """The same product with a tile or two for each block of a cluster, and k for some rounds of the ring."""
    (bm, bn), step = geometry.tile, ROW // dtypes.get(problem.dtype).size
    wide = TILES if "blocks" in config else 1
    # A 0 in the config leaves the choice to the rung.
    cm, cn, stages = (config.get(key) or least for key, least in (("cm", 1), ("cn", 1), ("stages", 4)))
    return problem._replace(m=bm * cm, n=wide * bn * cn, k=ROUNDS * stages * step, batch=1)


def _traced(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str, ahead: int) -> PipelineTrace:
    m, n, k = problem.m, problem.n, problem.k
    a, b = (
        random_operand(problem.dtype, (1, *sides)) if layout != "col" else _by_columns(problem.dtype, sides)
        for sides, layout in (((m, k), problem.a_layout), ((k, n), problem.b_layout))
    )
    trace = PipelineTrace()
    options = EmulationOptions(arch, check=False, observers=(trace,), ahead=ahead)
    run_rung(rung, problem, config, Gemm(a, b, empty_result(problem)), options)
    return trace


def _by_columns(dtype: str, sides: tuple[int, int]) -> NDArray[np.generic]:
    return random_operand(dtype, (1, *sides[::-1])).swapaxes(1, 2)


def _copies_and_multiplies(timeline: Timeline) -> bool:
    """Whether a warpgroup that starts copies also multiplies."""
    does = {what: {event.who for event in timeline.events if event.what == what} for what in ("copies", "multiplies")}
    return not does["copies"].isdisjoint(does["multiplies"])
