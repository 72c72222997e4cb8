"""Times of a GPU's kernels besides products: of calls on the host, preparation, chains, and on the emulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import threadpoolctl

from gemmery import dispatch
from gemmery.arrays import View
from gemmery.cuda import driver, halved, nvrtc
from gemmery.cuda.device import Device
from gemmery.cuda.driver import Event, Graph, Memory, Stream
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.nvrtc import Code, Program
from gemmery.errors import ArgumentError, GemmeryError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung
from gemmery.limits.device_limits import Put
from gemmery.problem import Config
from gemmery_emulator.kernels.programs import prepared_anew
from gemmery_lab import asked, measurements
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from gemmery_lab.experiments import CHAIN
from gemmery_lab.measure import cublas, timing, torch_operands
from gemmery_lab.measure.record import Measurement, OnEvent, Run, ignore
from gemmery_lab.measure.timing import Contestant, Sample
from gemmery_lab.measure.torch_operands import ALIGNMENT, alignment
from gemmery_lab.measure.work import Work, numpy_dtype, operands
from gemmery_lab.measurements import WRONG, Runnable
from gemmery_lab.on_cuda import NO_RIVAL, Cuda, CudaStage, build, compared, product
from gemmery_lab.on_emulator import emulated_rung
from gemmery_lab.session import PRODUCT, Session, Task, contest, entrant

HOST = f"{PRODUCT}, host"  # the time until the call returns, whatever the device does then
COMPILED = ("cold", "on disk", "in memory")
COMPILATIONS = 5  # of each kind; the median is reported


class HostStage(CudaStage):
    """The operands of a work, on which the time until a call returns is taken."""

    def product(self, config: Config, threads: int = 0) -> Runnable:
        return Runnable(lambda: _warm(torch_operands.own_calls(self.resident, product(self.resident.work))))

    def rival(self, opponent: cublas.Caller) -> Runnable:
        return Runnable(lambda: _warm(opponent.calls(self.resident)), note=opponent.runs)


def _warm(sample: Sample) -> Sample:
    """Run one call, which compiles and lets a library choose its kernel."""
    sample(1, 0)
    return sample


def call(session: Session, task: Task) -> list[Measurement]:
    """Time the product and each rival until the call returns, without waiting for the device.

    The product must be small enough for the device to keep up.
    """
    stage = HostStage(cast(Cuda, session.backend), task.work)
    rows = contest(session, replace(task, labels=()), stage, limits=False)
    return [replace(m, kernel=HOST) if m.kernel == PRODUCT else m for m in rows]


def compilations(session: Session, task: Task) -> list[Measurement]:
    """Time until a rung's kernel can be launched: compiled, read from the cache on disk, and found in memory."""
    resident, rows = cast(Cuda, session.backend).resident(task.work), []
    for label in task.labels:
        contender = entrant(label, session.backend.ladder)
        blank = replace(session.backend.blank(task.suite, label, task.work, 0), case="", flops=0, bytes=0)
        rung = contender.rung
        try:
            if rung is None or rung.geometry is None:
                raise RefusedError("it is not one kernel: name a rung")
            config = {**rung.default, **contender.config}
            build(rung, config, resident)
            geometry = rung.geometry(resident.problem, config)
        except GemmeryError as refused:
            rows.append(replace(blank, refused=str(refused)))
            continue
        loaders = zip(COMPILED, _loaders(geometry, resident.stream.ordinal), strict=True)
        seconds = {case: {turn: _seconds(load) for turn in range(COMPILATIONS)} for case, load in loaders}
        timings = timing.tally(seconds).timings
        rows += [measurements.timed(replace(blank, case=case), timings[case]) for case in COMPILED]
    return rows


def _loaders(geometry: Geometry, ordinal: int) -> tuple[Callable[[], object], ...]:
    """Functions that prepare a kernel in each of the ways of COMPILED."""
    arch = driver.device(ordinal).arch
    return (
        lambda: _load(nvrtc.compiled(geometry.source, geometry.kernel, arch), ordinal),
        lambda: _load(nvrtc.code(geometry.source, geometry.kernel, arch), ordinal),
        lambda: driver.function(geometry.source, geometry.kernel, ordinal, geometry.shared),
    )


def _load(image: Program | Code, ordinal: int) -> None:
    """Load machine code as `driver.function` does, and unload it."""
    api = driver.api()
    with driver.on(ordinal):
        module = driver.check(api.cuModuleLoadData(image.cubin))
        driver.check(api.cuModuleGetFunction(module, image.entry.encode()))
        driver.check(api.cuModuleUnload(module))


CHAIN_RIVAL = "cublas"
SHARE_OF_A = 1 / 128  # A's share of the sum's variance: a step changes the size of R by no more than that


def chain(
    sizes: Sequence[int] = (2048, 4096),
    repeats: int = 10,
    dtype: str = "f32",
    device: str = "cuda",
    seconds: float = 1.0,
    store: Path | None = None,
    on_event: OnEvent = ignore,
) -> Run:
    """Time `repeats` steps of R = A (A + B) on squares of each size, with A and R swapped after each.

    A record's time is that of one step, a sum and a product. All data stay on the device; each chain begins with the
    same A. `seconds` is the time for one size, shared by all contestants; `store` is as in `bench`.

    >>> run = chain([2048], repeats=10)  # doctest: +SKIP

    Raises ArgumentError for a size or a number of steps below 1 and for the CPU; DeviceError if there is no GPU.
    """
    gpu = asked.ordinal(device)
    if gpu is None:
        raise ArgumentError("workload chain runs on a GPU: the device must be cuda, or cuda:N")
    for what, number in (*(("size", n) for n in sizes), ("repeats", repeats)):
        if number < 1:
            raise ArgumentError(f"workload chain: {what} {number}: it must be a whole number >= 1")
    dtype = asked.spelled(dtype)
    if dtype not in ("f64", "f32", "f16", "bf16"):
        raise ArgumentError(f"workload chain: dtype {dtype!r}: it runs in f64, f32, f16 and bf16")
    cuda = Cuda(gpu)
    session = Session(cuda, len(sizes), on_event, store)
    for n in sizes:
        work = Work(n, n, n, dtype, dtype, name=f"chain of {repeats}")
        session.begin(f"{CHAIN.name}: {work}")
        session.end(*_measured(session, cuda, work, repeats, seconds))
    return session.run


def _measured(session: Session, cuda: Cuda, work: Work, repeats: int, seconds: float) -> list[Measurement]:
    operands = ChainOperands(work, cuda.stream)
    put, rung = own(operands, cuda.device, work)
    error = operands.error(put, rung.bound_of(work.dtype, work.precision))
    cost: dict[str, Any] = {"flops": work.problem.flops + work.n**2, "bytes": 2 * work.problem.bytes}
    plain = cuda.blank(CHAIN.suite, PRODUCT, work)
    rows = {PRODUCT: replace(plain, note=rung.name, error=error, checked=True, **cost)}
    contestants = [Contestant(PRODUCT, replayed(operands, put, repeats))]
    rival = cublas.find(CHAIN_RIVAL)
    if rival.missing():
        rows[CHAIN_RIVAL] = replace(plain, kernel=CHAIN_RIVAL, refused=NO_RIVAL)
    else:
        theirs = replayed(operands, torch_operands.torch_chain(operands.views), repeats)
        contestants.append(Contestant(CHAIN_RIVAL, theirs))
        rows[CHAIN_RIVAL] = replace(plain, kernel=CHAIN_RIVAL, note=f"{rival.runs}, torch.add and torch.mm", **cost)
    comparison = timing.compare(contestants, seconds)
    for name, times in comparison.timings.items():
        rows[name] = session.timed(rows[name], times, comparison.versus if name == PRODUCT else None)
    return list(rows.values())


class ChainOperands:
    """A, B, A + B and R on a device, and the initial A of a chain.

    Standard normal numbers would square R's size in each step; a small A and a variance of B just below 1 / n keep it.
    """

    def __init__(self, work: Work, stream: Stream) -> None:
        n, self.stream = work.n, stream
        draw = np.random.default_rng(work.seed)
        scales = np.sqrt(SHARE_OF_A / n), np.sqrt((1 - SHARE_OF_A) / n)
        precise = np.float64 if work.dtype == "f64" else np.float32
        drawn = (draw.standard_normal((1, n, n), precise) * precise(scale) for scale in scales)
        self.a, self.b = (x.astype(numpy_dtype(work.dtype)) for x in drawn)
        self._size = -(-self.a.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory = Memory(5 * self._size, stream.ordinal)
        self._memory.write(self.a, 4 * self._size)
        self._memory.write(self.b, self._size)
        driver.synchronize(stream.ordinal)
        layout = self.a.shape, self.a.strides, work.dtype, f"cuda:{stream.ordinal}", stream.handle, True, self._memory
        self.views = tuple(View(self._memory.pointer + index * self._size, *layout) for index in range(4))

    def begin(self) -> None:
        """Restore the initial A, on the stream."""
        with driver.on(self.stream.ordinal):
            first = self._memory.pointer + 4 * self._size
            driver.check(driver.api().cuMemcpyDtoDAsync(self._memory.pointer, first, self._size, self.stream.handle))

    def error(self, put: Put, bound: Callable[[int], float]) -> float:
        """Return the error over bound of the first step; WRONG unless the sum is exact to the bit."""
        self._memory.fill(0xFF, 2 * self._size, 2 * self._size)
        driver.synchronize(self.stream.ordinal)
        self.begin()
        put(0)
        self.stream.synchronize()
        total, r = (np.empty(self.a.shape, self.a.dtype) for _ in range(2))
        self._memory.read(total, 2 * self._size)
        self._memory.read(r, 3 * self._size)
        if not np.array_equal(total, self.a + self.b):
            return WRONG
        return compared(r, self.a, total, bound)


def own(operands: ChainOperands, device: str, work: Work) -> tuple[Put, Rung]:
    """Return gemmery's sum and product as steps of the chain, and the rung that multiplies."""
    aligned = alignment(operands.views[0])  # all four have the same layout
    plan = dispatch.plan(work.problem._replace(device=device, alignments=(aligned, aligned, aligned)))
    a, b, total, r = operands.views
    sums = halved.addition(a, b, total), halved.addition(r, b, total)

    def put(step: int) -> None:
        x, y = (r, a) if step % 2 else (a, r)
        sums[step % 2](x, b, total)
        plan.kernel(x, total, y)

    return put, plan.rung


def replayed(operands: ChainOperands, put: Put, repeats: int) -> Sample:
    """Return a sampler of chains of `repeats` steps, each from the same A; a call is one step."""
    stream, graph = operands.stream, Graph(operands.stream)
    start, end = Event(stream.ordinal), Event(stream.ordinal)
    for step in range(2):  # loads the kernels
        put(step)
    stream.synchronize()
    with driver.on(stream.ordinal), graph:
        for step in range(repeats):
            put(step)

    def once() -> float:
        operands.begin()
        start.record(stream.handle)
        with driver.on(stream.ordinal):
            graph.launch()
        end.record(stream.handle)
        return end.since(start)

    def sample(inner: int, warm: int) -> int:
        if warm:
            once()
        turns = max(1, round(inner / repeats))
        return round(sum(once() for _ in range(turns)) * 1e9 * inner / (turns * repeats))

    return sample


COUNTED, CHECKED, READY = "counted", "counted and checked", "parsed and lowered"
MOST_ROUNDS, LEAST = 9, 3  # rounds, and the least number of them however long they take


def emulator_speed(_: Session, task: Task) -> list[Measurement]:
    """Time each rung of a task: with counters alone, with all checks too, and the preparation of its kernel.

    A run copies the operands, emulates every block of a prepared kernel and copies C back. Libraries have one thread.
    There are fewer rounds if they take longer than the task's seconds.

    Raises ArgumentError for a label that is not a rung.
    """
    card, rows = asked.emulated_card(""), []
    with threadpoolctl.threadpool_limits(1):
        for label in task.labels:
            contender = entrant(label, CUDA)
            plain = measurements.blank(task.suite, label, task.work, 1, config=contender.config)
            plain = replace(plain, case="", flops=0, bytes=0)
            try:
                if contender.rung is None:
                    raise RefusedError("it is not one kernel: name a rung for the GPU")
                config = {**contender.rung.default, **contender.config}
                rows += _emulated_times(plain, contender.rung, task.work, config, card, task.seconds)
            except GemmeryError as refused:
                rows.append(replace(plain, refused=str(refused)))
    return rows


def _emulated_times(
    plain: Measurement, rung: Rung, work: Work, config: Mapping[str, int], card: Device, seconds: float
) -> list[Measurement]:
    """Check a rung, which also prepares it, then time it in each of the ways in turn."""
    checked = emulated_rung(rung, work, card, config)
    if checked.refused:
        raise RefusedError(checked.refused)
    gemm = Gemm(*(x if x.ndim == 3 else x[None] for x in operands(work)))
    problem = problem_of(gemm, work.dtype, work.out, card.name, precision=work.precision)
    assert rung.geometry is not None
    last = rung.geometry(problem, config)
    ptx = nvrtc.ptx(last.source, last.kernel, card.arch)
    ways: dict[str, Callable[[], object]] = {
        COUNTED: partial(run_rung, rung, problem, config, gemm, EmulationOptions(check=False)),
        CHECKED: partial(run_rung, rung, problem, config, gemm),
        READY: partial(prepared_anew, ptx.text, ptx.entry),
    }
    timings = timing.tally(_rounds(ways, seconds)).timings
    plain = replace(plain, note=f"PTX of NVRTC {nvrtc.version()} for {card.arch}")
    rows = [measurements.timed(replace(plain, case=way), timings[way]) for way in ways]
    error = max(checked.error, 2.0 if checked.findings else 0.0)
    return [replace(row, error=error, checked=True) if row.case != READY else row for row in rows]


def _rounds(ways: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, dict[int, float]]:
    """Time the ways in turn: seconds by way and round."""
    times: dict[str, dict[int, float]] = {way: {} for way in ways}
    for index in range(MOST_ROUNDS):
        if index >= LEAST and sum(sum(rounds.values()) for rounds in times.values()) > seconds:
            break
        for way, run in ways.items():
            times[way][index] = _seconds(run)
    return times


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
