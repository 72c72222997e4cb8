"""Suites on a GPU: products compared with cuBLAS, rungs against each other, the time of a call and a compilation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import gemmery
from gemmery import dispatch
from gemmery.bench import cublas, timing
from gemmery.bench.cublas import Caller
from gemmery.bench.record import Measurement, Run
from gemmery.bench.resident import Resident
from gemmery.bench.suite import ALONE, Suite, taking_part
from gemmery.bench.timing import Contestant
from gemmery.bench.work import Work
from gemmery.cuda import driver, nvrtc
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.nvrtc import Code, Program
from gemmery.errors import GemmeryError, RefusedError
from gemmery.lab import results
from gemmery.lab.event import OnEvent
from gemmery.lab.gpu import check
from gemmery.lab.gpu.level import build
from gemmery.lab.gpu.session import GpuSession
from gemmery.lab.new_shapes import new_shapes
from gemmery.lab.tournament import PRODUCT, entrant
from gemmery.ladder.cuda import CUDA

HOST = f"{PRODUCT}, host"  # the time until the call returns, whatever the device does then
COMPILED = ("cold", "on disk", "in memory")
COMPILATIONS = 5  # of each kind; the median is reported


def bench(
    suites: Sequence[Suite],
    named: Iterable[str],
    labels: Iterable[str],
    wanted: Sequence[str],
    seconds: float,
    device: int,
    on_event: OnEvent,
    store: Path | None,
) -> Run:
    """Run suites on a device with the rivals `wanted`; `named` rivals and `labels` of rungs are looked up first.

    Raises ArgumentError for an unknown rival or rung; DeviceError if there is no such device.
    """
    for name in named:
        cublas.find(name)
    for label in labels:
        entrant(label, CUDA)
    session = GpuSession(sum(len(found.works) for found in suites), on_event, device, store)
    for found in suites:
        run_suite(session, found, wanted, seconds)
    return session.run


def run_suite(session: GpuSession, found: Suite, wanted: Sequence[str], seconds: float) -> None:
    """Run every product of a suite, next to those of its rivals that are installed; `seconds` for each."""
    chosen, left_out = taking_part(found, wanted, cublas.RIVALS)
    for name, reason in left_out.items() if found.kind not in ALONE else ():
        session.add(session.blank(found.name, name, found.works[0], refused=reason))
    rivals = [cublas.find(name) for name in chosen if found.kind not in ALONE]
    for rival in rivals:
        if rival.missing():
            session.add(session.blank(found.name, rival.name, found.works[0], refused=rival.missing()))
    able = [rival for rival in rivals if not rival.missing()]
    for work in found.works:
        session.begin(f"{found.name}: {work}")
        labels = found.rungs.get(work.name, ())
        try:
            if found.kind == "compile":
                rows = compilations(session, found.name, work, labels)
            elif found.kind == "new_shapes":
                rows = new(session, found.name, work, able, seconds)
            elif found.kind == "call":
                rows = call(session, found.name, work, able, seconds)
            else:
                rows = contest(session, found.name, work, labels or (PRODUCT,), able, seconds)
        except RefusedError as refused:
            rows = [session.blank(found.name, PRODUCT, work, refused=str(refused))]
        session.end(*rows)


def contest(
    session: GpuSession, name: str, work: Work, labels: Sequence[str], rivals: Sequence[Caller], seconds: float
) -> list[Measurement]:
    """Check the product or the named rungs, time them in turn with each rival, and return the records.

    `versus` of a record has its ratio to each other one.
    """
    resident = session.resident(work)
    rows: dict[str, Measurement] = {}
    contestants = []
    for label in labels:
        one = entrant(label, CUDA)
        rows[label] = session.blank(name, label, work, config=one.config)
        try:
            if one.rung is None:
                put, bound, note = _product(resident)
            else:
                put, bound, note = build(one.rung, {**one.rung.default, **one.config}, resident), one.rung.bound, ""
            error = check.error(resident, functools.partial(put, 0), bound)
            contestants.append(Contestant(label, session.sampler(put, len(resident.sets))))
        except GemmeryError as refused:
            rows[label] = replace(rows[label], refused=str(refused))
            continue
        rows[label] = replace(rows[label], error=error, checked=True, note=note)
    for rival in rivals:
        try:
            placed = rival.place(resident)
            contestants.append(Contestant(rival.name, session.rival(placed, resident)))
            rows[rival.name] = session.blank(name, rival.name, work, note=f"{rival.runs()}, {placed.note}")
        except RefusedError as refused:
            rows[rival.name] = session.blank(name, rival.name, work, refused=str(refused))
    if contestants:
        session.monitor.clock()
        found = timing.compare(contestants, seconds)
        clock = session.monitor.clock()
        for label, taken in found.timings.items():
            ratios = found.ratios(label) if label in labels else None
            rows[label] = session.timed(rows[label], taken, work, ratios, clock)
    return list(rows.values())


def _product(resident: Resident) -> tuple[Callable[[int], None], Callable[[int], float], str]:
    """Return `gemmery.matmul` on the operands, its error bound and the rung that it runs."""
    precision = resident.work.precision or None
    rung = dispatch.choice(resident.problem).rung
    return cublas.own(resident, functools.partial(gemmery.matmul, precision=precision)), rung.bound, rung.name


def call(session: GpuSession, name: str, work: Work, rivals: Sequence[Caller], seconds: float) -> list[Measurement]:
    """Time the product and each rival until the call returns, without waiting for the device.

    The product must be small enough for the device to keep up.
    """
    resident = session.resident(work)
    precision = resident.work.precision or None
    contestants = [Contestant(HOST, cublas.own_calls(resident, functools.partial(gemmery.matmul, precision=precision)))]
    rows = {HOST: session.blank(name, HOST, work)}
    for rival in rivals:
        try:
            contestants.append(Contestant(rival.name, rival.calls(resident)))
            rows[rival.name] = session.blank(name, rival.name, work, note=rival.runs())
        except RefusedError as refused:
            rows[rival.name] = session.blank(name, rival.name, work, refused=str(refused))
    for contestant in contestants:
        contestant.sample(1, 0)  # compiles, and lets a library choose its kernel
    found = timing.compare(contestants, seconds)
    for label, taken in found.timings.items():
        rows[label] = results.timed(rows[label], taken, (0.0, 0.0), found.versus if label == HOST else None)
    return list(rows.values())


def new(session: GpuSession, name: str, work: Work, rivals: Sequence[Caller], seconds: float) -> list[Measurement]:
    """Time products of new shapes in new processes, next to cuBLAS through PyTorch, whose tensors they multiply."""
    if "cublas" not in [rival.name for rival in rivals]:
        raise RefusedError("the products are of PyTorch's tensors; install torch and keep cublas among the rivals")
    device = f"cuda:{session.stream.ordinal}"
    notes = {"cublas": cublas.find("cublas").runs()}
    rows = new_shapes(session.blank(name, PRODUCT, work), work, 0, tuple(notes), seconds, device)
    return [replace(m, note=notes.get(m.kernel, "")) for m in rows]


def compilations(session: GpuSession, name: str, work: Work, labels: Sequence[str]) -> list[Measurement]:
    """Time until a rung's kernel can be launched: compiled, read from the cache on disk, and found in memory."""
    resident = session.resident(work)
    rows = []
    for label in labels:
        one = entrant(label, CUDA)
        blank = replace(session.blank(name, label, work), case="", flops=0, bytes=0)
        try:
            if one.rung is None or one.rung.geometry is None:
                raise RefusedError("it is not one kernel: name a rung")
            build(one.rung, {**one.rung.default, **one.config}, resident)
            geometry = one.rung.geometry(resident.problem, {**one.rung.default, **one.config})
        except GemmeryError as refused:
            rows.append(replace(blank, refused=str(refused)))
            continue
        ways = _ways(geometry, session.stream.ordinal)
        taken = {
            case: {turn: _seconds(way) for turn in range(COMPILATIONS)}
            for case, way in zip(COMPILED, ways, strict=True)
        }
        found = timing.tally(taken)
        rows += [results.timed(replace(blank, case=case), found.timings[case], (0.0, 0.0)) for case in COMPILED]
    return rows


def _ways(geometry: Geometry, ordinal: int) -> tuple[Callable[[], object], ...]:
    """Functions that prepare a kernel in each of the ways of COMPILED."""
    arch = driver.device(ordinal).arch
    return (
        lambda: _load(nvrtc.compiled(geometry.source, geometry.kernel, arch), ordinal),
        lambda: _load(nvrtc.code(geometry.source, geometry.kernel, arch), ordinal),
        lambda: driver.function(geometry.source, geometry.kernel, ordinal, geometry.shared),
    )


def _load(made: Program | Code, ordinal: int) -> None:
    """Load machine code as `driver.function` does, and unload it."""
    api = driver.api()
    with driver.on(ordinal):
        module = driver.check(api.cuModuleLoadData(made.cubin))
        driver.check(api.cuModuleGetFunction(module, made.entry.encode()))
        driver.check(api.cuModuleUnload(module))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
