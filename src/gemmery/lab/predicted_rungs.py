"""The time of rungs on a named card, predicted on the emulator from the blocks of one multiprocessor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from operator import add
from pathlib import Path

import numpy as np

from gemmery.bench import record
from gemmery.bench.record import Measurement
from gemmery.bench.work import Work, numpy_dtype
from gemmery.cuda import nvrtc
from gemmery.cuda.device import KNOWN, Device
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.pipes import Pipes, pipes_of
from gemmery.dtypes import Array
from gemmery.emulation.prediction import LaunchShape, Prediction, SampledLaunch, predict_launch
from gemmery.emulation.programs import prepared
from gemmery.emulator.arguments import memory_of
from gemmery.emulator.machine import LaunchConfig
from gemmery.emulator.pace.multiprocessor import Paced
from gemmery.errors import ArgumentError, EmulationError, RefusedError
from gemmery.experiments import LADDER
from gemmery.lab import asked
from gemmery.lab.emulated_product import Gemm, launch_of, product_bytes
from gemmery.lab.emulated_rungs import product_for, takes_f32
from gemmery.lab.event import followed
from gemmery.lab.suites import results_folder
from gemmery.ladder.rung import Rung
from gemmery.problem import Problem
from gemmery.rung_counts import PredictedRung

SIZE = 2048  # side of the products whose times are predicted, unless sizes are named
STEP = 256  # elements along k that the longer of two samples has more: a multiple of every tile
STEP_OF_ROW = 2048  # of a row times a matrix
SLACK = 1 << 16  # bytes after the workspace
CHECKOUT = Path(__file__).resolve().parents[3] / "benchmarks" / "results"

OnPrediction = Callable[[str, int, int, PredictedRung | None], None]


def predicted_ladder(
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "",
    card: str = "h200",
    on_rung: OnPrediction = lambda *_: None,
) -> tuple[PredictedRung, ...]:
    """Predict the times of the GPU's ladder on a card, next to its records where there are some.

    `rungs` are names, all by default; `sizes` are sides of squares, 2048 by default. Without a `dtype` a rung has f32;
    one that does not take f32 has bf16 if there is a record in that, else its first type.

    >>> row = predicted_ladder(["simt_naive"], [512])[0]
    >>> row.prediction.bound
    'issue'

    Raises DeviceError for a card whose latencies are not known, ArgumentError for an unknown rung or dtype.
    """
    device, pipes = pipes_of(card)
    lengths = asked.sides(sizes or (SIZE,))
    dtype = dtype and asked.element_type(dtype, "emulator")
    element = "f32" if dtype == "tf32" else dtype
    takers = [rung for rung in asked.rungs(rungs, "emulator") if rungs or not element or element in rung.dtypes]
    known = {_key(each): each for each in recorded(device)}
    recorded_types = {(each.kernel, each.n, each.dtype) for each in known.values()}

    def row(rung: Rung, n: int) -> PredictedRung:
        in_bf16 = not dtype and not takes_f32(rung) and (rung.name, n, "bf16") in recorded_types
        work = product_for(rung, n, "bf16" if in_bf16 else dtype, device)
        plain = predicted_rung(rung, work, device, pipes)
        measured = known.get((rung.name, work.m, work.n, work.k, work.dtype, work.precision))
        same = measured is not None and all(measured.config.get(key) == value for key, value in rung.default.items())
        return replace(plain, measured=measured.seconds if measured is not None and same else 0.0)

    steps = [(f"time of {rung.name}, n = {n}", partial(row, rung, n)) for n in lengths for rung in takers]
    return followed(steps, on_rung)


def predicted_rung(
    rung: Rung, work: Work, device: Device, pipes: Pipes, config: Mapping[str, int] | None = None
) -> PredictedRung:
    """Predict one rung; the reason why it cannot be is in `refused`."""
    full = {**rung.default, **(config or {})}
    row = PredictedRung(rung.name, work.m, work.n, work.k, work.precision or work.dtype, rung.explicit(full))
    problem = work.problem._replace(device=device.name)
    try:
        return replace(row, prediction=_prediction(rung, problem, full, device, pipes))
    except (EmulationError, RefusedError) as refused:
        return replace(row, refused=str(refused))


def _prediction(rung: Rung, problem: Problem, config: Mapping[str, int], device: Device, pipes: Pipes) -> Prediction:
    geometry = launch_of(rung, problem, config)
    lengths, beyond = _lengths(problem)
    every = [list(_samples(problem, geometry, length, device, pipes)) for length in lengths]
    launches = zip(*every, strict=True)
    predictions = (
        predict_launch(device, pipes, same[-1][0], [paced for _, paced in same], beyond, follows=place > 0)
        for place, same in enumerate(launches)
    )
    return reduce(add, predictions)


def _lengths(problem: Problem) -> tuple[tuple[int, ...], float]:
    """The lengths along k of the samples, and how far the product is beyond the first, in steps to the second."""
    step = STEP_OF_ROW if problem.m == 1 else STEP
    first = step + problem.k % step
    if problem.k <= first + step:
        return (problem.k,), 0.0
    return (first, first + step), (problem.k - first) / step


def _samples(
    problem: Problem, geometry: Geometry, length: int, device: Device, pipes: Pipes
) -> Iterator[tuple[LaunchShape, Paced]]:
    """Run the launches of a product whose matrices keep their strides, but of whose k only `length` are summed."""
    gemm = _strided(problem, length)
    codes = [nvrtc.ptx(each.source, each.kernel, device.arch) for each in geometry.launches]
    programs = [prepared(code.text, code.entry) for code in codes]
    sizes = {"A": problem.m * problem.k, "B": problem.k * problem.n, "C": problem.m * problem.n}
    sizes = {name: size * _element(problem, name).itemsize for name, size in sizes.items()}
    whole = float(sum(sizes.values()))
    memory = memory_of({}, [each.kernel for each in programs], {**sizes, "workspace": geometry.workspace + SLACK})
    addresses = {name: memory.address(name) for name in sizes}
    argument = product_bytes(problem._replace(k=length), geometry, gemm, addresses, memory.address("workspace"))
    for program, each in zip(programs, geometry.launches, strict=True):
        report = nvrtc.code(each.source, each.kernel, device.arch).report
        launch = LaunchConfig(each.grid, each.block, argument, each.shared, (each.cluster, 1, 1))
        sampled = SampledLaunch(program, launch, report.registers, report.shared + each.shared)
        shape = sampled.shape(device, whole)
        yield shape, sampled.sample(device, pipes, memory, shape)


def _element(problem: Problem, name: str) -> np.dtype:
    return numpy_dtype(problem.out if name == "C" else problem.dtype)


def _strided(problem: Problem, length: int) -> Gemm:
    """Arrays that stand for the matrices: only their shapes and strides are read."""

    def matrix(name: str, rows: int, columns: int, whole: tuple[int, int], layout: str) -> Array:
        kind = _element(problem, name)
        steps = (1, whole[0]) if layout == "col" else (whole[1], 1)
        strides = (whole[0] * whole[1] * kind.itemsize, *(step * kind.itemsize for step in steps))
        return np.lib.stride_tricks.as_strided(np.empty(1, kind), (1, rows, columns), strides)

    m, n, k = problem.m, problem.n, problem.k
    return Gemm(
        matrix("A", m, length, (m, k), problem.a_layout),
        matrix("B", length, n, (k, n), problem.b_layout),
        matrix("C", m, n, (m, n), problem.c_layout),
    )


def recorded(device: Device) -> Iterator[Measurement]:
    """Yield the newest record of each rung and product of the ladder on a card, of this checkout or the data folder."""
    folders = [CHECKOUT]
    with suppress(ArgumentError):  # a user without a home folder has no records
        folders.append(results_folder())
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.jsonl")]
    runs = [run for file in files for run in record.read(file) if _is(device, run.machine.gpu.name)]
    rows = (each for run in sorted(runs, key=lambda run: run.started) for each in run.measurements)
    yield from {_key(each): each for each in rows if each.suite == LADDER.suite and each.seconds}.values()


def _is(device: Device, name: str) -> bool:
    """Whether a driver's name is that of a card.

    >>> _is(KNOWN["h100"], "NVIDIA H100 80GB HBM3"), _is(KNOWN["l4"], "NVIDIA L40S")
    (True, False)
    """
    joined = name.lower().replace(" ", "").replace("-", "")
    return max((known for known in KNOWN if known in joined), key=len, default="") == device.name


def _key(each: Measurement) -> tuple[str, int, int, int, str, str]:
    return each.kernel, each.m, each.n, each.k, each.dtype, each.precision
