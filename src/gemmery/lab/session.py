"""One run of a command: its records and progress, and on the CPU the rivals it started and the limits it measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

from gemmery.bench import libraries, load, machine, record, roofline
from gemmery.bench.record import Machine, Measurement, Run
from gemmery.bench.rival_process import RivalProcess
from gemmery.errors import RefusedError
from gemmery.lab.event import Event, OnEvent


class Session:
    """The records of one run on `machine`; a context manager that ends what the run started.

    `store` is a folder: each measurement is appended to the machine's file at once, so that an interrupted run keeps
    its records.
    """

    def __init__(self, total: int, on_event: OnEvent, machine: Machine, store: Path | None = None) -> None:
        self._machine = machine
        self._started = record.now()
        self._done, self._total, self._on_event = 0, total, on_event
        self._store = store
        self._records: list[Measurement] = []
        self._meter = load.Meter(self.children)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing: this run started nothing."""

    @property
    def run(self) -> Run:
        """The records so far."""
        return Run(self._machine, self._started, tuple(self._records))

    def children(self) -> tuple[int, ...]:
        """Return the IDs of the processes that it started, which do not count as load."""
        return ()

    def begin(self, what: str) -> None:
        """Tell the listener what begins."""
        self._on_event(Event(what, self._done, self._total))

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
            self._on_event(Event(m.kernel, self._done, self._total, m, self.run))


class CpuSession(Session):
    """One run on this machine's CPU; a context manager that ends the rivals' processes."""

    def __init__(self, total: int, on_event: OnEvent, store: Path | None = None) -> None:
        self._processes: dict[tuple[str, int], RivalProcess] = {}
        super().__init__(total, on_event, machine.fingerprint(), store)
        self._refusals: dict[tuple[str, int], str] = {}
        self._peaks: dict[tuple[str, int], float] = {}
        self._bandwidths: dict[int, float] = {}

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()

    def children(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes.values())

    def rival(self, name: str, threads: int) -> RivalProcess:
        """Return the rival's process with that many threads; the first call starts it.

        Raises RefusedError if it cannot run here, or would run the same kernels as NumPy by default.
        """
        key = name, threads
        if key in self._refusals:
            raise RefusedError(self._refusals[key])
        if key not in self._processes:
            try:
                self._processes[key] = self._start(name, threads)
            except RefusedError as error:
                self._refusals[key] = str(error)
                raise
        return self._processes[key]

    def _start(self, name: str, threads: int) -> RivalProcess:
        process = RivalProcess(libraries.find(name), threads)
        if name == "numpy_avx512" and process.runs == self.rival("numpy", threads).runs:
            process.close()
            raise RefusedError("rival numpy_avx512: NumPy runs these kernels by default")
        return process

    def limits(self, dtype: str, threads: int) -> tuple[float, float]:
        """Return (peak in GFLOP/s, read bandwidth in GB/s) on `threads` cores; the first call measures them."""
        unit = roofline.unit(dtype)
        if (unit, threads) not in self._peaks:
            self.begin(f"peak of {unit}, {threads} thread{'s' * (threads != 1)}")
            self._peaks[unit, threads] = roofline.peak(unit, threads)
        if threads not in self._bandwidths:
            self.begin(f"memory bandwidth, {threads} thread{'s' * (threads != 1)}")
            self._bandwidths[threads] = roofline.bandwidth(threads).read
        return self._peaks[unit, threads], self._bandwidths[threads]
