"""A rung's product on the emulator, checked as on a GPU: within its bound, no finding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gemmery import verify
from gemmery.emulator.findings import Finding
from gemmery.lab.emulation import Operands, run_rung
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from operands import numpy_dtype, random

TF32 = 2.0**14  # float32 units that rounding A and B to 10 bits of fraction may cost: 2 * 2**-11 = 2**14 * 2**-24


@dataclass(frozen=True)
class Product:
    """What came of it."""

    error_over_bound: float  # at most 1 where the result is right
    findings: tuple[Finding, ...]
    bank_conflicts: int


def problem_of(
    shape: tuple[int, int, int], name: str, layouts: tuple[str, str, str] = ("row", "row", "row"), batch: int = 1
) -> Problem:
    """A product of contiguous matrices."""
    m, n, k = shape
    size = numpy_dtype(name).itemsize
    sides = ((m, k), (k, n), (m, n))
    rows = [rows if layout == "col" else columns for (rows, columns), layout in zip(sides, layouts, strict=True)]
    whole = [rows * columns if batch > 1 else 0 for rows, columns in sides]
    aligned = tuple(math.gcd(16, row * size, each * size) for row, each in zip(rows, whole, strict=True))
    return Problem(m, n, k, name, name, batch, *layouts, device="h200", alignments=aligned)


def product(rung: Rung, problem: Problem, config: Mapping[str, int], texts: Mapping[str, str] | None = None) -> Product:
    """A rung's product of random matrices, its kernels from the package's files or from other texts."""
    p = problem
    values = [
        random((p.batch, p.m, p.k), p.dtype, 1),
        random((p.batch, p.k, p.n), p.dtype, 2),
        np.full((p.batch, p.m, p.n), np.nan, numpy_dtype(p.out)),
    ]
    a, b, c = (_stored(x, layout) for x, layout in zip(values, (p.a_layout, p.b_layout, p.c_layout), strict=True))
    runs = run_rung(rung, p, config, Operands(a, b, c), texts=texts)
    bound = (lambda k: rung.bound(k) + TF32) if p.precision else rung.bound
    return Product(
        verify.check(c, a, b, bound).error_over_bound,
        tuple(one for run in runs for one in run.findings),
        sum(run.shared.bank_conflicts for run in runs),
    )


def _stored(x: np.ndarray, layout: str) -> np.ndarray:
    """The same matrices with their rows, or their columns, contiguous."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if layout == "col" else np.ascontiguousarray(x)
