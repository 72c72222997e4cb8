"""A rung or an exhibit on the emulator at a small size: counters by line of its source, and accesses for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np

from gemmery.cuda import nvrtc
from gemmery.emulator.arguments import bound
from gemmery.emulator.counters.counts import Counts, Frames
from gemmery.emulator.machine import LaunchConfig
from gemmery.emulator.ptx import calling
from gemmery.emulator.run import EmulatedRun, emulated
from gemmery.emulator.trace import Trace
from gemmery.emulator.trace.selection import Selection, select
from gemmery.inspection.barriers import empty_result, random_operand, trace_barriers
from gemmery.inspection.records import EmulatorCounts, LineCounts
from gemmery.lab.emulated_product import (
    EmulationOptions,
    Gemm,
    prepared,
    problem_of,
    run_rung,
    source_line,
    source_lines,
)
from gemmery.ladder.exhibits import Exhibit, numbers
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

LARGEST = 256  # side of what is emulated: one of the largest tiles, four of its steps along k
NOTABLE = 0.05  # share of all instructions from which an inlined line without accesses is listed


def small(problem: Problem) -> Problem:
    """The same product with no side above LARGEST."""
    return problem._replace(m=min(problem.m, LARGEST), n=min(problem.n, LARGEST), k=min(problem.k, LARGEST))


def count_rung(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str, line: str = "") -> EmulatorCounts:
    """Run every launch of a rung on random operands, and return its counters.

    Raises EmulationError for an instruction that is not modelled, RefusedError where the rung refuses, ArgumentError
    for a `line` without memory accesses.
    """
    m, n, k = problem.m, problem.n, problem.k
    a, b = (random_operand(problem.dtype, (1, *shape)) for shape in ((m, k), (k, n)))
    b = np.ascontiguousarray(b.mT).mT if problem.b_layout == "col" else b
    gemm, trace = Gemm(a, b, empty_result(problem)), Trace()
    problem = problem._replace(alignments=problem_of(gemm, problem.dtype, problem.out, problem.device).alignments)
    runs = run_rung(rung, problem, config, gemm, EmulationOptions(arch, check=False, observers=(trace,)))
    steps = {name: (array.strides[1], array.strides[2]) for name, array in (("A", a), ("B", b))}
    drawn = select(trace, steps, line)
    if not line and (barriers := trace_barriers(rung, problem, config, arch)) is not None:
        drawn = replace(drawn, copied=barriers.tiles, timeline=barriers.timeline)
    return _described(problem, reduce(add, runs).counts, drawn)


def count_exhibit(exhibit: Exhibit, n: int, config: Mapping[str, int], arch: str, line: str = "") -> EmulatorCounts:
    """Run an exhibit's kernel on `n` elements, and return its counters. Raises as `count_rung` does."""
    show, trace = exhibit.show, Trace()
    geometry, y = exhibit.launch(n, config), np.zeros(show.results(n, config), np.float32)
    code = nvrtc.ptx(geometry.source, geometry.kernel, arch)
    program = prepared(code.text, code.entry)
    arguments = bound(program.kernel, (numbers(n), y, np.int32(n)))
    launch = LaunchConfig(geometry.grid, geometry.block, arguments.parameters)
    run = emulated(program, launch, arguments.memory, check=False, observers=(trace,))
    return _described(Problem(1, n, 1, "f32", "f32"), run.counts, select(trace, {}, line))


def count_run(run: EmulatedRun, line: str = "") -> EmulatorCounts:
    """Return the counters of a run of any kernel by line of its source. Raises ArgumentError as `count_rung` does."""
    drawable = run.drawable
    if drawable is None:
        return _described(Problem(1, 1, 1, "f32", "f32"), run.counts, Selection(), {})
    drawn = select(drawable.trace, drawable.steps, line)
    return _described(Problem(1, 1, 1, "f32", "f32"), run.counts, drawn, drawable.texts)


def _described(
    problem: Problem, counts: Counts, drawn: Selection, texts: Mapping[str, str] | None = None
) -> EmulatorCounts:
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
