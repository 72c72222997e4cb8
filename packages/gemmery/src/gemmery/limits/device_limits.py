"""Measured limits of a device: the peak of each arithmetic unit, and the bandwidth of its memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from gemmery import dtypes
from gemmery.cuda import driver
from gemmery.cuda.driver import Event, Graph, Memory, Stream
from gemmery.errors import ArgumentError
from gemmery.limits import Bandwidth

CUDA_CORES, TENSOR_CORES, WARPGROUPS = "CUDA cores", "mma.sync", "wgmma"
SAMPLES = 10
BLOCKS, THREADS = 4, 256  # blocks per multiprocessor: eight warps per scheduler hide all latency
STEPS = 20_000  # some milliseconds
CHAINS = 16  # sums of a thread on CUDA cores
PRODUCTS = 16  # sums of a warp on tensor cores
READ = 1 << 30  # bytes: far more than any L2
DEPTH = 4
WARM_CALLS = 4
QUEUED_NS = 500_000  # a call this long hides the launch of the next (up to 0.3 ms on the host), and needs no graph
GRAPH_NS = 1_000_000  # a graph this long hides the 2 us between two launches of it
MOST_CALLS = 1024  # calls in a graph
LONG_NS = 50_000_000  # a call this long is not launched a second time before it is timed

Put = Callable[[int], None]
"""Launches one product on the stream; its argument is the index of the set of operands."""


@dataclass(frozen=True)
class PeakLoop:
    """The kernel that keeps an arithmetic unit busy: `operations` of one thread in one of its steps."""

    source: str
    kernel: str
    operations: int
    needs: int = 75  # compute capability
    last: int = 999
    steps: int = STEPS

    def runs(self, capability: int) -> bool:
        """Return True if devices of this compute capability have the unit."""
        return self.needs <= capability <= self.last


UNITS = {
    **{
        (dtype, CUDA_CORES): PeakLoop("peak_fma.cu", f"peak_fma<{dtypes.get(dtype).cpp}, {CHAINS}>", 2 * CHAINS)
        for dtype in ("f32", "f64")
    },
    **{
        (dtype, TENSOR_CORES): PeakLoop(
            "peak_mma.cu", f"peak_mma<{name}, {PRODUCTS}>", 2 * 16 * 8 * k * PRODUCTS // 32, 80
        )
        for dtype, name, k in (("f16", "f16", 16), ("bf16", "bf16", 16), ("tf32", "tf32", 8), ("f64", "double", 4))
    },
    **{
        (dtype, WARPGROUPS): PeakLoop(
            "peak_wgmma.cu", f"peak_wgmma<{name}>", 2 * 128 * 256 * k // THREADS, 90, 90, 2000
        )
        for dtype, name, k in (
            *(("f16", "f16", 64), ("bf16", "bf16", 64), ("tf32", "tf32", 32)),
            *((name, dtypes.get(name).cpp, 128) for name in (*dtypes.TENSOR_FLOAT8, "int8")),
        )
    },
}


def unit(dtype: str, tensor: bool, capability: int, warpgroups: bool = False) -> tuple[str, str]:
    """Return the element type and the unit whose peak bounds products of `dtype` (or "tf32"), on tensor cores or not.

    CUDA cores widen float16 and bfloat16 to float32, and multiply integers no faster; tensor cores do not compute full
    float32. `warpgroups` tells that the kernel may use wgmma where the device has it.

    >>> unit("f16", tensor=False, capability=90), unit("f16", tensor=True, capability=90, warpgroups=True)
    (('f32', 'CUDA cores'), ('f16', 'wgmma'))
    """
    for name in ([WARPGROUPS] if warpgroups else []) + [TENSOR_CORES]:
        row = UNITS.get((dtype, name)) if tensor else None
        if row and row.runs(capability):
            return dtype, name
    return ("f64" if dtype.startswith(("f64", "complex128")) else "f32"), CUDA_CORES


def peak(dtype: str, of: str, stream: Stream) -> float:
    """Measure 10**9 operations per second of a unit of UNITS, in registers only: the best of several samples.

    Raises ArgumentError for an unknown unit.
    """
    if (dtype, of) not in UNITS:
        known = ", ".join(f"{name} on {unit}" for name, unit in UNITS)
        raise ArgumentError(f"peak of {dtype} on {of}: not known; known: {known}")
    row = UNITS[dtype, of]
    blocks = BLOCKS * driver.device(stream.ordinal).sms
    to = Memory(8 * blocks * THREADS, stream.ordinal)
    function = driver.function(row.source, row.kernel, stream.ordinal)
    arguments = (ctypes.c_void_p(to.pointer), ctypes.c_longlong(row.steps))
    seconds = _best(function, blocks, stream, arguments)
    return row.operations * row.steps * blocks * THREADS / seconds / 1e9


def bandwidth(stream: Stream) -> Bandwidth:
    """Return the bandwidth of the device's memory for reading and for copying an array (bytes read plus written)."""
    source, target = Memory(READ, stream.ordinal), Memory(READ, stream.ordinal)
    source.fill(0x3F)
    driver.synchronize(stream.ordinal)
    blocks = BLOCKS * driver.device(stream.ordinal).sms

    def seconds(copy: bool) -> float:
        kernel = f"bandwidth<{str(copy).lower()}, {DEPTH}>"
        function = driver.function("bandwidth.cu", kernel, stream.ordinal)
        pointers = ctypes.c_void_p(target.pointer), ctypes.c_void_p(source.pointer)
        return _best(function, blocks, stream, (*pointers, ctypes.c_longlong(READ // 16)))

    return Bandwidth(READ / seconds(False) / 1e9, 2 * READ / seconds(True) / 1e9)


def _best(function: Any, blocks: int, stream: Stream, arguments: tuple[Any, ...]) -> float:
    """Return the seconds of one launch, the best of the samples."""
    put = driver.launching(function, (blocks, 1, 1), (THREADS, 1, 1), stream.ordinal, *arguments)
    sample = replays(lambda _: put(stream.handle), stream, 1)
    return min(sample(2, 1) for _ in range(SAMPLES)) / 2e9


def replays(
    put: Put, stream: Stream, sets: int, look: Callable[[], None] = lambda: None, captured: bool = True
) -> Callable[[int, int], int]:
    """Return a sampler of the product that `put` launches on `stream`; calls take `sets` sets of operands in turn.

    It goes into `gemmery_lab.measure.timing.compare` like any other. Short calls are replayed as a graph between two
    events, which enclose only the device's work. `look` is called while the device works. A `put` that cannot be
    `captured` in a graph is launched call by call; the time of short calls is then that of the host.

    >>> sample = replays(lambda index: kernel(*operands[index]), stream, len(operands))  # doctest: +SKIP
    >>> sample(1000, 1)  # doctest: +SKIP
    2150000

    Raises what `put` raises, and DeviceError if a kernel fails.
    """
    turns = cycle(range(sets))

    def one_by_one(count: int) -> None:
        for index in islice(turns, count):
            put(index)

    def replayed(calls: int) -> Callable[[int, int], int]:
        """Put a multiple of the sets into a graph, so that a repeated one does not find its operands in L2."""
        graph = Graph(stream)
        with driver.on(stream.ordinal), graph:
            for index in range(calls):
                put(index % sets)

        def launch(count: int, owner: Put = put) -> None:  # of the operands: the graph has only their addresses
            for _ in range(count):
                graph.launch()

        return _sampler(launch, calls, stream, look)

    queued = _sampler(one_by_one, 1, stream, look)
    queued(1, 0)  # loads the kernel, and lets a library choose one
    if queued(1, 0) > LONG_NS or not captured:
        return queued
    each = queued(WARM_CALLS, 1) / WARM_CALLS
    if each > QUEUED_NS:  # perhaps only on the host, where the first call with each set of operands takes longer
        each = queued(WARM_CALLS, sets) / WARM_CALLS
    if each > QUEUED_NS:
        return queued
    calls = sets * min(math.ceil(GRAPH_NS / each / sets), max(1, MOST_CALLS // sets))
    sample = replayed(calls)
    shorter = GRAPH_NS / max(sample(calls, 1), 1)
    if shorter > 1.5 and 2 * calls <= MOST_CALLS:  # a call takes less time in a graph than as a launch
        sample = replayed(sets * min(math.ceil(calls * shorter / sets), MOST_CALLS // sets))
    return sample


def _sampler(
    several: Callable[[int], None], calls: int, stream: Stream, look: Callable[[], None]
) -> Callable[[int, int], int]:
    """Return what measures the nanoseconds of `inner` calls, of which each of `several` launches has so many.

    Warm-up calls still run while the first of the others is launched.
    """
    start, end = Event(stream.ordinal), Event(stream.ordinal)

    def sample(inner: int, warm: int) -> int:
        launches = max(1, round(inner / calls))
        with driver.on(stream.ordinal):
            several(-(-warm // calls))
            start.record(stream.handle)
            several(launches)
            end.record(stream.handle)
            look()
        return round(end.since(start) * 1e9 * inner / (launches * calls))

    return sample
