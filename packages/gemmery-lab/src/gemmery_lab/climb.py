"""ladder() and sweep(): rungs or variants of them at a few sizes, checked and timed in turn with a vendor's library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path

from gemmery.cpu import threads as cpu_threads
from gemmery.errors import ArgumentError, DeviceError, brief
from gemmery.ladder.rung import Rung
from gemmery.problem import Config
from gemmery_lab import asked, experiments
from gemmery_lab.experiments import LADDER, SWEEPS, Axis, Experiment
from gemmery_lab.measure.record import Measurement, OnEvent, Run, ignore
from gemmery_lab.measure.work import Work

RungConfig = tuple[Rung, Config]  # a rung and the keys that differ from its default config
Shape = Callable[[Rung, int], Work]  # the product of a rung at a size
MEANT = {"direct": (64, 64, 64), "streamed": (8, 2048, 2048)}  # where rungs that lose on large squares are used
MOST_EMULATED = 1024  # a side: the longest rung takes half a minute there


@dataclass(frozen=True)
class RungPlan:
    """A ladder or a sweep with checked arguments. Raises ArgumentError for what no device can run."""

    variants: list[RungConfig]
    sizes: tuple[int, ...]
    dtype: str  # "" for the type that suits each rung
    kind: str  # of the device: "cpu", "cuda" or "emulator"
    device: str
    threads: int = 0  # 0 for one on each core
    seconds: float = 5.0  # the limit of a call

    def __post_init__(self) -> None:
        for rung, config in self.variants:
            if not isinstance(rung, Rung):
                raise ArgumentError(f"rung {brief(rung)}: a plan has rungs, as find(CPU, 'packed') returns them")
            asked.keys(rung, config)
        if self.kind != "emulator" and (asked.ordinal(self.device) is None) != (self.kind == "cpu"):
            raise ArgumentError(
                f"device {self.device!r} is none of kind {brief(self.kind)}: pass a kind and its device"
            )
        dtype = asked.element_type(self.dtype, self.kind) if self.dtype or self.kind != "emulator" else ""
        if not self.seconds > 0:
            raise ArgumentError(f"seconds={self.seconds}: the time limit must be above 0")
        if self.kind != "cpu" and self.threads:
            raise ArgumentError(f"threads={self.threads}: only rungs on the CPU take it; leave it out on {self.device}")
        object.__setattr__(self, "sizes", asked.sides(self.sizes, MOST_EMULATED if self.kind == "emulator" else 0))
        object.__setattr__(self, "dtype", dtype)


def planned(
    experiment: Experiment, rungs: Sequence[str], sizes: Sequence[int], dtype: str,
    device: str, threads: int = 0, seconds: float = 5.0, kind: str = "",
) -> RungPlan:  # fmt: skip
    """Check the arguments of `ladder` and `sweep`, or of these on the emulator; raise their ArgumentErrors.

    The device "" is the first of the experiment. The `kind` of device follows from its name unless it is "emulator".
    """
    where = device or experiment.devices[0]
    kind = kind or ("cpu" if asked.ordinal(where) is None else "cuda")
    if kind not in experiment.points and kind == "emulator":
        known = ", ".join(other.name for other in SWEEPS if kind in other.points)
        raise ArgumentError(f"`sweep {experiment.name}` compares times, and the emulator only counts; it runs {known}")
    if kind not in experiment.points:
        raise ArgumentError(f"device {where!r}: `sweep {experiment.name}` runs on {' or '.join(experiment.devices)}")
    points, key = experiment.points[kind], experiment.axis.key
    every = asked.rungs(rungs or [name for name, _ in points.variants], kind)
    lengths = tuple(sizes or points.sizes)
    if key and len(set(lengths)) > 1:
        raise ArgumentError(f"sizes {sorted(set(lengths))}: the {key} is varied at one size; give one")
    own = {rung.name: [config for name, config in points.variants if name == rung.name] for rung in every}
    configs = [(rung, config) for rung in every for config in own[rung.name] or [{}]]
    if key:
        for rung in every:
            if key not in rung.space:
                having = ", ".join(other.name for other in asked.registry(kind) if key in other.space)
                raise ArgumentError(f"rung {rung.name!r} has no {key} to vary; these have: {having}")
        n, values = lengths[0], points.values
        configs = [(rung, {**config, key: value}) for rung, config in configs for value in values or blocks(rung, n)]
    plan = RungPlan(configs, lengths, dtype, kind, where, threads, seconds)
    if kind == "cpu" or rungs or not plan.dtype:
        return plan
    takes = element(plan.dtype).dtype  # rungs for other element types are left out
    return replace(plan, variants=[(rung, config) for rung, config in configs if takes in rung.dtypes])


def ladder(
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "f32",
    threads: int = 0,
    seconds: float = 5.0,
    on_event: OnEvent = ignore,
    device: str = "cpu",
    store: Path | None = None,
) -> Run:
    """Run the ladder: check each rung on square matrices against the reference, and time it in turn with NumPy.

    `rungs` are names, all by default. `threads` is that of threaded rungs, 0 for one per core. Rungs that would exceed
    `seconds` per call do not run; their records have the reason in `refused`. `versus` of a measurement has the ratios
    to "numpy" and to the rung's parent. A rung outside its error bound has `error` > 1.

    `device` "cuda" or "cuda:N" runs the GPU ladder, compared with cuBLAS; it also accepts the dtype "tf32". Rungs
    for other dtypes are left out unless they are named. `store` is as in `bench`.

    >>> run = ladder(["simd_row", "packed"], sizes=[256])  # doctest: +SKIP

    Raises ArgumentError for an unknown name, and for a size below 1; DeviceError if there is no such device.
    """
    return climb(LADDER, planned(LADDER, rungs, sizes, dtype, device, threads, seconds), on_event, store)


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
    """Measure a sweep of gemmery_lab.experiments, compared with NumPy, or with cuBLAS on a GPU.

    "size" varies n for some rungs, on the CPU unless `device` is "cuda". "block" varies the block of `simd_blocked`
    on the CPU. "threads" (per block of `simt_linear`), "tile" (of `simt_smem`) and "stages" (of the pipelined rungs)
    vary that key at one size on a GPU; a value that the device cannot run has its reason in `refused`. "gemv" and
    "gemv_k" run all variants of the rungs for y = W x, with N or K from `sizes`. `rungs` and `sizes` default to those
    of the experiment. `Measurement.config` has the varied key. The rest is as in `ladder`.

    >>> run = sweep("block", sizes=[1024])  # doctest: +SKIP
    """
    varied = experiments.sweep(experiment)
    plan = planned(varied, rungs, sizes, dtype, device, threads, seconds)
    like, where = element(plan.dtype), plan.device
    if plan.kind == "cuda" and not rungs:
        from gemmery_lab.on_cuda import product_for  # loads NVIDIA's bindings

        problems = [product_for(rung, 2048, like, where).problem._replace(device=where) for rung, _ in plan.variants]
        suits = [not rung.refusal(problem) for (rung, _), problem in zip(plan.variants, problems, strict=True)]
        plan = replace(plan, variants=[*compress(plan.variants, suits)])
    try:
        return climb(varied, plan, on_event, store, partial(_vector, varied.axis, like) if varied.axis.fixed else None)
    except DeviceError as error:
        way = f"sweep {experiment}" if "emulator" in varied.points else "ladder"
        raise DeviceError(f"{error}; `gemmery {way}` on the device emulator counts what rungs do without one") from None


def meant(rung: Rung, dtype: str) -> Work | None:
    """Return the product that a rung is meant for unless that is a large square; None for other rungs."""
    shape = MEANT.get(rung.name)
    return Work(*shape, dtype, dtype, name="meant for it") if shape else None


def element(dtype: str) -> Work:
    """Return a 1 x 1 x 1 product of an element type; "tf32" is f32 of which products keep 10 bits of fraction."""
    name = "f32" if dtype == asked.TF32 else dtype
    return Work(1, 1, 1, name, name, precision=asked.TF32 if dtype == asked.TF32 else "")


def expected(plan: RungPlan, special: int = 0, larger: bool = False) -> str:
    """Return the number of measurements of a ladder or a sweep and the time they take, as text.

    `special` products are measured besides those of every size. The emulator also predicts times of `larger` ones.
    """
    each = {"cpu": 3.0, "cuda": 1.5}.get(plan.kind)  # seconds of a rung at one size, with its check and its rival
    if each is None:  # compilation, then some 10**8 emulated operations per second
        each = sum(0.2 + 0.15 * (n / 256) ** 3 for n in plan.sizes) / len(plan.sizes)
        each += 1.0 * larger  # of two processes
    return estimate(len(plan.variants) * len(plan.sizes) + special, each)


def estimate(measurements: int, each: float) -> str:
    """Return a number of measurements and their time as text, with `each` taking so many seconds.

    >>> estimate(33, 3.0), estimate(1, 3.0), estimate(60, 9.0)
    ('33 measurements, about 100 s', '1 measurement, about 3 s', '60 measurements, about 9 min')
    """
    seconds = max(measurements * each, 1.0)
    about = f"{seconds / 60:.0f} min" if seconds > 150 else f"{round(seconds, -1 if seconds > 20 else None):.0f} s"
    return f"{measurements} measurement{'s' * (measurements != 1)}, about {about}"


def climb(
    experiment: Experiment, plan: RungPlan, on_event: OnEvent = ignore, store: Path | None = None,
    shape: Shape | None = None,
) -> Run:  # fmt: skip
    """Measure each (rung, config) at each size, smallest first: a rung's time at one size predicts the next.

    `shape` makes the product of a rung at a size, by default the one that suits it: two squares if it takes them.
    """
    rungs, lengths, dtype, gpu = plan.variants, plan.sizes, plan.dtype, asked.ordinal(plan.device)
    # Here, so that wrong arguments are reported before it is loaded.
    from gemmery_lab.session import Level, open_session, threads_of

    asked_for = cpu_threads.checked(plan.threads) if plan.threads else cpu_threads.get()
    like, threads = element(dtype), 0 if gpu is not None else asked_for
    special = [(rung, config, meant(rung, dtype)) for rung, config in rungs if experiment is LADDER and gpu is None]
    alone = [[(rung, config, work)] for rung, config, work in special if work]
    with open_session(gpu, len(rungs) * len(lengths) + len(alone), on_event, store) as session:
        shape = shape or partial(session.backend.product_for, like=like)
        groups = [*([(rung, config, shape(rung, n)) for rung, config in rungs] for n in lengths), *alone]
        for rung, _, work in groups[0] if groups else ():  # the limits before any time
            plain = session.backend.blank(experiment.suite, rung.name, work, threads_of(rung, threads))
            session.backend.limits(plain, session.begin)
        before: dict[object, Measurement] = {}
        for group in groups:
            levels: dict[Work, Level] = {}
            try:
                for rung, config, work in group:
                    if work not in levels:
                        levels[work] = Level(session, experiment.suite, work, threads, plan.seconds)
                    session.begin(f"{rung.name}, {work}")
                    same = rung.name, tuple(config.items()), work.name
                    m = levels[work].measure(rung, config, before.get(same))
                    if not m.refused:
                        before[same] = m
                    session.end(m)
            finally:  # also after Ctrl-C: the rungs so far were timed in turn with them
                for level in levels.values():
                    session.add(*level.rivals())
        return session.run


def blocks(rung: Rung, n: int) -> tuple[int, ...]:
    """Return the block sides of the rung's space up to the first that is at least n."""
    sides = sorted(rung.space["block"])
    return tuple(sides[: 1 + sum(side < n for side in sides)])


def _vector(axis: Axis, like: Work, rung: Rung, side: int) -> Work:
    """Return x W' with a row-major W of n x k, of which the axis varies one side; the columns of B are contiguous."""
    n, k = (side, axis.fixed) if axis.side == "n" else (axis.fixed, side)
    return replace(like, m=1, n=n, k=k, batch=1, a_layout="row", b_layout="col")
