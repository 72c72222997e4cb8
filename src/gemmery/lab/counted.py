"""A rung or an exhibit on the emulator at a small size: counters by line of its source, and accesses for pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.cuda import exhibits, nvrtc
from gemmery.emulator.arguments import bound
from gemmery.emulator.counters.counts import Counts, Frames
from gemmery.emulator.machine import Launch
from gemmery.emulator.ptx import Line, calling
from gemmery.emulator.run import emulated
from gemmery.emulator.trace import Trace
from gemmery.emulator.trace.chosen import Chosen, chosen
from gemmery.lab.emulation import Operands, prepared, run_rung
from gemmery.ladder.exhibits import Exhibit
from gemmery.ladder.inspection import Emulated, LineCounts
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

MOST = 256  # side of what is emulated: one of the largest tiles, four of its steps along k
MUCH = 0.05  # share of all instructions from which an inlined line without accesses is listed
TYPES = {"f64": "f8", "f32": "f4", "f16": "f2", "bf16": "u2"}


def small(problem: Problem) -> Problem:
    """The same product with no side above MOST."""
    return problem._replace(m=min(problem.m, MOST), n=min(problem.n, MOST), k=min(problem.k, MOST))


def counted(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str, line: str = "") -> Emulated:
    """Run every launch of a rung on random operands, and return its counters.

    Raises EmulationError for an instruction that is not modelled, RefusedError where the rung refuses, ArgumentError
    for a `line` without memory accesses.
    """
    m, n, k = problem.m, problem.n, problem.k
    a, b = (_random(problem.dtype, (1, *shape)) for shape in ((m, k), (k, n)))
    b = np.ascontiguousarray(b.mT).mT if problem.b_layout == "col" else b
    operands, trace = Operands(a, b, np.zeros((1, m, n), TYPES[problem.out])), Trace()
    runs = run_rung(rung, problem, config, operands, arch=arch, check=False, observers=(trace,))
    counts = reduce(add, runs).counts
    steps = {name: (array.strides[1], array.strides[2]) for name, array in (("A", a), ("B", b))}
    return _described(problem, counts, chosen(trace, steps, line))


def counted_exhibit(shown: Exhibit, n: int, config: Mapping[str, int], arch: str, line: str = "") -> Emulated:
    """Run an exhibit's kernel on `n` elements, and return its counters. Raises as `counted` does."""
    show, trace = shown.show, Trace()
    geometry, y = show.launch(n, config), np.zeros(show.results(n, config), np.float32)
    made = nvrtc.ptx(geometry.source, geometry.kernel, arch)
    program = prepared(made.text, made.entry)
    given = bound(program.kernel, (exhibits.numbers(n), y, np.int32(n)))
    launch = Launch(geometry.grid, geometry.block, given.parameters)
    run = emulated(program, launch, given.memory, check=False, observers=(trace,))
    return _described(Problem(1, n, 1, "f32", "f32"), run.counts, chosen(trace, {}, line))


def _described(problem: Problem, counts: Counts, found: Chosen) -> Emulated:
    total, kinds = _line_counts("total", "", counts), dict(counts.instructions.most_common())
    return Emulated(problem, tuple(_tree(counts)), total, kinds, found, texts(found))


def _random(dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Standard normal numbers; bf16 as bits."""
    values = np.random.default_rng(0).standard_normal(shape)
    if dtype == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(TYPES[dtype])


def _tree(counts: Counts) -> Iterator[LineCounts]:
    """The lines of the kernel's file, each followed by the lines inlined into it; a line includes all that it calls."""
    sums: dict[Frames, Counts] = {}
    for frames, here in counts.frames.items():
        shown = calling(frames)
        for depth in range(1, len(shown) + 1):
            place = shown[:depth]
            sums[place] = sums[place] + here if place in sums else here
    much = MUCH * sum(counts.instructions.values())
    for place in sorted(sums, key=lambda frames: [(line.file, line.number) for line in frames]):
        here, last = sums[place], place[-1]
        moves = here.shared.requests or here.global_.requests or here.flops or here.divergent_branches
        if len(place) == 1 or moves or sum(here.instructions.values()) >= much:
            yield _line_counts(str(last), _code(last), here, len(place) - 1)


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


def _code(place: Line) -> str:
    """A line of a kernel's source; "" for code that the compiler adds, at line 0."""
    lines = nvrtc.text(place.file).splitlines() if place.number else []
    return lines[place.number - 1].strip() if place.number <= len(lines) and lines else ""


def texts(found: Chosen) -> Mapping[str, str]:
    """The text of each line that a picture names."""
    accesses = [one for tile in found.tiles for one in (tile.store, tile.load) if one is not None]
    frames = [one.frames for one in (*accesses, *found.shared, *found.global_)]
    frames += [one.frames for one in found.divergences]
    places = {calling(place)[-1] for place in frames}
    places |= {stretch.busiest or stretch.first for one in found.divergences for stretch in one.stretches}
    return {str(place): _code(place) for place in places}
