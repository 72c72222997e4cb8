"""One product by one rung on the emulator, on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from gemmery import arrange, dtypes
from gemmery.arrays import View, alignment
from gemmery.cuda import nvrtc, tensormaps, traced_function
from gemmery.cuda.driver import find
from gemmery.cuda.geometry import Geometry, Scaling, refusal
from gemmery.cuda.launch import as_taken, is_transposed, mapped_argument, placed_maps, product_argument, too_large
from gemmery.cuda.tensormaps import MapShape
from gemmery.dtypes import Array
from gemmery.errors import RefusedError
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery_emulator.arguments import memory_of
from gemmery_emulator.hopper import tensormap
from gemmery_emulator.kernels.programs import prepared
from gemmery_emulator.machine import LaunchConfig, Observer
from gemmery_emulator.run import EmulatedRun, emulated
from gemmery_lab.measure.work import numpy_dtype


@dataclass(frozen=True)
class Gemm:
    """The arrays and scalars of C = alpha A B + beta C + bias, any strides; arrays of bf16 hold its bits."""

    a: Array  # (batch, m, k)
    b: Array  # (batch, k, n)
    c: Array  # (batch, m, n)
    bias: Array | None = None
    alpha: float = 1.0
    beta: float = 0.0
    a_scale: Array | None = None  # (m, steps of k), float32
    b_scale: Array | None = None  # (steps of k, n)
    offsets: Array | None = None  # of groups, int32
    index: Array | None = None  # the rows of A that are multiplied, int64
    traced: tuple[Array | float, ...] = ()  # what a traced function reads, and the outputs that it stores
    second: Array | None = None  # (batch, k, n), the second weight
    second_output: Array | None = None  # (batch, m, n), the second output where it has a tensor map

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by their names in kernels."""
        others = {"bias": self.bias, "a_scale": self.a_scale, "b_scale": self.b_scale, "offsets": self.offsets}
        others |= {"index": self.index, "second": self.second, "second_output": self.second_output}
        arrays: dict[str, Array] = {"A": self.a, "B": self.b, "C": self.c}
        arrays |= {f"of_trace_{i}": each for i, each in enumerate(self.traced) if isinstance(each, np.ndarray)}
        return arrays | {name: array for name, array in others.items() if array is not None}


@dataclass(frozen=True)
class EmulationOptions:
    """How the launches of a rung are compiled and run."""

    arch: str = ""  # by default that of the problem's device
    texts: Mapping[str, str] | None = None  # replaces the kernels' files
    check: bool = True  # look for faults
    seed: int | None = None  # shuffles blocks and warps
    observers: Sequence[Observer] = ()
    ahead: int = 0  # the first threads of each block that run whenever they can, before the others


def problem_of(
    gemm: Gemm, dtype: str, out: str, device: str, *, epilogue: str = "", scaled: bool = False, precision: str = ""
) -> Problem:
    """Return the product as a rung sees it: shapes, layouts and alignments."""
    (batch, m, n), k = gemm.c.shape, gemm.a.shape[2]
    (a, a_bytes), (b, b_bytes), (c, c_bytes) = map(_layout, (gemm.a, gemm.b, gemm.c))
    alignments = a_bytes, b_bytes, c_bytes
    return Problem(m, n, k, dtype, out, batch, a, b, c, epilogue, scaled, device, precision, alignments)


def strided(problem: Problem, length: int) -> Gemm:
    """Return arrays that stand for the matrices, of whose k only `length` are summed: shapes and strides are read."""

    def matrix(dtype: str, rows: int, columns: int, whole: tuple[int, int], layout: str) -> Array:
        kind = numpy_dtype(dtype)
        steps = (1, whole[0]) if layout == "col" else (whole[1], 1)
        strides = (whole[0] * whole[1] * kind.itemsize, *(step * kind.itemsize for step in steps))
        return np.lib.stride_tricks.as_strided(np.empty(1, kind), (1, rows, columns), strides)

    m, n, k = problem.m, problem.n, problem.k
    return Gemm(
        matrix(problem.dtype, m, length, (m, k), problem.a_layout),
        matrix(problem.dtype, length, n, (k, n), problem.b_layout),
        matrix(problem.out, m, n, (m, n), problem.c_layout),
    )


def _layout(array: Array) -> tuple[str, int]:
    """Return the layout of a batch of matrices, and the alignment of its address and strides."""
    (batch, rows, columns), (along, row, column), size = array.shape, array.strides, array.itemsize
    steps = [along if along >= 0 else 1] if batch > 1 else []
    walked = (step for step, length in ((row, rows), (column, columns)) if length > 1 and step != size)
    steps += (step if step > 0 else 1 for step in walked)  # no tensor map describes repeated or reversed rows
    return arrange.layout(rows, columns, row, column, size), alignment(array.ctypes.data, tuple(steps))


def run_rung(
    rung: Rung, problem: Problem, config: Mapping[str, int], gemm: Gemm, options: EmulationOptions = EmulationOptions()
) -> tuple[EmulatedRun, ...]:
    """Run the launches of a rung for a product on the emulator, in place.

    `problem.device` names the device whose limits apply. Raises RefusedError if the rung or the device refuses.
    """
    geometry = launch_of(rung, problem, config)
    arch = options.arch or find(problem.device).arch
    codes = [nvrtc.ptx(launch.source, launch.kernel, arch, options.texts) for launch in geometry.launches]
    programs = [prepared(code.text, code.entry) for code in codes]
    spans = {name: _span(array) for name, array in gemm.arrays.items()}
    arrays, kernels = {name: span for name, (span, _) in spans.items()}, [program.kernel for program in programs]
    memory = memory_of(arrays, kernels, {"workspace": geometry.workspace})
    addresses = {name: memory.address(name) + offset for name, (_, offset) in spans.items()}
    argument = product_bytes(problem, geometry, gemm, addresses, memory.address("workspace"))
    runs, order = list[EmulatedRun](), dict[str, Any](seed=options.seed, ahead=options.ahead)
    for program, launch in zip(programs, geometry.launches, strict=True):
        dims = LaunchConfig(launch.grid, launch.block, argument, launch.shared, (launch.cluster, 1, 1))
        run = emulated(program, dims, memory, check=options.check, observers=options.observers, **order)
        runs.append(replace(run, kernel=launch.kernel))
    for name, (span, _) in spans.items():
        if name == "C" or not np.array_equal(span, memory.bytes(name)):
            span[:] = memory.bytes(name)
    return tuple(runs)


def product_bytes(problem: Problem, geometry: Geometry, gemm: Gemm, at: Mapping[str, int], workspace: int) -> bytes:
    """Return the argument of a rung's kernels for arrays at these addresses."""
    dtypes_of = {
        "A": problem.dtype,
        "B": problem.b_dtype or problem.dtype,
        "C": problem.out,
        "offsets": "int32",
        "index": "int64",
    }
    dtypes_of["bias"] = dtypes.get(problem.out).accumulator
    arrays = gemm.arrays.items()
    views = {name: View(at[name], x.shape, x.strides, dtypes_of.get(name, "f32")) for name, x in arrays}
    operands = views["A"], views["B"], views["C"]
    if problem.bits and not problem.levels:  # the factors of a packed B take the place of scratch memory
        workspace = at["b_scale"]
    product = product_argument(
        problem,
        *operands,
        views.get("bias"),
        alpha=gemm.alpha,
        beta=gemm.beta,
        workspace=workspace,
        apart=geometry.apart,
        swapped=geometry.swapped,
    )
    function = traced_function.of(problem)
    if not geometry.maps:
        apart = at.get("second", 0) - at["B"]
        return product + (function.packed(_places(gemm, at), (), apart) if function else b"")
    starts = {"a": at["A"], "b": at["B"], "c": at["C"]}
    if is_transposed(problem, geometry.swapped):
        starts["a"], starts["b"] = starts["b"], starts["a"]

    def encoded(described: MapShape, address: int) -> bytes:
        """The emulator's own bytes of a tensor map."""
        name = dtypes.get(described.dtype).numpy
        sides = described.extents, described.strides, (*described.box, described.deep), (1, 1, 1)
        return tensormap.encoded(address, name if name in tensormap.TYPES else "uint8", described.swizzle, *sides)

    maps = placed_maps(problem, geometry, *operands)
    starts |= {each.operand: workspace + each.packed for each in maps if each.packed >= 0}
    a, b = (_steps(views.get(name)) for name in ("a_scale", "b_scale"))
    of_a = "index" if problem.gathered else "a_scale"
    extra = tuple(views[name].pointer if name in views else 0 for name in (of_a, "b_scale", "offsets"))
    factors = (
        Scaling(problem.scales, gemm.a.shape[1], *a[1:], *b) if problem.gathered else Scaling(problem.scales, *a, *b)
    )
    order = geometry.band, geometry.ahead, geometry.swapped
    whole = mapped_argument(product, problem, maps, encoded, starts, factors, extra, *order)
    if function is None:
        return whole
    shapes = {each.operand: each.shape for each in maps}
    others = [("b", "second")] * (gemm.second is not None) + [("c", "second_output")] * (gemm.second_output is not None)
    added = [encoded(shapes[operand], at[name]) for operand, name in others]
    for i in function.carried:
        rows, start = np.atleast_2d(gemm.traced[i]), at[f"of_trace_{i}"]
        operand = View(start, rows.shape, rows.strides, "f16")  # or bf16
        added.append(encoded(tensormaps.of_operand(geometry, problem, operand), start))
    return whole + function.packed(_places(gemm, at), added, at.get("second", 0) - at["B"])


def _places(gemm: Gemm, addresses: Mapping[str, int]) -> list[traced_function.Strides | float]:
    """Return the operands and outputs of a traced function as it takes them."""
    places: list[traced_function.Strides | float] = []
    for i, each in enumerate(gemm.traced):
        if isinstance(each, np.ndarray):
            steps = [step // each.itemsize for step in each.strides]
            steps = [0, *steps] if len(steps) == 1 else steps
            places.append(traced_function.Strides(addresses[f"of_trace_{i}"], *steps))
        else:
            places.append(each)
    return places


def _steps(factors: View | None) -> tuple[int, int]:
    """Return the steps of factors in float32, 0 where there is one."""
    if factors is None:
        return 0, 0
    row, column = (step // 4 if length > 1 else 0 for step, length in zip(factors.strides, factors.shape, strict=True))
    return row, column


def launch_of(rung: Rung, problem: Problem, config: Mapping[str, int]) -> Geometry:
    """Return the launch of a rung for a product, the transposed one if C is stored by columns."""
    reason = too_large(problem) or rung.refusal(problem)
    if reason or rung.geometry is None:
        raise RefusedError(reason or f"rung {rung.name} has no launch, because it runs on the CPU")
    geometry = rung.geometry(problem.by_rows(), {**rung.default, **config})
    product = as_taken(problem, geometry.swapped)
    reason = refusal(geometry, find(problem.device)) or tensormaps.refusal(geometry, product)
    if reason:
        raise RefusedError(reason)
    return geometry


def _span(array: Array) -> tuple[NDArray[np.uint8], int]:
    """Return the memory of an array with any strides as bytes, and the offset of its first element."""
    if not array.size:
        return np.zeros(0, np.uint8), 0
    first, end = byte_bounds(array)
    memory = (ctypes.c_uint8 * (end - first)).from_address(first)
    return np.ctypeslib.as_array(memory), array.ctypes.data - first
