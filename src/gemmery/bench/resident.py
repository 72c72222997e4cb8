"""Operands of a product in a GPU's memory: so many copies that no call finds its own in the L2 cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.arrays import View
from gemmery.bench import work as works
from gemmery.bench.work import Work
from gemmery.cuda import driver
from gemmery.cuda.driver import Memory, Stream
from gemmery.errors import RefusedError
from gemmery.problem import Problem

L2_TIMES = 3  # sets of operands together fill this many L2 caches
MOST_SETS = 1024  # sets below 180 KB stay in an L2 of 60 MB: a graph of more calls would be slow to build
ALIGNMENT = 256  # alignment of operands in bytes, that of the driver's allocations


@dataclass(frozen=True)
class DeviceOperands:
    """A, B and C of one product, each of shape (batch, rows, columns)."""

    a: View
    b: View
    c: View


class Resident:
    """A Work on a device: `sets` of equal operands in separate memory, and `host`, the arrays they are copies of.

    >>> resident = Resident(Work(512, 512, 512, "f32", "f32"), Stream())  # doctest: +SKIP
    >>> len(resident.sets)  # doctest: +SKIP
    60

    (3 MiB each, against three times an L2 of 60 MiB.)

    Raises RefusedError if the device does not have enough memory.
    """

    def __init__(self, work: Work, stream: Stream) -> None:
        device = driver.device(stream.ordinal)
        self.work, self.stream = work, stream
        self.host = tuple(
            x if x.ndim == 3 else x[None] for x in works.operands(replace(work, call="out", vector=False))
        )
        stored = [_stored(x) for x in self.host]
        sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in stored]
        if work.b_layout == works.OF_A:
            sizes[1] = 0
        each = sum(sizes)
        count = min(max(1, -(-L2_TIMES * device.l2 // each)), MOST_SETS)
        room = driver.room(stream.ordinal)
        if each > room:
            raise RefusedError(f"{work} takes {each:,} bytes on the device, which has {room:,} free: make it smaller")
        self.scales = tuple(self._small(x) for x in works.factors(work)) if work.scales else ()
        self.offsets = self._small(works.offsets(work)) if work.groups else None
        self._memory = Memory(min(count, max(1, room // each)) * each, stream.ordinal)
        starts = [0, sizes[0] if sizes[1] else 0, sizes[0] + sizes[1]]
        for start, x in zip(starts, stored, strict=True):
            self._memory.write(x, start)
        for index in range(1, self._memory.size // each):
            self._memory.copy(0, index * each, each)
        driver.synchronize(stream.ordinal)  # the copies run on another stream
        self.sets = tuple(
            DeviceOperands(*(self._view(x, place, offset) for x, place in zip(self.host, starts, strict=True)))
            for offset in range(0, self._memory.size, each)
        )

    @property
    def problem(self) -> Problem:
        """The problem that a rung is built for."""
        views = (self.sets[0].a, self.sets[0].b, self.sets[0].c)
        a, b, c = (alignment(view) for view in views)
        return self.work.problem._replace(device=f"cuda:{self.stream.ordinal}", alignments=(a, b, c))

    @property
    def bytes(self) -> int:
        """Bytes of all sets together."""
        return self._memory.size

    def poison(self) -> None:
        """Fill the C of the first set with what no product has: NaN, or a sum of integers that is out of reach."""
        c = self.sets[0].c
        size = self.host[2].nbytes
        self._memory.fill(poison(self.host[2].dtype), c.pointer - self._memory.pointer, size)
        driver.synchronize(self.stream.ordinal)

    def result(self) -> np.ndarray[Any, Any]:
        """The C of the first set."""
        c = np.empty(self.host[2].shape, self.host[2].dtype)
        self._memory.read(c, self.sets[0].c.pointer - self._memory.pointer)
        return c

    def vector(self, length: int) -> View:
        """Return random float32 numbers on the device."""
        return self._small(np.random.default_rng(self.work.seed).standard_normal(length, np.float32))

    def _small(self, x: np.ndarray[Any, Any]) -> View:
        """Copy an array that all sets share to the device; its strides stay."""
        memory, device = Memory(x.nbytes, self.stream.ordinal), f"cuda:{self.stream.ordinal}"
        memory.write(x.T if x.flags.f_contiguous else x)
        name = dtypes.get(x.dtype.name).name
        return View(memory.pointer, x.shape, x.strides, name, device, self.stream.handle, True, memory)

    def _view(self, x: np.ndarray[Any, Any], place: int, offset: int) -> View:
        start = self._memory.pointer + offset + place + x.ctypes.data - _stored(x).ctypes.data
        name = dtypes.get(x.dtype.name).name
        device = f"cuda:{self.stream.ordinal}"
        return View(start, x.shape, x.strides, name, device, self.stream.handle, True, self._memory)


def poison(dtype: np.dtype[Any]) -> int:
    """Return the byte that C is filled with before a check: all bits set are a NaN in every floating-point type."""
    return 0x80 if dtype.kind in "iu" else 0xFF


def alignment(view: View) -> int:
    """Return the largest power of two, at most 16, that divides the pointer and all strides except the unit stride."""
    size, walked = dtypes.get(view.dtype).size, zip(view.strides, view.shape, strict=True)
    return arrays.alignment(view.pointer, tuple(step for step, length in walked if length > 1 and abs(step) != size))


def _stored(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the whole memory that `x` is a view of."""
    return x if x.base is None else x.base


class Shared:
    """A View with `__cuda_array_interface__`, which all GPU libraries read; bfloat16 and float8, which it lacks, as
    integers.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        row = dtypes.get(view.dtype)
        stored = row.numpy if row.stored == row.numpy else f"int{8 * row.size}"
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "strides": view.strides,
            "typestr": np.dtype(stored).str,
            "data": (view.pointer, False),
            "stream": view.stream,
            "version": 3,
        }
