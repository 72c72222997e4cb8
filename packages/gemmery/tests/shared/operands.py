"""Operands for kernels: random numbers in any layout, between guards that detect stray accesses."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gemmery import arrange, dtypes, verify
from gemmery.arrays import View
from gemmery.cpu import target
from gemmery.cpu.ukernel import arm_step
from gemmery.problem import Problem

NARROW = ("e4m3", "e5m2", "int8")  # element types whose products have another type
GUARD = 192  # bytes before and after, all ones: NaN in every floating type, so that a stray read shows in the result
LAYOUTS = ("C", "F", "padded", "padded F", "strided", "reversed", "reversed F", "misaligned", "one row")
STORED = ("C", "F", "padded", "padded F", "rows reversed", "misaligned")  # layouts of C: its elements must be adjacent


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bf16" else dtypes.get(name).numpy)


def random(shape, name: str, seed: int) -> np.ndarray:
    """Normal floats, and integers of the whole range, so that wrapping happens."""
    draw = np.random.default_rng([seed, *shape])
    dtype = numpy_dtype(name)
    if dtypes.get(name).kind in "iu":
        info = np.iinfo(dtype)
        return draw.integers(info.min, info.max, shape, dtype, endpoint=True)
    value = draw.standard_normal(shape)
    return (value + 1j * draw.standard_normal(shape) if dtypes.get(name).kind == "c" else value).astype(dtype)


@dataclass
class Placed:
    """A batch of matrices inside guarded memory."""

    array: np.ndarray  # (batch, rows, columns), a view into memory
    memory: np.ndarray
    before: np.ndarray
    name: str

    @property
    def view(self) -> View:
        return View(self.array.ctypes.data, self.array.shape, self.array.strides, self.name, owner=self.array)

    def layout(self) -> str:
        _, rows, columns = self.array.shape
        return arrange.layout(rows, columns, *self.array.strides[1:], dtypes.get(self.name).size)

    def untouched(self) -> bool:
        """Return True if no byte has changed."""
        return np.array_equal(self.memory, self.before)

    def untouched_around(self) -> bool:
        """Return True if no byte outside the elements has changed."""
        result = self.array.copy()
        self.array[...] = 0
        after = self.memory.copy()
        self.memory[...] = self.before
        self.array[...] = 0
        same = np.array_equal(self.memory, after)
        self.array[...] = result
        return same


def place(values: np.ndarray, name: str, layout: str = "C", one_for_all: bool = False) -> Placed:
    """Return `values` (batch, rows, columns) in memory of that layout; `one_for_all` repeats the first (stride 0)."""
    batch, rows, columns = values.shape
    size = values.dtype.itemsize
    strides = {
        "C": (columns * size, size),
        "F": (size, rows * size),
        "padded": ((columns + 3) * size, size),
        "padded F": (size, (rows + 5) * size),
        "strided": ((2 * columns + 1) * size, 2 * size),
        "strided F": (2 * size, (2 * rows + 1) * size),
        "thirds": (3 * columns * size, 3 * size),
        "reversed": (-columns * size, -size),
        "reversed F": (-size, -rows * size),
        "rows reversed": (-(columns + 1) * size, size),
        "misaligned": (columns * size, size),
        "one row": (0, size),
    }[layout]
    spans = [abs(stride) * max(0, length - 1) for stride, length in zip(strides, (rows, columns), strict=True)]
    each = -(-(sum(spans) + size) // size) * size + 2 * size
    memory = np.full(2 * GUARD + max(1, batch) * each + 1, 0xFF, np.uint8)
    start = GUARD + (1 if layout == "misaligned" else -memory.ctypes.data % 64)
    first = start + sum(span for span, stride in zip(spans, strides, strict=True) if stride < 0)
    steps = (0 if one_for_all else each, *strides)
    array = np.ndarray(values.shape, values.dtype, memory, first, steps)
    array[...] = values[:, :1] if layout == "one row" else values[:1] if one_for_all else values
    return Placed(array, memory, memory.copy(), name)


def problem(a: Placed, b: Placed, c: Placed, epilogue: str = "", scaled: bool = False) -> Problem:
    batch, m, n = c.array.shape
    layouts = (a.layout(), b.layout(), c.layout())
    return Problem(m, n, a.array.shape[2], a.name, c.name, batch, *layouts, epilogue, scaled)


def adds_bf16_in_pairs() -> bool:
    """Return True if this CPU's products of bfloat16 are dot products of two elements, and not of widened ones."""
    host = target.host()
    return host.has_bf16_dot or host.has_tiles or arm_step(host, "bf16") is not None


def agrees(result, a, b, **options):
    """`result` is the product of a and b within the bound, whatever the number of dimensions of each."""
    a2 = a[None, :] if a.ndim == 1 else a
    b2 = b[:, None] if b.ndim == 1 else b
    result = np.asarray(result)
    if a.ndim == 1:
        result = np.expand_dims(result, -1 if b.ndim == 1 else -2)
    if b.ndim == 1:
        result = np.expand_dims(result, -1)
    found = verify.check(result, a2, b2, **options)
    assert found.error_over_bound <= 1, found
    return True
