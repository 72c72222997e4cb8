"""A rung's kernel as a callable on views: its launches prepared once, its argument packed at each call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from typing import Any

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.cuda import device, driver
from gemmery.cuda.geometry import LARGEST_SIDE, Geometry, refusal
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]
Shape = Callable[[Problem, Config], Geometry]  # how a rung is launched for a problem


class Launch:
    """The launches of one rung for one problem; calling it puts them on C's stream and returns at once.

    A problem whose C lies in columns is computed as C' = B' A', so that kernels write rows.
    """

    def __init__(self, problem: Problem, config: Config, shape: Shape) -> None:
        self.flipped = problem.c_layout == "col"
        self.problem = problem.transposed() if self.flipped else problem
        self.geometry = shape(self.problem, config)
        found = device.find(problem.device)
        reason = _too_large(problem) or refusal(self.geometry, found)
        if reason:
            raise RefusedError(reason)
        self._ordinal = found.ordinal
        self._steps = [
            (driver.function(one.source, one.kernel, self._ordinal, one.shared), one.grid, one.block, one.shared)
            for one in (*self.geometry.before, self.geometry)
        ]

    def __call__(
        self,
        a: View,
        b: View,
        c: View,
        *,
        alpha: complex = 1.0,
        beta: complex = 0.0,
        bias: View | None = None,
        threads: int = 1,
    ) -> None:
        api, stream = driver.api(), c.stream
        with driver.on(self._ordinal):
            size = self.geometry.workspace
            scratch = driver.check(api.cuMemAllocAsync(size, stream)) if size else 0
            argument = arguments(self.problem, self.flipped, a, b, c, alpha, beta, bias, int(scratch))
            held = ctypes.create_string_buffer(argument, len(argument))
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
            for function, grid, block, shared in self._steps:
                driver.check(api.cuLaunchKernel(function, *grid, *block, shared, stream, ctypes.addressof(pointers), 0))
            if size:
                driver.check(api.cuMemFreeAsync(scratch, stream))


def arguments(
    problem: Problem,
    flipped: bool,
    a: View,
    b: View,
    c: View,
    alpha: complex,
    beta: complex,
    bias: View | None,
    workspace: int,
) -> bytes:
    """The fields of product.cuh's Product, in its order; `problem` has rows in C."""
    x, y, z = (_strides(view) for view in (a, b, c))
    step = bias.strides[0] // dtypes.get(bias.dtype).size if bias is not None else 0
    if flipped:
        a, b = b, a
        x, y, z = (y[0], y[2], y[1]), (x[0], x[2], x[1]), (z[0], z[2], z[1])
    along = (step, 0) if flipped else (0, step)
    number = "d" if problem.out == "f64" else "f"
    return struct.pack(
        f"=5Q11q4i2{number}",
        a.pointer,
        b.pointer,
        c.pointer,
        bias.pointer if bias is not None else 0,
        workspace,
        *x,
        *y,
        *z,
        *along,
        problem.m,
        problem.n,
        problem.k,
        problem.batch,
        alpha.real,
        beta.real,
    )


def builder(shape: Shape) -> Callable[[Problem, Config], Any]:
    """A rung's `build` from how it is launched."""

    def build(problem: Problem, config: Config) -> Launch:
        return Launch(problem, config, shape)

    return build


def _strides(view: View) -> tuple[int, ...]:
    size = dtypes.get(view.dtype).size
    return tuple(step // size for step in view.strides)


def _too_large(problem: Problem) -> str:
    side = max(problem.m, problem.n, problem.k, problem.batch)
    return f"a side of {side}: kernels count to {LARGEST_SIDE:,}; cut the product" if side > LARGEST_SIDE else ""
