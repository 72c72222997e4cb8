"""The CPU of this machine as a backend: operands are NumPy's, and each rival runs in its own process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import gemmery
from gemmery import arrays, dispatch, dtypes, limits, tiers
from gemmery.cpu import entry
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import RefusedError
from gemmery.ladder.rung import Rung
from gemmery.problem import Config
from gemmery_lab import asked, measurements
from gemmery_lab.measure import libraries, record, timing
from gemmery_lab.measure.libraries import RivalProcess
from gemmery_lab.measure.record import Measurement
from gemmery_lab.measure.timing import Sample
from gemmery_lab.measure.work import Work, operands
from gemmery_lab.measurements import Backend, Begin, MachineLimits, Runnable, square

BATCHED = 16  # side of the products of a batch
SHARE = 2.0  # seconds for one comparison: 60 rounds of two contestants up to 10 ms each
THREADED_SHARE = 4.0  # the same if each turn begins with 0.25 s of rest


class CpuStage:
    """The operands of a work as NumPy arrays; C is None where the call allocates it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.arrays = operands(work)

    def rung(self, rung: Rung, config: Config, threads: int) -> Runnable:
        if reason := rung.refusal(self.work.problem):
            raise RefusedError(reason)
        kernel = rung.build(self.work.problem, config)
        a, b, c = (arrays.view(x if x.ndim == 3 else x[None]) for x in self.arrays)
        run = functools.partial(kernel, a, b, c, threads=threads)
        return Runnable(lambda: timing.calls(run), functools.partial(self._error, run, rung))

    def product(self, config: Config, threads: int) -> Runnable:
        """Take `gemmery.matmul`, with `dtype=` only if the result is wider; the number of threads is in force."""
        a, b, c = self.arrays
        problem, options = self.work.problem, dict[str, Any](config)
        if self.work.out != self.work.dtype:
            options["dtype"] = dtypes.get(self.work.out).numpy
        if options.pop("packed", 0):
            b, problem = gemmery.pack(b, options.get("dtype")), problem._replace(b_layout="packed")
        special = dispatch.specialized(problem)
        rung = (special or dispatch.plan(problem)).rung

        def run() -> Any:
            return gemmery.matmul(a, b, out=c, **options)

        def sampler() -> Sample:
            for _ in range(entry.calls_until_often(problem.batch) if special else 0):
                run()
            tiers.wait()  # else the kernel for every shape would be timed, in part or always
            function = functools.partial(gemmery.matmul, **options) if options else gemmery.matmul  # compiled by now
            return timing.products(function, a, b, c)

        return Runnable(sampler, functools.partial(self._error, run, rung), rung.name)

    def rival(self, opponent: RivalProcess) -> Runnable:
        """Let a rival's process make the same operands."""
        note = opponent.prepare(self.work)

        def sample(inner: int, warm: int) -> int:
            opponent.prepare(self.work)  # the process has one product, by now perhaps that of another stage
            return opponent.sample(inner, warm)

        return Runnable(lambda: sample, note="; ".join(filter(None, (note, opponent.runs))))

    def _error(self, run: Callable[[], Any], rung: Rung) -> float:
        """Error over bound of one product, written over NaN (ones for integers) so that unwritten elements show."""
        a, b, c = self.arrays
        if c is not None:
            c.fill(np.nan if dtypes.get(self.work.out).kind in "fc" else 1)
        result = run()
        return measurements.error(result if c is None else c, a, b, rung.bound, rung.normwise)


class Cpu(Backend):
    """The backend of this machine's CPU. Its rivals' processes end with `close`."""

    device = "cpu"
    pilot = 128
    slow_parent = SHARE / 10

    def __init__(self) -> None:
        self.machine, self.ladder, self.rivals = record.cpu_machine(), asked.registry("cpu"), libraries.RIVALS
        self._processes: dict[tuple[str, int], RivalProcess] = {}
        self._refusals: dict[tuple[str, int], str] = {}
        self._peaks: dict[tuple[str, int], float] = {}
        self._bandwidths: dict[int, float] = {}

    def rival(self, name: str, threads: int) -> RivalProcess:
        """Return the rival's process with that many threads; the first call starts it.

        Raises RefusedError if it cannot run here, or would run the same kernels as NumPy by default.
        """
        key = name, threads
        if key in self._refusals:
            raise RefusedError(self._refusals[key])
        if key not in self._processes:
            try:
                process = RivalProcess(libraries.find(name), threads)
                if name == "numpy_avx512" and process.runs == self.rival("numpy", threads).runs:
                    process.close()
                    raise RefusedError("rival numpy_avx512: NumPy runs these kernels by default")
                self._processes[key] = process
            except RefusedError as error:
                self._refusals[key] = str(error)
                raise
        return self._processes[key]

    def ladder_rivals(self) -> Sequence[str]:
        return ("numpy",)

    def stage(self, work: Work) -> CpuStage:
        return CpuStage(work)

    def product_for(self, rung: Rung, n: int, like: Work) -> Work:
        """Return two squares; a row and a square for a rung that takes vectors, a square and two columns for one that
        takes few; as many small products as fill squares of side n for a rung that takes batches.
        """
        squares = square(like, n)
        many = Work(BATCHED, BATCHED, BATCHED, like.dtype, like.out, batch=max(1, n // BATCHED) ** 2)
        works = (squares, *(Work(*shape, like.dtype, like.out) for shape in ((1, n, n), (n, 2, n))), many)
        return next((work for work in works if not rung.refusal(work.problem)), squares)

    def share(self, threads: int) -> float:
        return THREADED_SHARE if threads > 1 else SHARE

    def replaces(self, samples: int, known: int, fastest: bool) -> bool:
        return samples > known

    def limits(self, record: Measurement, begin: Begin) -> MachineLimits:
        """Return the peak of the record's type and the read bandwidth, on its threads."""
        unit, threads = limits.unit(record.dtype), record.threads
        on_threads = f"{threads} thread{'s' * (threads != 1)}"
        if (unit, threads) not in self._peaks:
            begin(f"peak of {unit}, {on_threads}")
            self._peaks[unit, threads] = limits.peak(unit, threads)
        if threads not in self._bandwidths:
            begin(f"memory bandwidth, {on_threads}")
            self._bandwidths[threads] = limits.bandwidth(threads).read
        return MachineLimits(self._peaks[unit, threads], self._bandwidths[threads])

    def children(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes.values())

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


@contextmanager
def in_force(threads: int) -> Iterator[None]:
    """Set the number of threads, as `gemmery.set_num_threads`, within a `with` block; 0 leaves it."""
    before = cpu_threads.get()
    cpu_threads.set_(threads or before)
    try:
        yield
    finally:
        cpu_threads.set_(before)
