"""Operands of a product in a GPU's memory, and the timing protocol there.

There are so many copies of operands that no call finds its own in the L2 cache. Short calls are captured in a graph and
replayed between two events. A sampler made here goes into `gemmery.bench.timing.compare` like any other: contestants
take turns, and ratios are computed pair by pair. The events enclose only the device's work: no launch waits for Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemmery import arrays, dtypes
from gemmery.arrays import View
from gemmery.bench import timing
from gemmery.bench import work as works
from gemmery.bench.timing import Sample
from gemmery.bench.work import Work
from gemmery.cuda import driver
from gemmery.cuda.driver import Event, Graph, Memory, Stream
from gemmery.errors import RefusedError
from gemmery.problem import Problem

L2_TIMES = 3  # sets of operands together fill this many L2 caches
MOST_SETS = 1024  # sets below 180 KB stay in an L2 of 60 MB: a graph of more calls would be slow to build
ALIGNMENT = 256  # alignment of operands in bytes, that of the driver's allocations
WARM_CALLS = 4
QUEUED_NS = 500_000  # a call this long hides the launch of the next (up to 0.3 ms on the host), and needs no graph
GRAPH_NS = 1_000_000  # a graph this long hides the 2 us between two launches of it
MOST_CALLS = 1024  # calls in a graph

Put = Callable[[int], None]
"""Launches one product on the stream; its argument is the index of the set of operands."""


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


def replays(
    put: Put, stream: Stream, sets: int, look: Callable[[], None] = lambda: None, captured: bool = True
) -> Sample:
    """Return a sampler of the product that `put` launches on `stream`; calls take `sets` sets of operands in turn.

    `look` is called while the device works. A `put` that cannot be `captured` in a graph is launched call by call; the
    time of short calls is then that of the host.

    >>> sample = replays(lambda index: kernel(*operands[index]), stream, len(operands))  # doctest: +SKIP
    >>> sample(1000, 1)  # doctest: +SKIP
    2150000

    Raises what `put` raises, and DeviceError if a kernel fails.
    """
    queued = _Queued(put, stream, sets, look)
    queued.sample(1, 0)  # loads the kernel, and lets a library choose one
    if queued.sample(1, 0) > timing.LONG_CALL_NS or not captured:
        return queued.sample
    each = queued.sample(WARM_CALLS, 1) / WARM_CALLS
    if each > QUEUED_NS:  # perhaps only on the host, where the first call with each set of operands takes longer
        each = queued.sample(WARM_CALLS, sets) / WARM_CALLS
    if each > QUEUED_NS:
        return queued.sample
    calls = sets * min(math.ceil(GRAPH_NS / each / sets), max(1, MOST_CALLS // sets))
    replayed = _Replayed(put, stream, sets, calls, look)
    shorter = GRAPH_NS / max(replayed.sample(calls, 1), 1)
    if shorter > 1.5 and 2 * calls <= MOST_CALLS:  # a call takes less time in a graph than as a launch
        calls = sets * min(math.ceil(calls * shorter / sets), MOST_CALLS // sets)
        replayed = _Replayed(put, stream, sets, calls, look)
    return replayed.sample


class _Queued:
    """Launch calls one by one."""

    def __init__(self, put: Put, stream: Stream, sets: int, look: Callable[[], None]) -> None:
        self._put, self._stream, self._sets, self._look = put, stream, sets, look
        self._start, self._end = Event(stream.ordinal), Event(stream.ordinal)
        self._next = 0

    def sample(self, inner: int, warm: int) -> int:
        """Return the nanoseconds of `inner` calls; warm-up calls still run while the first of them is launched."""
        self._several(warm)
        self._start.record(self._stream.handle)
        self._several(inner)
        self._end.record(self._stream.handle)
        self._look()
        return round(self._end.since(self._start) * 1e9)

    def _several(self, count: int) -> None:
        for _ in range(count):
            self._put(self._next)
            self._next = (self._next + 1) % self._sets


class _Replayed:
    """A graph of `calls` calls, a multiple of the sets, so that a repeated graph does not find its operands in L2."""

    def __init__(self, put: Put, stream: Stream, sets: int, calls: int, look: Callable[[], None]) -> None:
        self._put = put  # it owns the operands, of which the graph has only the addresses
        self._stream, self._calls, self._look = stream, calls, look
        self._start, self._end = Event(stream.ordinal), Event(stream.ordinal)
        self._graph = Graph(stream)
        with driver.on(stream.ordinal), self._graph:
            for index in range(calls):
                put(index % sets)

    def sample(self, inner: int, warm: int) -> int:
        """Return the nanoseconds of `inner` calls, measured on whole graphs, at least one."""
        launches = max(1, round(inner / self._calls))
        with driver.on(self._stream.ordinal):
            if warm:
                self._graph.launch()
            self._start.record(self._stream.handle)
            for _ in range(launches):
                self._graph.launch()
            self._end.record(self._stream.handle)
            self._look()
        return round(self._end.since(self._start) * 1e9 * inner / (launches * self._calls))
