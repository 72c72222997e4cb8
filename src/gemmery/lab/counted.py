"""A rung on the emulator at a small size: counts by line of its source, and what pictures are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.cuda import nvrtc
from gemmery.emulator.chosen import Chosen, chosen
from gemmery.emulator.counts import Counts
from gemmery.emulator.ptx import Line
from gemmery.emulator.trace import Trace
from gemmery.lab.emulation import Operands, run_rung
from gemmery.ladder.inspection import Emulated, LineCounts
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

MOST = 128  # side of what is emulated: one of the largest tiles, a few steps along k
TYPES = {"f64": "f8", "f32": "f4", "f16": "f2", "bf16": "u2"}


def small(problem: Problem) -> Problem:
    """The same product with no side above MOST."""
    return replace(problem, m=min(problem.m, MOST), n=min(problem.n, MOST), k=min(problem.k, MOST))


def counted(rung: Rung, problem: Problem, config: Mapping[str, int], arch: str, line: str = "") -> Emulated:
    """Run every launch of a rung on random operands, and count.

    Raises EmulationError for an instruction that is not modelled, RefusedError where the rung refuses, ArgumentError
    for a `line` that does nothing to memory.
    """
    m, n, k = problem.m, problem.n, problem.k
    a, b = (_random(problem.dtype, (1, *shape)) for shape in ((m, k), (k, n)))
    operands, trace = Operands(a, b, np.zeros((1, m, n), TYPES[problem.out])), Trace()
    runs = run_rung(rung, problem, config, operands, arch=arch, check=False, observers=(trace,))
    counts = reduce(add, runs).counts
    steps = {name: (array.strides[1], array.strides[2]) for name, array in (("A", a), ("B", b))}
    found = chosen(trace, steps, line)
    lines = tuple(_line_counts(str(place), _code(place), here) for place, here in counts.lines.items())
    total, kinds = _line_counts("total", "", counts), dict(counts.instructions.most_common())
    return Emulated(problem, lines, total, kinds, found, _shown(found))


def _random(dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Standard normal numbers; bf16 as its bits."""
    values = np.random.default_rng(0).standard_normal(shape)
    if dtype == "bf16":
        return (values.astype("f4").view("u4") >> 16).astype("u2")
    return values.astype(TYPES[dtype])


def _line_counts(line: str, code: str, counts: Counts) -> LineCounts:
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
    )


def _code(place: Line) -> str:
    """A line of a kernel's source; "" of what the compiler adds, which stands at line 0."""
    lines = nvrtc.text(place.file).splitlines() if place.number else []
    return lines[place.number - 1].strip() if place.number <= len(lines) and lines else ""


def _shown(found: Chosen) -> Mapping[str, str]:
    """The text of each line at which a stretch begins."""
    places = {stretch.first for one in found.divergences for stretch in one.stretches}
    return {str(place): _code(place) for place in places}
