"""The time of launches on a GPU: short calls are captured in a graph and replayed between two events.

The events enclose only the device's work: no launch waits for Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gemmery.cuda import driver
from gemmery.cuda.driver import Event, Graph, Stream

WARM_CALLS = 4
QUEUED_NS = 500_000  # a call this long hides the launch of the next (up to 0.3 ms on the host), and needs no graph
GRAPH_NS = 1_000_000  # a graph this long hides the 2 us between two launches of it
MOST_CALLS = 1024  # calls in a graph
LONG_NS = 50_000_000  # a call this long is not launched a second time before it is timed

Put = Callable[[int], None]
"""Launches one product on the stream; its argument is the index of the set of operands."""


def replays(
    put: Put, stream: Stream, sets: int, look: Callable[[], None] = lambda: None, captured: bool = True
) -> Callable[[int, int], int]:
    """Return a sampler of the product that `put` launches on `stream`; calls take `sets` sets of operands in turn.

    It goes into `gemmery.bench.timing.compare` like any other. `look` is called while the device works. A `put` that
    cannot be `captured` in a graph is launched call by call; the time of short calls is then that of the host.

    >>> sample = replays(lambda index: kernel(*operands[index]), stream, len(operands))  # doctest: +SKIP
    >>> sample(1000, 1)  # doctest: +SKIP
    2150000

    Raises what `put` raises, and DeviceError if a kernel fails.
    """
    queued = _Queued(put, stream, sets, look)
    queued.sample(1, 0)  # loads the kernel, and lets a library choose one
    if queued.sample(1, 0) > LONG_NS or not captured:
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
