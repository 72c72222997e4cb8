"""A rung's kernel as a callable on views: launches are prepared once, the argument is packed at each call."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from gemmery import dtypes
from gemmery.arrays import View
from gemmery.cuda import driver, ordered
from gemmery.cuda.geometry import LARGEST_SIDE, GeometryOf, refusal
from gemmery.errors import RefusedError
from gemmery.problem import Config, Problem

FirstArguments = tuple[int, int, int, int, int, int, int, int]
Buffer = tuple[bytearray, int, Any]  # an argument, the address of the driver's array of pointers to it, their owner

_POINTERS = struct.Struct("=5Q")  # the fields of Product in product.cuh that change from call to call
_SCALARS_AT = struct.calcsize("=5Q11q4i")
_SCALARS = {_SCALARS_AT + 2 * size: struct.Struct(f"=2{letter}") for size, letter in ((4, "f"), (8, "d"))}
_buffers: dict[int, list[Buffer]] = {size: [] for size in _SCALARS}  # of finished calls, by the argument's length


def first_arguments(
    function: int, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int
) -> FirstArguments:
    """Return the first arguments of cuLaunchKernel.

    They are a plain tuple, because a named one takes 0.3 us to make and 0.1 us more to unpack at each launch.
    """
    return (function, *grid, *block, shared)


class Ready:
    """The launches of a rung with their argument except pointers and scalars; many threads may call it at once."""

    def __init__(
        self,
        launches: list[FirstArguments],
        argument: bytes,
        ordinal: int,
        workspace: int,
        transposed: bool,
        overlaps: tuple[bool, ...] = (),
    ) -> None:
        self.ordinal = ordinal
        self.workspace = workspace  # bytes
        self._launches = launches
        self._overlaps = overlaps if any(overlaps) else ()
        self._single = launches[0] if len(launches) == 1 and not self._overlaps else None  # no loop: 0.2 us less
        self._fixed = argument[_POINTERS.size :]
        self._transposed = transposed
        self._scalars = _SCALARS[len(argument)]
        self._free = _buffers[len(argument)]
        self._context = int(driver.context(ordinal))
        api = driver.api()
        self._launch, self._current = api.cuLaunchKernel, api.cuCtxGetCurrent
        self._early: list[tuple[Any, ...]] = []  # of finished calls: the driver's records of launches that overlap

    def __call__(
        self,
        a: int,
        b: int,
        c: int,
        stream: int,
        bias: int = 0,
        workspace: int = 0,
        scalars: tuple[float, float] | None = None,
    ) -> None:
        """Put the launches on a stream, with the addresses of the operands' first elements."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = _buffer(_POINTERS.size + len(self._fixed))
        memory = buffer[0]
        if self._transposed:
            a, b = b, a
        _POINTERS.pack_into(memory, 0, a, b, c, bias, workspace)
        memory[_POINTERS.size :] = self._fixed
        if scalars is not None:
            self._scalars.pack_into(memory, _SCALARS_AT, *scalars)
        if int(self._current()[1]) == self._context:
            self._run(stream, buffer[1])
        else:
            with driver.on(self.ordinal):
                self._run(stream, buffer[1])
        self._free.append(buffer)

    def _run(self, stream: int, parameters: int) -> None:
        launch = self._launch
        if self._single is not None:
            status = launch(*self._single, stream, parameters, 0)
            if status[0]:
                driver.check(status)
            return
        if self._overlaps:
            self._run_early(stream, parameters)
            return
        for arguments in self._launches:
            status = launch(*arguments, stream, parameters, 0)
            if status[0]:
                driver.check(status)

    def _run_early(self, stream: int, parameters: int) -> None:
        """Put launches on a stream some of which overlap with the previous ones."""
        try:
            early = self._early.pop()
        except IndexError:
            pairs = zip(self._launches, self._overlaps, strict=True)
            early = tuple(driver.early_launch(*launch[1:]) if overlaps else None for launch, overlaps in pairs)
        for launch, config in zip(self._launches, early, strict=True):
            if config is None:
                status = self._launch(*launch, stream, parameters, 0)
            else:
                config.hStream = stream
                status = driver.api().cuLaunchKernelEx(config, launch[0], parameters, 0)
            if status[0]:
                driver.check(status)
        self._early.append(early)


def _buffer(size: int) -> Buffer:
    """Return memory for an argument of this many bytes, used by one call at a time."""
    memory = bytearray(size)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof((ctypes.c_char * size).from_buffer(memory)))
    return memory, ctypes.addressof(pointers), pointers


class CudaLaunch:
    """The launches of one rung for one problem; calling it puts them on C's stream and returns at once.

    If C is column-major, the kernels compute C' = B' A', so that they write rows.
    """

    def __init__(self, problem: Problem, config: Config, geometry: GeometryOf) -> None:
        self.problem = problem
        self.geometry = geometry(problem.by_rows(), config)
        card = driver.find(problem.device)
        reason = too_large(problem) or refusal(self.geometry, card)
        if reason:
            raise RefusedError(reason)
        self._ordinal = card.ordinal
        self._launches = [
            first_arguments(
                int(driver.function(launch.source, launch.kernel, self._ordinal, launch.shared)),
                launch.grid,
                launch.block,
                launch.shared,
            )
            for launch in self.geometry.launches
        ]

    def ready(self, a: View, b: View, c: View, bias: View | None = None) -> Ready:
        """Return the launches for operands of these shapes and strides, at any addresses."""
        argument = product_argument(self.problem, a, b, c, bias)
        overlaps = tuple(launch.overlaps for launch in self.geometry.launches)
        transposed = self.problem.c_layout == "col"
        return Ready(self._launches, argument, self._ordinal, self.geometry.workspace, transposed, overlaps)

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
        run, stream = self.ready(a, b, c, bias), c.stream
        scalars = alpha.real, beta.real
        scratch = ordered.allocate(run.workspace, stream, self._ordinal) if run.workspace else 0
        try:
            run(a.pointer, b.pointer, c.pointer, stream, bias.pointer if bias is not None else 0, scratch, scalars)
        finally:
            if scratch:
                ordered.free(scratch, stream, self._ordinal)


def product_argument(
    problem: Problem,
    a: View,
    b: View,
    c: View,
    bias: View | None = None,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    workspace: int = 0,
) -> bytes:
    """Return the kernels' argument, the Product of product.cuh; of C' = B' A' where C is column-major."""
    transposed, problem = problem.c_layout == "col", problem.by_rows()
    x, y, z = (_strides(view) for view in (a, b, c))
    step = bias.strides[0] // dtypes.get(bias.dtype).size if bias is not None else 0
    if transposed:
        a, b = b, a
        x, y, z = (y[0], y[2], y[1]), (x[0], x[2], x[1]), (z[0], z[2], z[1])
    along = (step, 0) if transposed else (0, step)
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


def too_large(problem: Problem) -> str:
    """Return why kernels cannot index this problem's sides; "" if they can."""
    side = max(problem.m, problem.n, problem.k, problem.batch)
    return f"a side of {side}: kernels count to {LARGEST_SIDE:,}; cut the product" if side > LARGEST_SIDE else ""


def _strides(view: View) -> tuple[int, ...]:
    size = dtypes.get(view.dtype).size
    return tuple(step // size for step in view.strides)
