"""Suites that only a GPU has: the time until a call returns, and until a kernel can be launched."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from gemmery.bench import timing, torch_operands
from gemmery.bench.record import Measurement
from gemmery.bench.timing import Sample
from gemmery.cuda import driver, nvrtc
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.nvrtc import Code, Program
from gemmery.errors import GemmeryError, RefusedError
from gemmery.lab import measurements
from gemmery.lab.backend import Runnable
from gemmery.lab.contest import PRODUCT, Task, contest, entrant
from gemmery.lab.on_cuda import Cuda, CudaStage, Vendor, build, product
from gemmery.lab.session import Session
from gemmery.problem import Config

HOST = f"{PRODUCT}, host"  # the time until the call returns, whatever the device does then
COMPILED = ("cold", "on disk", "in memory")
COMPILATIONS = 5  # of each kind; the median is reported


class HostStage(CudaStage):
    """The operands of a work, on which the time until a call returns is taken."""

    def product(self, config: Config, threads: int = 0) -> Runnable:
        """Take `gemmery.matmul`."""
        return Runnable(lambda: _warm(torch_operands.own_calls(self.resident, product(self.resident.work))))

    def rival(self, opponent: Vendor) -> Runnable:
        """Take the library's function."""
        return Runnable(lambda: _warm(opponent.caller.calls(self.resident)), note=opponent.runs)


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


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
