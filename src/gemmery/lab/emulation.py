"""emulate(): any CUDA kernel, run on the CPU and counted; and the rungs of the ladder, run the same way."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery import arrange, dtypes
from gemmery.arrays import View, alignment
from gemmery.cpu import fused
from gemmery.cuda import nvrtc
from gemmery.cuda.device import find
from gemmery.cuda.geometry import refusal
from gemmery.cuda.launch import arguments, too_large
from gemmery.emulator.arguments import bound, memory_of
from gemmery.emulator.events import Observer
from gemmery.emulator.lower import Program, lowered
from gemmery.emulator.ptx import parse
from gemmery.emulator.run import Run, emulated
from gemmery.emulator.simt import Launch
from gemmery.errors import ArgumentError, RefusedError
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem

Array = NDArray[Any]
Dims = int | tuple[int, ...]
SOURCE = "kernel.cu"  # what a source that is given as text is called in findings and lines
MOST_THREADS = 1024  # of a block, on every device


def emulate(
    source: str,
    kernel: str,
    grid: Dims,
    block: Dims,
    args: Sequence[Any],
    shared: int = 0,
    arch: str = "sm_90",
    *,
    cluster: Dims = 1,
    merge: bool = True,
    check: bool = True,
    seed: int | None = None,
) -> Run:
    """Run a CUDA C++ or PTX kernel on NumPy arrays, in place, and count what it does; no GPU is needed.

    `source` is CUDA C++ (compiled for `arch`) or PTX; `kernel` a function's name or a template's instance ("add<4>").
    `grid`, `block` and `cluster` are numbers or tuples of up to three; `shared` is bytes of dynamic shared memory.
    Of `args` an array is passed as its address, a NumPy scalar as itself, None as a null pointer, bytes as a struct.
    `merge` counts neighbouring accesses as ptxas merges them; `check` looks for faults; `seed` shuffles the order of
    blocks and of warps, so that what depends on it shows.

    >>> import numpy as np, gemmery as gm
    >>> x = np.arange(64, dtype=np.float32)
    >>> code = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }"
    >>> run = gm.emulate(code, "twice", 1, 64, [x])
    >>> x[:3].tolist(), run.global_.loads.sectors, run.flops, run.findings
    ([0.0, 2.0, 4.0], 8, 64, ())

    Raises EmulationError for an instruction that is not modelled, CompileError, ArgumentError, LayoutError.
    """
    dims = _dims("grid", grid), _dims("block", block)
    if np.prod(dims[1]) > MOST_THREADS:
        raise ArgumentError(f"block={block}: {np.prod(dims[1])} threads; a block has at most {MOST_THREADS}")
    if shared < 0:
        raise ArgumentError(f"shared={shared}: bytes of shared memory are a number >= 0")
    if ".version" in source and ".entry" in source:
        program = _program(source, _only(source, kernel))
    else:
        made = nvrtc.ptx(SOURCE, kernel, arch, {SOURCE: source})
        program = _program(made.text, made.entry)
    given = bound(program.kernel, args)
    launch = Launch(*dims, given.parameters, shared, _dims("cluster", cluster))
    run = emulated(program, launch, given.memory, check=check, merge=merge, seed=seed)
    given.write_back()
    return replace(run, kernel=kernel or run.kernel)


@dataclass(frozen=True)
class Operands:
    """The arrays of a product: A (batch, m, k), B (batch, k, n), C (batch, m, n), of any strides, and a bias."""

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
    """The product of these operands as a rung sees it: shapes, layouts, and how they are aligned."""
    (batch, m, n), k = operands.c.shape, operands.a.shape[2]
    (a, a_bytes), (b, b_bytes), (c, c_bytes) = (_lies(array) for array in (operands.a, operands.b, operands.c))
    aligned = a_bytes, b_bytes, c_bytes
    return Problem(m, n, k, dtype, out, batch, a, b, c, epilogue, scaled, device, precision, aligned)


def _lies(array: Array) -> tuple[str, int]:
    """The layout of a batch of matrices, and how its address and strides are aligned."""
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
    """The launches of a rung for a product, on NumPy arrays; C is written. bf16 is held as its bits (uint16).

    `problem.device` names the device whose limits count, `arch` (its own unless said) what is compiled for;
    `texts` take the place of the kernels' files. Raises RefusedError where the rung or the device refuses.
    """
    device = find(problem.device)
    flipped = problem.c_layout == "col"
    turned = problem.transposed() if flipped else problem
    reason = too_large(problem) or rung.refuses(problem)
    if reason or rung.geometry is None:
        raise RefusedError(reason or f"rung {rung.name} has no launch: it runs on the CPU")
    geometry = rung.geometry(turned, {**rung.default, **config})
    reason = refusal(geometry, device)
    if reason:
        raise RefusedError(reason)
    launches = (*geometry.before, geometry)
    made = [nvrtc.ptx(one.source, one.kernel, arch or device.arch, texts) for one in launches]
    programs = [_program(one.text, one.entry) for one in made]
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
        turned,
        flipped,
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
    spans["C"][0][:] = memory.bytes("C")
    return tuple(replace(run, kernel=one.kernel) for run, one in zip(runs, launches, strict=True))


@lru_cache(maxsize=64)
def _program(text: str, kernel: str) -> Program:
    return lowered(parse(text).kernels[kernel], fused.fma())


def _only(text: str, kernel: str) -> str:
    """The kernel meant in a PTX text: by its name, a part of its mangled one, or the only one."""
    names = list(parse(text).kernels)
    found = [name for name in names if name == kernel] or [name for name in names if kernel in name]
    if len(found) != 1:
        raise ArgumentError(f"kernel {kernel!r}: this PTX has {', '.join(names)}; name one of them")
    return found[0]


def _dims(name: str, given: Dims) -> tuple[int, int, int]:
    sides = given if isinstance(given, tuple) else (given,)
    if not 1 <= len(sides) <= 3 or any(int(side) != side or side < 1 for side in sides):
        raise ArgumentError(f"{name}={given}: a whole number >= 1, or a tuple of up to three")
    x, y, z = (*map(int, sides), 1, 1)[:3]
    return x, y, z


def _span(array: Array) -> tuple[NDArray[np.uint8], int]:
    """The memory that an array of any strides lies in, as bytes, and where in it its first element is."""
    if not array.size:
        return np.zeros(0, np.uint8), 0
    reach = [(length - 1) * step for length, step in zip(array.shape, array.strides, strict=True)]
    before, after = -sum(step for step in reach if step < 0), sum(step for step in reach if step > 0)
    kind = ctypes.c_uint8 * (before + after + array.itemsize)
    return np.ctypeslib.as_array(kind.from_address(array.ctypes.data - before)), before
