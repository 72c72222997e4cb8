"""One run of a command: its records and its progress."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from gemmery.bench import load, record, timing
from gemmery.bench.record import Measurement, Run
from gemmery.bench.timing import Comparison, Contestant, Ratio, Timing
from gemmery.lab import measurements
from gemmery.lab.backend import Backend
from gemmery.lab.event import OnEvent, RunEvent


class Session:
    """The records of one run on a backend; a context manager that ends what the run started.

    `store` is a folder: each measurement is appended to the machine's file at once, so that an interrupted run keeps
    its records.
    """

    def __init__(self, backend: Backend, total: int, on_event: OnEvent, store: Path | None = None) -> None:
        self.backend = backend
        self._machine = backend.machine
        self._started = record.now()
        self._done, self._total, self._on_event = 0, total, on_event
        self._store = store
        self._records: list[Measurement] = []
        self._meter = load.Meter(backend.children)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.close()

    @property
    def run(self) -> Run:
        """The records so far."""
        return Run(self._machine, self._started, tuple(self._records))

    def begin(self, what: str) -> None:
        """Tell the listener what begins."""
        self._on_event(RunEvent(what, self._done, self._total))

    def end(self, *measurements: Measurement) -> None:
        """End a step and record its results."""
        self._done += 1
        self.add(*measurements)

    def add(self, *measurements: Measurement) -> None:
        """Record results with the load since the last ones, store them, and tell the listener of each."""
        busy = self._meter.load()
        measurements = tuple(replace(m, load=busy) for m in measurements)
        self._records += measurements
        if self._store is not None:
            record.append(record.path(self._store, self._machine.name), Run(self._machine, self._started, measurements))
        for m in measurements:
            self._on_event(RunEvent(m.kernel, self._done, self._total, m, self.run))

    def compare(
        self, contestants: Sequence[Contestant], seconds: float, threads: int, rest: float = 0.0
    ) -> tuple[Comparison, int]:
        """Time contestants in turn; return the comparison and the device's clock meanwhile.

        There is a pause before each turn if they use several threads: idle workers of the last one may still spin. With
        a `rest` in seconds there is one too, and the order is drawn anew in each round.
        """
        self.backend.clock()
        pause, draw = (rest, random.Random(0)) if rest else (timing.IDLE_SECONDS if threads > 1 else 0.0, None)
        comparison = timing.compare(contestants, seconds, pause, draw=draw)
        return comparison, self.backend.clock()

    def timed(self, plain: Measurement, times: Timing, versus: Mapping[str, Ratio] | None = None) -> Measurement:
        """Return a record with its times, its ratios to others, and the limits of its kernel."""
        return measurements.timed(plain, times, versus, self.backend.limits(plain, self.begin))


def open_session(gpu: int | None, total: int, on_event: OnEvent, store: Path | None = None) -> Session:
    """Return a session on a GPU by its number, or on the CPU.

    Raises DeviceError if there is no such device.
    """
    if gpu is None:
        from gemmery.lab.on_cpu import Cpu

        return Session(Cpu(), total, on_event, store)
    from gemmery.lab.on_cuda import Cuda  # loads NVIDIA's bindings

    return Session(Cuda(gpu), total, on_event, store)
