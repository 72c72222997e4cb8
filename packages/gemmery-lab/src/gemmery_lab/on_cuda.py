"""A GPU as a backend: operands lie in its memory many times, rivals run on the same stream, and results are checked."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

import gemmery
from gemmery import dispatch, dtypes, verify
from gemmery.cuda import driver
from gemmery.cuda.driver import Stream
from gemmery.cuda.nvml import Monitor
from gemmery.dtypes import Array
from gemmery.errors import DeviceError, RefusedError
from gemmery.keywords import ACTIVATIONS
from gemmery.ladder.rung import Growth, Rung
from gemmery.limits import Bandwidth, device_limits
from gemmery.limits.device_limits import Put, replays
from gemmery.problem import Config
from gemmery_lab import asked, measurements
from gemmery_lab.measure import cublas, record, timing, torch_operands
from gemmery_lab.measure import work as works
from gemmery_lab.measure.cublas import Caller, Placed
from gemmery_lab.measure.record import Measurement
from gemmery_lab.measure.timing import Contestant, Sample
from gemmery_lab.measure.torch_operands import Resident, poison
from gemmery_lab.measure.work import BLOCK, Work
from gemmery_lab.measurements import TF32, TURNS, WRONG, Backend, Begin, MachineLimits, Race, Runnable, square

ON_CUDA_CORES = ("simt_", "gemv_")  # prefixes of rungs that do not use tensor cores
BY_WARPS = ("mma_", "wmma_", "gemv_quantized")  # those that use them by warps alone
NO_RIVAL = "no cuBLAS to compare with: pip install torch, or cupy-cuda13x"
EPILOGUES = ("bias", *ACTIVATIONS)  # options of gemmery's product in suites, as "gm.matmul bias=1 gelu=1"
GROUPED = "gm.grouped_matmul"
NO_OPTIONS: Config = MappingProxyType({})
Clock = Callable[[], float]  # returns seconds
SMALL = 16  # a side that every rung for matrices takes
SHARE = 0.6  # seconds for one comparison of a rung, cuBLAS and the rung's parent
BURST = 0.025  # seconds of a sample, in the middle of which clock and power are read
SETTLING = 1 / 3  # of a turn that does not count: the power is still that of the contestant before
SAMPLED = {"float64": 5e7}  # operations of the reference, which for f64 uses extended precision at 0.3 GFLOP/s
SAMPLED_WIDE = 2e8  # and for narrower types, which use NumPy's product


class CudaStage:
    """The operands of a work in so many sets that no call finds its own in the L2 cache."""

    def __init__(self, backend: Cuda, work: Work) -> None:
        self._backend = backend
        self.resident = backend.resident(work)

    def rung(self, rung: Rung, config: Config, threads: int = 0) -> Runnable:
        return self._entry(build(rung, config, self.resident), rung)

    def product(self, config: Config, threads: int = 0) -> Runnable:
        """Take `gemmery.matmul` on arrays of PyTorch if there is one."""
        parts = [part for part in EPILOGUES if config.get(part)]
        invariant = bool(config.get("batch_invariant"))
        problem = self.resident.problem._replace(epilogue="+".join(parts), invariant=invariant)
        rung = dispatch.choice(problem._replace(groups=0)).rung
        options = torch_operands.own_options(self.resident, "bias" in parts)
        put = torch_operands.own(self.resident, product(self.resident.work, config, **options))
        entry = self._entry(put, rung, GROUPED if problem.groups else rung.name)
        return replace(entry, error=None) if parts else entry  # the reference has no epilogue

    def rival(self, opponent: Caller) -> Runnable:
        """Let a library put its product on the stream."""
        placed = opponent.place(self.resident)
        sampler = functools.partial(self._backend.placed, placed, self.resident)
        return Runnable(sampler, note=f"{opponent.runs}, {placed.note}")

    def _entry(self, put: Put, rung: Rung, note: str = "") -> Runnable:
        sampler = functools.partial(self._backend.sampler, put, len(self.resident.sets))
        bound = rung.bound_of(self.resident.work.dtype, self.resident.work.precision)
        return Runnable(sampler, lambda: error(self.resident, lambda: put(0), bound), note)


class Cuda(Backend):
    """The backend of one GPU.

    Raises DeviceError if there is none; the message tells what is missing.
    """

    pilot = 512  # it fills a device
    slow_parent = 0.05

    def __init__(self, ordinal: int) -> None:
        reason = driver.missing()
        if reason:
            raise DeviceError(f"device cuda:{ordinal}: {reason}")
        self.machine, self.ladder, self.rivals = record.gpu_machine(ordinal), asked.registry("cuda"), cublas.RIVALS
        self.device = f"cuda:{ordinal}"
        self.stream = Stream(ordinal)
        self.monitor = Monitor(ordinal)
        self._unit_peaks: dict[tuple[str, str], float] = {}
        self._bandwidth: Bandwidth | None = None

    def rival(self, name: str, threads: int = 0) -> Caller:
        caller = cublas.find(name)
        reason = caller.missing()
        if reason:
            raise RefusedError(reason if self._installed() else NO_RIVAL)
        return caller

    def ladder_rivals(self) -> Sequence[str]:
        """Return the libraries that are installed; one that cannot run if none is."""
        return self._installed() or ["cublas"]

    def _installed(self) -> list[str]:
        return [rival.name for rival in self.rivals if not rival.missing()]

    def stage(self, work: Work) -> CudaStage:
        return CudaStage(self, work)

    def resident(self, work: Work) -> Resident:
        return Resident(work, self.stream)

    def sampler(self, put: Put, sets: int) -> Sample:
        """Return a sampler of `put` that records clocks."""
        return replays(put, self.stream, sets, self.monitor.look)

    def placed(self, placed: Placed, resident: Resident) -> Sample:
        """Return a sampler of a rival's product that records clocks."""
        return placed.sample(resident, self.monitor.look)

    def product_for(self, rung: Rung, n: int, like: Work) -> Work:
        return product_for(rung, n, like, self.device)

    def share(self, threads: int) -> float:
        return SHARE

    def replaces(self, samples: int, known: int, fastest: bool) -> bool:
        """Return True for the turns with the fastest rung: both run at similar power and clocks."""
        return fastest

    def unit(self, kernel: str, dtype: str) -> tuple[str, str]:
        """Return the element type and the unit whose peak bounds a kernel."""
        by_warps, capability = kernel.startswith(BY_WARPS), driver.device(self.stream.ordinal).capability
        tensor = by_warps or not kernel.startswith(ON_CUDA_CORES)
        return device_limits.unit(dtype, tensor, capability, not by_warps)

    def blank(self, suite: str, kernel: str, work: Work, threads: int = 0, **known: Any) -> Measurement:
        """Return a record without times; it names the unit of the device that bounds the kernel."""
        unit = self.unit(kernel, work.precision or work.dtype)[1]
        return measurements.blank(suite, kernel, work, 0, unit=unit, **known)

    def limits(self, record: Measurement, begin: Begin) -> MachineLimits:
        """Return the peak of the record's unit and the bandwidth of memory."""
        dtype, unit = self.unit(record.kernel, record.precision or record.dtype)
        if (dtype, unit) not in self._unit_peaks:
            begin(f"peak of {dtype} on {unit}")
            self._unit_peaks[dtype, unit] = device_limits.peak(dtype, unit, self.stream)
        if self._bandwidth is None:
            begin("bandwidth of the device's memory")
            self._bandwidth = device_limits.bandwidth(self.stream)
        return MachineLimits(self._unit_peaks[dtype, unit], self._bandwidth.read, self._bandwidth.copy)

    def sustained(self, contestants: Sequence[Contestant], turn: float) -> Race:
        return race(contestants, self.monitor, turn)

    def clock(self) -> int:
        return self.monitor.clock()


def product(work: Work, config: Config = NO_OPTIONS, **arrays: Any) -> Any:
    """Return `gemmery.matmul` with the precision of a work, some options and arrays, or `gemmery.grouped_matmul`."""
    activation = next((part for part in EPILOGUES[1:] if config.get(part)), None)
    precision, invariant = "" if work.groups else work.precision, bool(config.get("batch_invariant"))
    settings: dict[str, Any] = {"activation": activation, "batch_invariant": invariant, "precision": precision}
    options = {**arrays, **{name: value for name, value in settings.items() if value}}
    function = gemmery.grouped_matmul if work.groups else gemmery.matmul
    return functools.partial(function, **options) if options else function


def build(rung: Rung, config: Config, resident: Resident) -> Put:
    """Return what launches the rung on the operands of `resident`.

    Raises RefusedError with the reason if it does not take them or the device cannot run it.
    """
    problem = resident.problem
    if reason := rung.refusal(problem):
        raise RefusedError(reason)
    kernel, sets = rung.build(problem, config), resident.sets

    def put(index: int) -> None:
        kernel(*sets[index])

    return put


def product_for(rung: Rung, n: int, like: Work, device: str) -> Work:
    """Return the product that shows a rung at size n: two squares; x W' for a rung that refuses small squares; as many
    small squares as fill those of side n for one that takes no long k.
    """
    squares, small = square(like, n), square(like, SMALL)
    vector, many = replace(squares, m=1, b_layout="col"), replace(small, batch=max(1, n // SMALL) ** 2)

    def takes(work: Work) -> bool:
        return not rung.refuses(work.problem._replace(device=device))

    if not takes(small):
        return vector if takes(vector) else squares
    return squares if takes(replace(small, k=n)) else many


def race(
    contestants: Sequence[Contestant], monitor: Monitor, turn: float, rounds: int = TURNS, now: Clock = time.monotonic
) -> Race:
    """Let contestants take turns of `turn` seconds, in an order drawn in each round; the start of each does not count.

    The first turn heats the device up and is not counted either.
    """
    each_call = {each.name: each.sample(4, 1) / 4e9 for each in contestants}
    inner = {name: max(1, round(BURST / max(seconds, 1e-7))) for name, seconds in each_call.items()}
    seconds: dict[str, dict[int, float]] = {each.name: {} for each in contestants}
    watts: dict[str, list[float]] = {each.name: [] for each in contestants}
    clocks: dict[str, list[int]] = {each.name: [] for each in contestants}
    draw = random.Random(0)
    monitor.reads_power = True
    try:
        _turn(contestants[0], inner[contestants[0].name], turn, monitor, now)
        for index in range(rounds):
            for each in draw.sample(list(contestants), len(contestants)):
                seconds[each.name][index] = _turn(each, inner[each.name], turn, monitor, now)
                watts[each.name].append(monitor.power())
                clocks[each.name].append(monitor.clock())
    finally:
        monitor.reads_power = False
    power = {name: round(statistics.fmean(values), 1) for name, values in watts.items()}
    clock = {name: round(statistics.median(values)) for name, values in clocks.items()}
    return Race(timing.tally(seconds), power, clock)


def _turn(contestant: Contestant, inner: int, turn: float, monitor: Monitor, now: Clock) -> float:
    """Return the seconds of a call in a turn after its beginning, during which clock and power are recorded."""
    start, total, count = now(), 0, 0
    counts = False
    while now() - start < turn:
        if not counts and now() - start >= turn * SETTLING:
            counts = True
            monitor.forget()
        elapsed = contestant.sample(inner, 0)
        if counts:
            total, count = total + elapsed, count + inner
    if not count:  # a call longer than most of the turn
        total, count = contestant.sample(inner, 0), inner
    return total / count / 1e9


def error(resident: Resident, run: Callable[[], None], bound: Growth) -> float:
    """Return the largest |C - reference| over its bound after `run`, which computes the first set of operands.

    C is filled with what no product has first. An element outside its bound gives more than 1, an unwritten one WRONG.
    """
    resident.poison()
    run()
    resident.stream.synchronize()
    a, b, _ = resident.host
    work, c = resident.work, resident.result()
    if work.groups:
        rows = [slice(*ends) for ends in itertools.pairwise([0, *works.offsets(work).tolist()])]
        pairs = [(c[:, part], a[:, part], b[group : group + 1]) for group, part in enumerate(rows)]
        share = 1 / len(pairs)
        return max(compared(*pair, bound, share=share) for pair in pairs if pair[1].size)
    return compared(c, a, b, bound, work.precision, factors=works.factors(work) if work.scales else ())


def compared(
    c: Array, a: Array, b: Array, bound: Growth, precision: str = "", factors: Sequence[Array] = (), share: float = 1.0
) -> float:
    """Return the largest error of C = A B over its bound; each is a batch of matrices.

    All of C must have been written over `poison`. Some rows and columns, including the first and the last, are
    compared with the reference; with a `share` below 1, fewer.
    """
    bits = c.view(f"u{c.dtype.itemsize}")
    if (bits == int.from_bytes(bytes([poison(c.dtype)]) * c.dtype.itemsize, "little")).any():
        return WRONG
    batch, rows, columns = sample(c.shape, a.shape[-1], share * SAMPLED.get(a.dtype.name, SAMPLED_WIDE))
    x, y = (exact(z) for z in (a[batch][:, rows], b[batch][:, :, columns]))
    if factors:
        blocks = np.arange(a.shape[-1]) // BLOCK
        x = x * _every(factors[0], rows, blocks)
        y = y * _every(factors[1], blocks, columns // BLOCK)
    growth = (lambda k: bound(k) + TF32) if precision == "tf32" else bound
    checked = verify.check(c[np.ix_(batch, rows, columns)], x, y, growth, most_flops=math.inf)
    return min(checked.error_over_bound, WRONG)


def exact(x: Array) -> Array:
    """Return elements of float8 as float32, others as they are."""
    return x.astype(np.float32) if dtypes.get(x.dtype.name).name in dtypes.FLOAT8 else x


def _every(factors: Array, rows: Array, columns: Array) -> Array:
    """Return the factor of each element of some rows and columns."""
    return factors if factors.ndim == 1 else factors[np.ix_(rows, columns)]


def sample(shape: tuple[int, ...], k: int, most: float, seed: int = 0) -> tuple[Array, ...]:
    """Return indices of matrices, rows and columns whose product takes at most about `most` operations.

    >>> [len(some) for some in sample((1, 4096, 4096), 4096, 2e8)]
    [1, 156, 156]
    """
    batch, m, n = shape
    elements = max(1, int(most / (2 * max(k, 1))))
    matrices = min(batch, max(1, elements // (m * n), min(batch, 4)))
    each = max(1, elements // matrices)
    rows = min(m, max(1, math.isqrt(each), each // n))
    columns = min(n, max(1, each // rows))
    draw = np.random.default_rng(seed)

    def some(count: int, most: int) -> Array:
        if most >= count:
            return np.arange(count)
        inner = draw.choice(count, most, replace=False)
        inner[:2] = [0, count - 1][: len(inner)]
        return np.unique(inner)

    return some(batch, matrices), some(m, rows), some(n, columns)
