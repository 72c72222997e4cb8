"""The emulator as a backend, as a named card: rungs are checked and counted or their times predicted, without a GPU."""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache as once
from functools import partial, reduce
from itertools import starmap
from multiprocessing import get_context
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import gemmery
import gemmery_emulator
from gemmery import cache, config
from gemmery.cuda import nvrtc, sass
from gemmery.cuda.device import KNOWN, WARP, Device
from gemmery.cuda.geometry import Geometry
from gemmery.cuda.pipes import Pipes, pipes_of
from gemmery.cuda.roofline import roofs, unit
from gemmery.errors import ArgumentError, EmulationError, RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung, find
from gemmery.problem import Config, Problem
from gemmery_emulator.arguments import memory_of
from gemmery_emulator.kernels.counters import source_lines
from gemmery_emulator.kernels.prediction import LaunchShape, SampledLaunch, predict_launch
from gemmery_emulator.kernels.programs import prepared
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.pace import Paced
from gemmery_emulator.pace.warp_timeline import WarpTimeline
from gemmery_emulator.trace import Trace
from gemmery_emulator.trace.selection import select
from gemmery_lab import asked, experiments, measurements
from gemmery_lab.climb import RungPlan, element, planned
from gemmery_lab.emulated_product import EmulationOptions, Gemm, launch_of, problem_of, product_bytes, run_rung, strided
from gemmery_lab.experiments import LADDER
from gemmery_lab.measure import record
from gemmery_lab.measure.record import Measurement, OnStep, RunSteps, ignore
from gemmery_lab.measure.work import Work, operands
from gemmery_lab.rung_counts import EmulatedLadder, EmulatedRung, PredictedRung, RungCounts

SMALL = 32  # side for the rung of one block
ALIGNED = 128  # `Rung.expect` is about sides that are multiples of this, so that all tiles are whole
SIZE = 4096  # side of the products whose times are predicted, unless sizes are named
STEP = 256  # elements along k that the longer of two samples has more: a multiple of every tile
SHORT_STEP = 128  # of kernels that load a tile, wait for it and multiply it, one after the other
STEP_OF_ROW = 2048  # of a row times a matrix
SLACK = 1 << 16  # bytes after the workspace
CHECKOUT = Path(__file__).resolve().parents[4] / "benchmarks" / "results"

T = TypeVar("T", bound=EmulatedRung | PredictedRung)
OnRung = OnStep[EmulatedRung]


def emulated_ladder(
    rungs: Sequence[str] = (), sizes: Sequence[int] = (), dtype: str = "", device: str = "", on_rung: OnRung = ignore
) -> EmulatedLadder:
    """Run the GPU's ladder on the emulator: square products, checked, with the counters of a profiler.

    `rungs` are names, all by default. `dtype` defaults to f32, or to a rung's first type where it does not take f32;
    with a `dtype`, rungs that do not take it are left out unless they are named. `device` is the card to compile for,
    whose limits count, by default "h200". A rung that takes no squares gets a row and a matrix of contiguous columns.

    >>> run = emulated_ladder(["simt_uncoalesced"], [64], device="a100")
    >>> run.rungs[0].counts.load_sectors_a_request
    16.5

    A rung that the card or the emulator cannot run is recorded with the reason in `refused`. Raises ArgumentError for
    an unknown rung, dtype or device, or a size that is not in 1 ... 1024.
    """
    card = asked.emulated_card(device)
    return _emulated(card, planned(LADDER, rungs, sizes, dtype, card.name, kind="emulator"), on_rung)


def emulated_sweep(
    experiment: str,
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "f32",
    device: str = "",
    on_rung: OnRung = ignore,
) -> EmulatedLadder:
    """Count a sweep over a key of GPU rungs ("threads", "tile" or "stages") on the emulator, which needs no GPU.

    A record's `rung` includes its config: "simt_smem tile=8". `sizes` is one size.

    >>> [one.rung for one in emulated_sweep("tile", sizes=[32]).rungs][:2]
    ['simt_smem tile=2', 'simt_smem tile=4']

    Raises ArgumentError as `sweep` does, and for an experiment without a key.
    """
    varied, card = experiments.sweep(experiment), asked.emulated_card(device)
    plan = planned(varied, rungs, sizes, dtype, card.name, kind="emulator")
    return _emulated(card, plan, on_rung, varied.axis.key)


def predicted_ladder(
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "",
    card: str = "h200",
    on_rung: OnStep[PredictedRung] = ignore,
    processes: int = 1,
) -> tuple[PredictedRung, ...]:
    """Predict the times of the GPU's ladder on a card, next to its records where there are some.

    `rungs` are names, all by default; `sizes` are sides of squares, 4096 by default. Without a `dtype` a rung has f32;
    one that does not take f32 has bf16 if there is a record in that, else its first type. More than one of `processes`
    is for a program whose main module is guarded by `__name__ == "__main__"`. Predictions are kept in the cache.

    >>> row = predicted_ladder(["simt_naive"], [512])[0]
    >>> row.prediction.bound
    'waits'

    Raises DeviceError for a card whose latencies are not known, ArgumentError for an unknown rung or dtype.
    """
    device, lengths = pipes_of(card)[0], asked.sides(sizes or (SIZE,))
    plan = planned(LADDER, rungs, (), dtype, card, kind="emulator")
    known = {_key(each): each for each in recorded(device)}
    in_bf16 = {(each.kernel, each.n) for each in known.values() if each.dtype == "bf16"}

    def types(rung: Rung, n: int) -> Work:
        return element("bf16" if not plan.dtype and (rung.name, n) in in_bf16 and not takes_f32(rung) else plan.dtype)

    def beside(row: PredictedRung, task: RungTask) -> PredictedRung:
        rung, work = task.rung, task.work
        m = known.get((rung.name, work.m, work.n, work.k, work.dtype, work.precision))
        choice = rung.resolve(work.problem, rung.default)
        # Records are older than some keys: then one counts if nothing is split by it.
        same = m is not None and all(
            m.config[key] == value if key in m.config else choice[key] == 1 for key, value in rung.default.items()
        )
        return replace(row, measured=m.seconds if m is not None and same else 0.0)

    def look(tasks: Sequence[RungTask]) -> Iterator[PredictedRung]:
        calls = [(task.rung.name, task.work, card, tuple(task.config.items())) for task in tasks]
        if processes > 1:
            with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
                # The last rungs take longest: begun first, they do not keep one process busy at the end.
                futures = [pool.submit(_remembered, *call) for call in reversed(calls)]
                yield from map(beside, (future.result() for future in reversed(futures)), tasks)
        else:
            yield from map(beside, starmap(_remembered, calls), tasks)

    return _each(device, plan, lengths, types, look, on_rung)


@dataclass(frozen=True)
class RungTask:
    """A rung with its config on one product."""

    rung: Rung
    work: Work
    n: int  # the side that was asked for
    config: Config


def _emulated(card: Device, plan: RungPlan, on_rung: OnRung, key: str = "") -> EmulatedLadder:
    """Check and count the rungs of a plan; a `key` of their config is part of their names."""

    def look(task: RungTask) -> EmulatedRung:
        name = f"{task.rung.name} {key}={task.config[key]}" if key else task.rung.name
        return replace(emulated_rung(task.rung, task.work, card, task.config), rung=name, size=task.n)

    like = element(plan.dtype)
    rungs = _each(card, plan, plan.sizes, lambda *_: like, partial(map, look), on_rung)
    return EmulatedLadder(card, record.now(), rungs)


def _each(
    card: Device,
    plan: RungPlan,
    sizes: Sequence[int],
    types: Callable[[Rung, int], Work],
    look: Callable[[Sequence[RungTask]], Iterable[T]],
    on_rung: OnStep[T],
) -> tuple[T, ...]:
    """Return the records of a plan's rungs at some sizes, in these `types`; `look` yields them in turn."""
    products = ((rung, n, config) for n in sizes for rung, config in plan.variants)
    tasks = [RungTask(rung, product_for(rung, n, types(rung, n), card), n, config) for rung, n, config in products]
    steps, rows = RunSteps[T](len(tasks), on_rung), iter(look(tasks))
    for task in tasks:
        steps.begin(f"{task.rung.name}, {task.work}")
        steps.end(next(rows))
    return tuple(steps.records)


def product_for(rung: Rung, n: int, like: Work, card: Device) -> Work:
    """Return two squares, small ones for the rung of one block, else a row times W'; "" is a rung's own type."""
    dtype = like.dtype or ("f32" if takes_f32(rung) else rung.dtypes[0])
    square = Work(n, n, n, dtype, asked.result_type(dtype), precision=like.precision)
    least = min(n, SMALL)
    for work in (square, replace(square, m=least, n=least, k=least), replace(square, m=1, b_layout="col")):
        if not rung.refuses(work.problem._replace(device=card.name)):
            return work
    return square


def emulated_rung(rung: Rung, work: Work, card: Device, config: Mapping[str, int] | None = None) -> EmulatedRung:
    """One rung on random operands, with its error, counters and findings; C holds NaN or the largest integer before."""
    full = {**rung.default, **(config or {})}
    plain = EmulatedRung(rung.name, work.n, work.m, work.n, work.k, work.precision or work.dtype, rung.explicit(full))
    gemm = Gemm(*(x if x.ndim == 3 else x[None] for x in operands(work)))
    gemm.c.fill(np.iinfo(gemm.c.dtype).max if gemm.c.dtype.kind == "i" else np.nan)
    problem = problem_of(gemm, work.dtype, work.out, card.name, precision=work.precision)
    start, trace = time.perf_counter(), Trace()
    try:
        runs = run_rung(rung, problem, full, gemm, EmulationOptions(observers=(trace,)))
    except (EmulationError, RefusedError) as refused:
        return replace(plain, refused=str(refused))
    seconds = time.perf_counter() - start
    together = reduce(add, runs)
    steps = {name: (x.strides[1], x.strides[2]) for name, x in (("A", gemm.a), ("B", gemm.b))}
    drawn = select(trace, steps, "")
    counts, bound = RungCounts.of(together), rung.bound_of(problem.dtype, problem.precision)
    rounding = measurements.TF32 if problem.precision == "tf32" else 0.0  # of A and B to 10 bits of fraction
    on = _unit(launch_of(rung, problem, full), work, card)
    limits = roofs(card, on, counts.flops, counts.sectors, counts.wavefronts, counts.warp_instructions)
    times: dict[str, Any] = {f"{name}_seconds": seconds for name, seconds in limits.items()}
    return replace(
        plain,
        config=rung.explicit(rung.resolve(problem, full)),
        tile=rung.geometry(problem, full).tile if rung.geometry else (0, 0),
        blocks=math.prod(runs[-1].launch.grid),
        error=measurements.error(gemm.c, gemm.a, gemm.b, lambda k: bound(k) + rounding, rung.normwise),
        counts=counts,
        kinds=dict(together.instructions.most_common()),
        intensity=together.intensity,
        unit=on,
        **times,
        expected=dict(rung.expect) if expects(rung, work) and not config else {},
        findings=tuple(map(str, together.findings)),
        chosen=drawn,
        source=source_lines(drawn),
        seconds=seconds,
    )


def expects(rung: Rung, work: Work) -> bool:
    """True for the products that `Rung.expect` is about: whole tiles, of f32 or the rung's first type.

    For the rung of one block this is its largest product, 32 x 32 x 32.
    """
    sides = {work.n, work.k} if work.m == 1 else {work.m, work.n, work.k}
    larger = replace(work, m=ALIGNED, n=ALIGNED, k=ALIGNED)
    one_block = work.m == SMALL and bool(rung.refuses(larger.problem))
    whole = all(side % (SMALL if one_block else ALIGNED) == 0 for side in sides)
    return whole and not work.precision and work.dtype == ("f32" if takes_f32(rung) else rung.dtypes[0])


def takes_f32(rung: Rung) -> bool:
    """True for a rung that takes f32 itself, not only as tf32."""
    return any(not rung.refuses(Problem(m, 1, 1, "f32", "f32")) for m in (1, 2)) and "f32" in rung.dtypes


def _remembered(name: str, work: Work, card: str, options: tuple[tuple[str, int], ...]) -> PredictedRung:
    """Predict one rung, or read the prediction that the same sources gave before."""
    (device, pipes), folder = pipes_of(card), config.cache_dir()
    what = repr((name, work, options, device, pipes, np.__version__)).encode()
    key = cache.key("times", sources()[:12], sources().encode(), nvrtc.version().encode(), what)
    stored = cache.read(folder, key)
    if stored is not None:
        row: PredictedRung = pickle.loads(stored)  # noqa: S301 - the cache reads only what this user wrote
        return row
    row = predicted_rung(find(CUDA, name), work, device, pipes, dict(options))
    cache.write(folder, key, pickle.dumps(row))
    return row


@once
def sources() -> str:
    """Return a digest of all files of the packages, on which predictions depend: hashing them takes 20 ms."""
    folders = [Path(package.__path__[0]) for package in (gemmery, gemmery_emulator)] + [Path(__file__).parent]
    suffixes = {".py", ".pyc", ".cu", ".cuh", ".h", ".json", ".toml"}
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in suffixes)
    files = [file for file in files if file.parent.name != "__pycache__"]
    return cache.digest(*(part for file in files for part in (os.fsencode(file.name), file.read_bytes()))).hex()


def predicted_rung(rung: Rung, work: Work, device: Device, pipes: Pipes, config: Config | None = None) -> PredictedRung:
    """Predict one rung; the reason why it cannot be is in `refused`."""
    full = {**rung.default, **(config or {})}
    row = PredictedRung(rung.name, work.m, work.n, work.k, work.precision or work.dtype, rung.explicit(full))
    problem = work.problem._replace(device=device.name)
    try:
        geometry = launch_of(rung, problem, full)
        lengths, beyond = _lengths(problem, _overlaps(geometry, device))
        every = [list(_samples(problem, geometry, length, device, pipes)) for length in lengths]
        predictions = [
            predict_launch(device, pipes, same[-1][0], [paced for _, paced in same], beyond, follows=place > 0)
            for place, same in enumerate(zip(*every, strict=True))
        ]
    except (EmulationError, RefusedError) as refused:
        return replace(row, refused=str(refused))
    return replace(row, prediction=reduce(add, predictions), unit=_unit(geometry, work, device))


def _unit(geometry: Geometry, work: Work, device: Device) -> str:
    codes = (nvrtc.ptx(each.source, each.kernel, device.arch).text for each in geometry.launches)
    return unit(work.dtype, (opcode for code in codes for opcode in sass.ptx_counts(code)))


def _overlaps(geometry: Geometry, device: Device) -> bool:
    """Whether a kernel copies tiles ahead, or multiplies on tensor cores: several of its steps make one round."""
    for each in geometry.launches:  # PTX is kept with the machine code, and need not be compiled again
        nvrtc.code(each.source, each.kernel, device.arch)
    codes = (nvrtc.ptx(each.source, each.kernel, device.arch).text for each in geometry.launches)
    return any("cp.async" in code or "mma" in code for code in codes)


def _lengths(problem: Problem, overlaps: bool = True) -> tuple[tuple[int, ...], float]:
    """The lengths along k of the samples, and how far the product is beyond the first, in steps to the second."""
    step = STEP_OF_ROW if problem.m == 1 else STEP if overlaps else SHORT_STEP
    first = step + problem.k % step
    if problem.k <= first + step:
        return (problem.k,), 0.0
    return (first, first + step), (problem.k - first) / step


def rung_timeline(row: PredictedRung, card: str) -> WarpTimeline:
    """Return what the warps of a predicted rung do over time: of the first blocks of a multiprocessor, with a short k.

    >>> timeline = rung_timeline(predicted_ladder(["simt_smem"], [512])[0], "h200")
    >>> timeline.kernel, timeline.each
    ('simt_smem', 8)

    Raises EmulationError or RefusedError for what cannot be predicted.
    """
    device, pipes = pipes_of(card)
    rung, work = find(CUDA, row.rung), replace(element(row.dtype), m=row.m, n=row.n, k=row.k)
    work = replace(work, out=asked.result_type(work.dtype), b_layout="col" if row.m == 1 else "row")
    problem = work.problem._replace(device=device.name)
    geometry = launch_of(rung, problem, {**rung.default, **row.config})
    lengths, _ = _lengths(problem, _overlaps(geometry, device))
    shape, paced = list(_samples(problem, geometry, lengths[0], device, pipes, spans=True))[-1]
    each, lines = -(-shape.threads // WARP), tuple(map(str, shape.lines))
    return WarpTimeline(row.rung, device.name, device.clock, paced.rounds[0], each, paced.spans, lines)


def _samples(
    problem: Problem, geometry: Geometry, length: int, device: Device, pipes: Pipes, *, spans: bool = False
) -> Iterator[tuple[LaunchShape, Paced]]:
    """Run the launches of a product whose matrices keep their strides, but of whose k only `length` are summed.

    Launches that prepare it and do not multiply pass over the whole k: the grids of some grow with it.
    """
    gemm = strided(problem, length)
    codes = [nvrtc.ptx(each.source, each.kernel, device.arch) for each in geometry.launches]
    programs = [prepared(code.text, code.entry) for code in codes]
    sizes = {name: array.strides[0] for name, array in gemm.arrays.items()}  # of whole matrices
    whole = float(sum(sizes.values()))
    memory = memory_of({}, [each.kernel for each in programs], {**sizes, "workspace": geometry.workspace + SLACK})
    addresses = {name: memory.address(name) for name in sizes}
    scratch = memory.address("workspace")
    part, full = (
        product_bytes(problem._replace(k=k), geometry, strided(problem, k), addresses, scratch)
        for k in (length, problem.k)
    )
    for program, ptx, each in zip(programs, codes, geometry.launches, strict=True):
        code = nvrtc.code(each.source, each.kernel, device.arch)
        argument = part if each is geometry or "mma" in ptx.text else full
        launch = LaunchConfig(each.grid, each.block, argument, each.shared, (each.cluster, 1, 1))
        shared = code.report.shared + each.shared
        sampled = SampledLaunch(program, launch, code.report.registers, shared, cubin=code.cubin)
        hot = each is geometry and bool(each.before) and whole + each.workspace <= device.l2
        shape = replace(sampled.shape(device, whole), hot=hot)
        yield shape, sampled.sample(device, pipes, memory, shape, spans=spans)


def recorded(device: Device) -> Iterator[Measurement]:
    """Yield the newest record of each rung and product of the ladder on a card, of this checkout or the data folder."""
    folders = [CHECKOUT]
    with suppress(ArgumentError):  # a user without a home folder has no records
        folders.append(record.results_folder())
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
