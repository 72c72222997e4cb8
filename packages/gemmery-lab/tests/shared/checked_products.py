"""Products on the emulator, checked as on a GPU: error within the bound, no byte written outside C, no finding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gemmery import dtypes, verify
from gemmery.errors import LayoutError, RefusedError
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery_emulator.findings import Finding
from gemmery_emulator.run import EmulatedRun
from gemmery_lab.emulated_product import EmulationOptions, Gemm, run_rung
from gemmery_lab.emulated_product import problem_of as problem_on
from layouts import laid
from operands import numpy_dtype, random

TF32 = 2.0**14  # float32 units that rounding A and B to 10 bits of fraction may cost: 2 * 2**-11 = 2**14 * 2**-24
ROWS = ("row", "row", "row")


@dataclass(frozen=True)
class Product:
    """The result of a run."""

    error_over_bound: float  # at most 1 where the result is right
    findings: tuple[Finding, ...]
    bank_conflicts: int


@dataclass(frozen=True)
class Placed:
    """A batch of matrices in guarded memory, and a copy of that memory."""

    array: np.ndarray
    image: np.ndarray
    before: np.ndarray
    name: str

    def untouched(self) -> bool:
        """Return True if no byte has changed."""
        return np.array_equal(self.image, self.before)

    def untouched_around(self) -> bool:
        """Return True if no byte outside the elements has changed."""
        result, after = self.array.copy(), self.image.copy()
        self.image[...] = self.before
        self.array[...] = result
        same = np.array_equal(self.image, after)
        self.image[...] = after
        return same


def place(values: np.ndarray, name: str, layout: str = "row", one_for_all: bool = False) -> Placed:
    """Return `values` (batch, rows, columns) in guarded memory of that layout."""
    image, inside = laid(values, layout, one_for_all)
    return Placed(inside, image, image.copy(), name)


def matrices(shape, name, out="", layouts=ROWS, batch=1, shared=(False, False), filled=False):
    """Return A, B and a poisoned C, or a C `filled` with numbers."""
    m, n, k = shape
    out = out or dtypes.written(name)
    with np.errstate(invalid="ignore"):  # integers have no NaN
        c = random((batch, m, n), out, 3) if filled else np.full((batch, m, n), np.nan).astype(numpy_dtype(out))
    return (
        place(random((batch, m, k), name, 1), name, layouts[0], shared[0]),
        place(random((batch, k, n), name, 2), name, layouts[1], shared[1]),
        place(c, out, layouts[2]),
    )


def needed(rung: Rung, name: str) -> str:
    """Return the precision that the rung requires for this element type: "tf32" on tensor cores."""
    plain = Problem(64, 64, 64, name, dtypes.written(name), device="h200")
    fewer = plain._replace(precision="tf32")
    return "tf32" if name == "f32" and rung.refuses(plain) and not rung.refuses(fewer) else ""


def run(
    rung, a, b, c, *, alpha=1.0, beta=0.0, bias=None, epilogue="", config=None, device="h200", seed=None, texts=None
) -> tuple[EmulatedRun, ...]:
    """Multiply and check; return () if the rung refuses the product or its strides. `texts` replace kernels' files."""
    precision = needed(rung, a.name)
    row = None if bias is None else bias.array[0, 0]
    given = Gemm(a.array, b.array, c.array, row, alpha, beta)
    scaled = alpha != 1 or beta != 0
    case = problem_on(given, a.name, c.name, device, epilogue=epilogue, scaled=scaled, precision=precision)
    old = c.array.copy()
    try:
        runs = run_rung(rung, case, config or {}, given, EmulationOptions(seed=seed, texts=texts))
    except (
        LayoutError,
        RefusedError,
    ):  # strides that no tensor map describes, or a product that the rung does not take
        return ()
    found = verify.check(
        c.array,
        a.array,
        b.array,
        _bound(rung, a.name, precision),
        alpha=alpha,
        beta=beta,
        c=old if beta != 0 else None,
        bias=row,
        activation=epilogue.split("+")[-1] if epilogue != "bias" else "",
    )
    assert found.error_over_bound <= 1, f"{case}: {found}"
    assert [str(one) for each in runs for one in each.findings] == [], case
    assert a.untouched(), f"A was written: {case}"
    assert b.untouched(), f"B was written: {case}"
    assert c.untouched_around(), f"memory around C was written: {case}"
    return runs


def problem_of(shape: tuple[int, int, int], name: str, layouts: tuple[str, str, str] = ROWS, batch: int = 1) -> Problem:
    """Return a product of contiguous matrices."""
    m, n, k = shape
    size = numpy_dtype(name).itemsize
    sides = ((m, k), (k, n), (m, n))
    rows = [rows if layout == "col" else columns for (rows, columns), layout in zip(sides, layouts, strict=True)]
    whole = [rows * columns if batch > 1 else 0 for rows, columns in sides]
    aligned = tuple(math.gcd(16, row * size, each * size) for row, each in zip(rows, whole, strict=True))
    return Problem(m, n, k, name, dtypes.written(name), batch, *layouts, device="h200", alignments=aligned)


def product(rung: Rung, problem: Problem, config: Mapping[str, int], texts: Mapping[str, str] | None = None) -> Product:
    """Run a rung on random matrices, and a bias for an epilogue with it, with the package's kernels or other texts."""
    p = problem
    layouts = p.a_layout, p.b_layout, p.c_layout
    a, b, c = (one.array for one in matrices((p.m, p.n, p.k), p.dtype, p.out, layouts, p.batch))
    bias = random((p.n,), "f32", 4) if p.epilogue.startswith("bias") else None
    activation = p.epilogue.removeprefix("bias").removeprefix("+")
    runs = run_rung(rung, p, config, Gemm(a, b, c, bias), EmulationOptions(texts=texts))
    return Product(
        verify.check(c, a, b, _bound(rung, p.dtype, p.precision), bias=bias, activation=activation).error_over_bound,
        tuple(one for run in runs for one in run.findings),
        sum(run.shared.bank_conflicts for run in runs),
    )


def accumulator(name: str) -> str:
    """Return the type of a bias."""
    return dtypes.get(name).accumulator


def _bound(rung: Rung, name: str, precision: str):
    bound = rung.bound_of(name, precision)
    return (lambda k: bound(k) + TF32) if precision else bound
