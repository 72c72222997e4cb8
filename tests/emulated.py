"""Kernels from given texts on the emulator."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gemmery import verify
from gemmery.arrays import View
from gemmery.arrays.memory import contiguous
from gemmery.cuda import nvrtc
from gemmery.cuda.launch import arguments
from gemmery.emulator import lower, parse
from gemmery.emulator.counters import Counters
from gemmery.emulator.findings import Finding, Findings
from gemmery.emulator.lower import Program
from gemmery.emulator.memory import Global
from gemmery.emulator.run import run
from gemmery.emulator.simt import Launch
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from operands import numpy_dtype, random

TF32 = 2.0**14  # float32 units that rounding A and B to 10 bits of fraction may cost: 2 * 2**-11 = 2**14 * 2**-24


def program(source: str, kernel: str, texts: Mapping[str, str], *flags: str, arch: str = "sm_90a") -> Program:
    """A kernel ready to run; `texts` take the place of the package's files, and no machine code is made."""
    return _program(source, kernel, tuple(sorted(texts.items())), flags, arch.replace("sm", "compute"))


@lru_cache(maxsize=64)
def _program(
    source: str, kernel: str, texts: tuple[tuple[str, str], ...], flags: tuple[str, ...], arch: str
) -> Program:
    made = nvrtc.compiled(source, kernel, arch, (*nvrtc.OPTIONS, *flags), dict(texts))
    return lower.lowered(parse.module(made.ptx).kernels[made.entry])


def findings(ready: Program, grid, block, args, shared: int = 0) -> tuple[Finding, ...]:
    """What is found while a kernel runs on arrays, None (a null pointer) and scalars."""
    arrays = {f"argument {i}": x for i, x in enumerate(args) if isinstance(x, np.ndarray)}
    memory = Global({name: x.nbytes for name, x in arrays.items()})
    packed = b""
    for i, (parameter, x) in enumerate(zip(ready.kernel.parameters, args, strict=True)):
        packed += bytes(parameter.offset - len(packed))
        if x is None or isinstance(x, np.ndarray):
            if x is not None:
                memory.bytes(f"argument {i}")[:] = x.view(np.uint8).ravel()
            packed += struct.pack("=Q", 0 if x is None else memory.address(f"argument {i}"))
        else:
            packed += x.tobytes()
    found = Findings()
    run(ready, Launch(grid, block, packed, shared), memory, [found])
    return found.found


@dataclass(frozen=True)
class Product:
    """What came of a rung's product on the emulator."""

    error_over_bound: float  # at most 1 where the result is right
    findings: tuple[Finding, ...]
    bank_conflicts: int


def problem_of(
    shape: tuple[int, int, int], name: str, layouts: tuple[str, str, str] = ("row", "row", "row"), batch: int = 1
) -> Problem:
    """A product of contiguous matrices; f32 may be rounded to tf32 by rungs that ask for it."""
    m, n, k = shape
    size = numpy_dtype(name).itemsize
    sides = ((m, k), (k, n), (m, n))
    rows = [rows if layout == "col" else columns for (rows, columns), layout in zip(sides, layouts, strict=True)]
    whole = [rows * columns if batch > 1 else 0 for rows, columns in sides]
    aligned = tuple(math.gcd(16, row * size, all_ * size) for row, all_ in zip(rows, whole, strict=True))
    return Problem(m, n, k, name, name, batch, *layouts, device="h200", alignments=aligned)


def product(rung: Rung, problem: Problem, config: Mapping[str, int], texts: Mapping[str, str] | None = None) -> Product:
    """A rung's product of random matrices, its kernels from the package's files or from other texts."""
    geometry = rung.geometry(problem, {**rung.default, **config})
    p, dtype = problem, numpy_dtype(problem.dtype)
    a, b = random((p.batch, p.m, p.k), p.dtype, 1), random((p.batch, p.k, p.n), p.dtype, 2)
    c = np.full((p.batch, p.m, p.n), np.nan, dtype)
    memory = Global({"A": a.nbytes, "B": b.nbytes, "C": c.nbytes, "scratch": geometry.workspace})
    views = []
    for name, x, layout in zip("ABC", (a, b, c), (p.a_layout, p.b_layout, p.c_layout), strict=True):
        lies = np.ascontiguousarray(x.swapaxes(1, 2)) if layout == "col" else x
        memory.bytes(name)[:] = lies.view(np.uint8).ravel()
        batch, row, column = contiguous(lies.shape, dtype.itemsize)
        strides = (batch, column, row) if layout == "col" else (batch, row, column)
        views.append(View(memory.address(name), x.shape, strides, p.dtype))
    packed = arguments(p, False, *views, 1.0, 0.0, None, memory.address("scratch"))
    found = Findings()
    conflicts = 0
    for one in (*geometry.before, geometry):
        ready = program(one.source, one.kernel, texts or {})
        counters = Counters(ready.kernel)
        run(ready, Launch(one.grid, one.block, packed, one.shared), memory, [found, counters])
        conflicts += counters.counts().shared.bank_conflicts
    result = memory.bytes("C").view(dtype).reshape(c.shape)
    bound = rung.bound if not p.precision else lambda k: rung.bound(k) + TF32
    checked = verify.check(result, a, b, bound)
    return Product(checked.error_over_bound, found.found, conflicts)
