"""Run the rungs of the ladder on the emulator, on NumPy arrays, and count what they do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery import arrange, dtypes
from gemmery.arrays import View, alignment
from gemmery.cpu import fused
from gemmery.cuda import nvrtc
from gemmery.cuda.driver import find
from gemmery.cuda.geometry import Geometry, refusal
from gemmery.cuda.launch import arguments, too_large
from gemmery.emulator import exact
from gemmery.emulator.arguments import memory_of
from gemmery.emulator.lower import Program, lowered
from gemmery.emulator.machine import Launch, Observer
from gemmery.emulator.ptx import Line, Module, calling
from gemmery.emulator.ptx.module import parse
from gemmery.emulator.run import Run, emulated
from gemmery.emulator.trace.chosen import Chosen
from gemmery.errors import RefusedError
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

Array = NDArray[Any]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Operands:
    """The arrays of a product: A (batch, m, k), B (batch, k, n), C (batch, m, n) with any strides, and a bias."""

    a: Array
    b: Array
    c: Array
    bias: Array | None = None


def problem_of(
    operands: Operands,
    dtype: str,
    out: str,
    device: str,
    *,
    epilogue: str = "",
    scaled: bool = False,
    precision: str = "",
) -> Problem:
    """Return the product of these operands as a rung sees it: shapes, layouts and alignments."""
    (batch, m, n), k = operands.c.shape, operands.a.shape[2]
    (a, a_bytes), (b, b_bytes), (c, c_bytes) = (_lies(array) for array in (operands.a, operands.b, operands.c))
    aligned = a_bytes, b_bytes, c_bytes
    return Problem(m, n, k, dtype, out, batch, a, b, c, epilogue, scaled, device, precision, aligned)


def _lies(array: Array) -> tuple[str, int]:
    """Return the layout of a batch of matrices, and the alignment of its address and strides."""
    (_, rows, columns), (step, row, column), size = array.shape, array.strides, array.itemsize
    walked = zip((step, row, column), array.shape, strict=True)
    steps = tuple(step for step, length in walked if length > 1 and step != size)
    return arrange.layout(rows, columns, row, column, size), alignment(array.ctypes.data, steps)


def run_rung(
    rung: Rung,
    problem: Problem,
    config: Mapping[str, int],
    operands: Operands,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    arch: str = "",
    check: bool = True,
    seed: int | None = None,
    texts: Mapping[str, str] | None = None,
    observers: Sequence[Observer] = (),
) -> tuple[Run, ...]:
    """Run the launches of a rung for a product on NumPy arrays, in place. bf16 is passed as its bits.

    `problem.device` names the device whose limits apply; the kernels are compiled for `arch`, by default that of the
    device; `texts` replaces the kernels' files. Raises RefusedError if the rung or the device refuses the product.
    """
    transposed, by_rows = problem.c_layout == "col", problem.by_rows()
    geometry = _geometry(rung, problem, config)
    launches = geometry.launches
    made = [nvrtc.ptx(one.source, one.kernel, arch or find(problem.device).arch, texts) for one in launches]
    programs = [prepared(one.text, one.entry) for one in made]
    named = {"A": operands.a, "B": operands.b, "C": operands.c}
    if operands.bias is not None:
        named["bias"] = operands.bias
    spans = {name: _span(array) for name, array in named.items()}
    memory = memory_of(
        {name: whole for name, (whole, _) in spans.items()},
        [program.kernel for program in programs],
        {"workspace": geometry.workspace},
    )
    kinds = {"A": problem.dtype, "B": problem.dtype, "C": problem.out, "bias": dtypes.get(problem.out).accumulator}
    views = {
        name: View(memory.address(name) + spans[name][1], array.shape, array.strides, kinds[name])
        for name, array in named.items()
    }
    packed = arguments(
        by_rows,
        transposed,
        views["A"],
        views["B"],
        views["C"],
        alpha,
        beta,
        views.get("bias"),
        memory.address("workspace"),
    )
    runs = tuple(
        emulated(
            program,
            Launch(one.grid, one.block, packed, one.shared),
            memory,
            check=check,
            seed=seed,
            observers=observers,
        )
        for program, one in zip(programs, launches, strict=True)
    )
    for name, (whole, _) in spans.items():
        if name == "C" or not np.array_equal(whole, memory.bytes(name)):
            whole[:] = memory.bytes(name)
    return tuple(replace(run, kernel=one.kernel) for run, one in zip(runs, launches, strict=True))


def _geometry(rung: Rung, problem: Problem, config: Mapping[str, int]) -> Geometry:
    """Return the launch of a rung for a product, the transposed one if C is stored by columns."""
    reason = too_large(problem) or rung.refuses(problem)
    if reason or rung.geometry is None:
        raise RefusedError(reason or f"rung {rung.name} has no launch, because it runs on the CPU")
    geometry = rung.geometry(problem.by_rows(), {**rung.default, **config})
    reason = refusal(geometry, find(problem.device))
    if reason:
        raise RefusedError(reason)
    return geometry


@lru_cache(maxsize=64)
def parsed(text: str, wrappers: frozenset[str]) -> Module:
    """Return the kernels of a PTX text; each text is read once."""
    return parse(text, wrappers)


@lru_cache(maxsize=64)
def prepared(text: str, kernel: str, wrappers: frozenset[str] = nvrtc.WRAPPERS) -> Program:
    """Return a kernel of a PTX text, ready for any launch; `wrappers` are those of `parse`, by default the rungs'."""
    return lowered(parsed(text, wrappers).kernels[kernel], faster())


def prepared_anew(text: str, kernel: str) -> Program:
    """Read and lower a kernel of a rung's PTX text without the cache."""
    return lowered(parse(text, nvrtc.WRAPPERS).kernels[kernel], faster())


def faster() -> Mapping[Function, Function]:
    """Return compiled functions for those of `emulator.exact`, if the CPU has the instruction."""
    pairs: tuple[tuple[Function, Function | None], ...] = ((exact.fma, fused.fma()), (exact.chain, fused.chain()))
    return {slow: quick for slow, quick in pairs if quick is not None}


def source_lines(drawn: Chosen) -> Mapping[str, str]:
    """Return the text of each line that a picture of these accesses names."""
    accesses = [access for tile in drawn.tiles for access in (tile.store, tile.load) if access is not None]
    frames = [access.frames for access in (*accesses, *drawn.shared, *drawn.global_)]
    frames += [divergence.frames for divergence in drawn.divergences]
    places = {calling(lines)[-1] for lines in frames}
    places |= {stretch.busiest or stretch.first for one in drawn.divergences for stretch in one.stretches}
    return {str(place): source_line(place) for place in sorted(places, key=str)}


def source_line(place: Line) -> str:
    """Return a line of a kernel's source; "" for code that the compiler adds, at line 0."""
    lines = nvrtc.text(place.file).splitlines() if place.number else []
    return lines[place.number - 1].strip() if place.number <= len(lines) and lines else ""


def _span(array: Array) -> tuple[NDArray[np.uint8], int]:
    """Return the memory of an array with any strides as bytes, and the offset of its first element."""
    if not array.size:
        return np.zeros(0, np.uint8), 0
    reach = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    before, after = -sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    kind = ctypes.c_uint8 * (before + after + array.itemsize)
    return np.ctypeslib.as_array(kind.from_address(array.ctypes.data - before)), before
