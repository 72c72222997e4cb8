"""sweep(): the experiments behind the ladder's curves, each of which varies one quantity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemmery import experiments
from gemmery.bench import record
from gemmery.bench.record import Run
from gemmery.bench.work import Work
from gemmery.errors import ArgumentError, DeviceError
from gemmery.experiments import SWEEPS, Axis, Experiment, Points
from gemmery.lab import asked
from gemmery.lab.climb import Conditions, RungConfig, climb, element
from gemmery.lab.event import OnEvent, followed, ignore
from gemmery.ladder.rung import Rung
from gemmery.problem import Config

if TYPE_CHECKING:
    from gemmery.lab.emulated_rungs import OnRung
    from gemmery.rung_counts import EmulatedLadder, EmulatedRung

MOST_EMULATED = 1024  # the largest side there


def sweep(
    experiment: str,
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "f32",
    threads: int = 0,
    seconds: float = 5.0,
    on_event: OnEvent = ignore,
    device: str = "",
    store: Path | None = None,
) -> Run:
    """Measure a sweep of gemmery.experiments, compared with NumPy, or with cuBLAS on a GPU.

    "size" varies n for some rungs, on the CPU unless `device` is "cuda". "block" varies the block of `simd_blocked`
    on the CPU. "threads" (per block of `simt_linear`), "tile" (of `simt_smem`) and "stages" (of the pipelined rungs)
    vary that key at one size on a GPU; a value that the device cannot run has its reason in `refused`. "gemv" and
    "gemv_k" run all variants of the rungs for y = W x, with N or K from `sizes`. `rungs` and `sizes` default to those
    of the experiment; `seconds` is the limit per call, as in `ladder`. `Measurement.config` has the varied key;
    `suite` is that of the experiment. `store` is as in `bench`.

    >>> run = sweep("block", sizes=[1024])  # doctest: +SKIP

    Raises ArgumentError for an unknown experiment, rung, dtype, size or device; DeviceError if there is no such device.
    """
    plan = planned(experiment, rungs, sizes, dtype, Conditions(device, threads, seconds, on_event, store))
    varied, variants = experiments.sweep(experiment), plan.variants
    if plan.kind == "cuda" and not rungs:  # those that take the type
        variants = [(rung, config) for rung, config in variants if _serves(rung, element(plan.dtype), plan.how.device)]
    shape = partial(_vector, varied.axis, element(plan.dtype)) if varied.axis.fixed else None
    try:
        return climb(varied, variants, plan.sizes, plan.dtype, plan.how, shape)
    except DeviceError as error:
        way = f"sweep {experiment}" if "emulator" in varied.points else "ladder"
        raise DeviceError(f"{error}; `gemmery {way}` on the device emulator counts what rungs do without one") from None


def emulated_sweep(
    experiment: str,
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "f32",
    device: str = "",
    on_rung: OnRung = lambda *_: None,
) -> EmulatedLadder:
    """Count a sweep over a key of GPU rungs ("threads", "tile" or "stages") on the emulator, which needs no GPU.

    A record's `rung` includes its config: "simt_smem tile=8". `sizes` is one size, by default that of the experiment;
    `device` is a card.

    >>> [one.rung for one in emulated_sweep("tile", sizes=[32]).rungs][:2]
    ['simt_smem tile=2', 'simt_smem tile=4']

    Raises ArgumentError as `sweep` does, and for an experiment without a key.
    """
    from gemmery.lab.emulated_rungs import emulated_rung  # loads the emulator
    from gemmery.rung_counts import EmulatedLadder

    counted = countable(experiment)
    key, points = counted.axis.key, counted.points["emulator"]
    card, (n, *others) = asked.emulated_card(device), asked.sides(sizes or points.sizes, MOST_EMULATED)
    if others:
        raise ArgumentError(f"sizes {list(sizes)}: the {key} is varied at one size; give one")
    like = element(asked.element_type(dtype, "emulator"))
    variants = _variants(counted, points, rungs, "emulator", n)
    variants = [(rung, config) for rung, config in variants if rungs or like.dtype in rung.dtypes]
    work, started = replace(like, m=n, n=n, k=n), record.now()

    def run(label: str, rung: Rung, config: Config) -> EmulatedRung:
        return replace(emulated_rung(rung, work, card, config), rung=label, size=n)

    labelled = [(f"{rung.name} {key}={config[key]}", rung, config) for rung, config in variants]
    steps = [(label, partial(run, label, rung, config)) for label, rung, config in labelled]
    return EmulatedLadder(card, started, followed(steps, on_rung))


def countable(name: str) -> Experiment:
    """Return a sweep that the emulator can run. Raises ArgumentError for another."""
    experiment = experiments.sweep(name)
    if "emulator" not in experiment.points:
        known = ", ".join(other.name for other in SWEEPS if "emulator" in other.points)
        raise ArgumentError(f"`sweep {name}` compares times, and the emulator only counts; it runs {known}")
    return experiment


@dataclass(frozen=True)
class SweepPlan:
    """A sweep with checked arguments."""

    variants: list[RungConfig]
    sizes: tuple[int, ...]
    dtype: str
    kind: str  # of the device: "cpu" or "cuda"
    how: Conditions


def planned(experiment: str, rungs: Sequence[str], sizes: Sequence[int], dtype: str, how: Conditions) -> SweepPlan:
    """Check the arguments of `sweep`; the device "" is the first of the experiment. Raises its ArgumentErrors."""
    varied = experiments.sweep(experiment)
    where = how.device or varied.devices[0]
    kind = "cpu" if asked.ordinal(where) is None else "cuda"
    if kind not in varied.devices:
        raise ArgumentError(f"device {where!r}: `sweep {experiment}` runs on {' or '.join(varied.devices)}")
    points = varied.points[kind]
    lengths = asked.sides(sizes or points.sizes)
    if varied.axis.key and len(lengths) > 1:
        raise ArgumentError(f"sizes {list(lengths)}: the {varied.axis.key} is varied at one size; give one")
    variants = _variants(varied, points, rungs, kind, lengths[0])
    like = asked.element_type(dtype, kind)
    asked.limit(how.seconds)
    if kind == "cuda":
        asked.no_threads(how.threads, where)
    return SweepPlan(variants, lengths, like, kind, replace(how, device=where))


def _variants(experiment: Experiment, points: Points, names: Sequence[str], kind: str, n: int) -> list[RungConfig]:
    """The rungs with the configs of the experiment; a rung that the experiment does not name runs in its own."""
    rungs, key = asked.rungs(names or [name for name, _ in points.variants], kind), experiment.axis.key
    listed = [
        (rung, config)
        for rung in rungs
        for config in [config for name, config in points.variants if name == rung.name] or [{}]
    ]
    if not key:
        return listed
    listed = [(varied(asked.registry(kind), rung, key), config) for rung, config in listed]
    return [(rung, {**config, key: value}) for rung, config in listed for value in points.values or sides(rung, n)]


def varied(ladder: tuple[Rung, ...], rung: Rung, key: str) -> Rung:
    """Return the rung. Raises ArgumentError if its config does not have the key."""
    if key not in rung.space:
        having = ", ".join(other.name for other in ladder if key in other.space)
        raise ArgumentError(f"rung {rung.name!r} has no {key} to vary; these have: {having}")
    return rung


def sides(rung: Rung, n: int) -> tuple[int, ...]:
    """Return the block sides of the rung's space up to the first that is at least n."""
    smaller = tuple(side for side in sorted(rung.space["block"]) if side < n)
    whole = tuple(side for side in sorted(rung.space["block"]) if side >= n)[:1]
    return smaller + whole


def _serves(rung: Rung, like: Work, device: str) -> bool:
    from gemmery.lab.on_cuda import product_for  # loads NVIDIA's bindings

    work = product_for(rung, 2048, like, device)
    return not rung.refusal(work.problem._replace(device=device))


def _vector(axis: Axis, like: Work, rung: Rung, side: int) -> Work:
    """Return x W' with a row-major W of n x k, of which the axis varies one side; the columns of B are contiguous."""
    n, k = (side, axis.fixed) if axis.side == "n" else (axis.fixed, side)
    return replace(like, m=1, n=n, k=k, batch=1, a_layout="row", b_layout="col")
