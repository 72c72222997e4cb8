"""ladder(): every rung at a few sizes, checked and timed in turn with NumPy, or with cuBLAS on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gemmery.bench.record import Measurement, Run
from gemmery.bench.work import Work
from gemmery.cpu import threads as cpu_threads
from gemmery.experiments import LADDER, Experiment
from gemmery.lab import asked
from gemmery.lab.event import OnEvent, ignore
from gemmery.ladder.rung import Rung

Shape = Callable[[Rung, int, Work, str], Work]
RungConfig = tuple[Rung, Mapping[str, int]]  # a rung and the keys that differ from its default config


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

    `rungs` are names, all by default. `sizes` defaults to those of `experiments.LADDER`. `threads` is the number of
    threads of threaded rungs, 0 for one per core; the other rungs run on one. Rungs predicted to exceed `seconds` per
    call do not run; their records have the reason in `refused`. `versus` of a measurement has the ratios to "numpy"
    and to the rung's parent. A rung outside its error bound has `error` > 1.

    `device` "cuda" or "cuda:N" runs the GPU ladder, compared with cuBLAS; it also accepts the dtype "tf32". Rungs
    for other dtypes are left out unless they are named. `store` is as in `bench`.

    >>> run = ladder(["simd_row", "packed"], sizes=[256])  # doctest: +SKIP

    Raises ArgumentError for an unknown rung, dtype or device, and for a size below 1; DeviceError if there is no such
    device.
    """
    gpu = asked.ordinal(device)
    kind = "cpu" if gpu is None else "cuda"
    chosen, like = asked.rungs(rungs, kind), asked.element_type(dtype, kind)
    every: list[RungConfig] = [(rung, {}) for rung in chosen]
    sizes = sizes or LADDER.points[kind].sizes
    if gpu is None:
        return climb(LADDER, every, sizes, like, threads, seconds, on_event, store)
    asked.no_threads(threads, device)
    served = [(rung, config) for rung, config in every if rungs or element(like).dtype in rung.dtypes]
    return climb_on_gpu(LADDER, served, sizes, like, gpu, seconds, on_event, store=store)


def element(dtype: str) -> Work:
    """Return a 1 x 1 x 1 product of an element type; "tf32" is f32 of which products keep 10 bits of fraction."""
    name = "f32" if dtype == asked.TF32 else dtype
    return Work(1, 1, 1, name, name, precision=asked.TF32 if dtype == asked.TF32 else "")


def climb_on_gpu(
    experiment: Experiment,
    chosen: Sequence[RungConfig],
    sizes: Sequence[int],
    dtype: str,
    device: int,
    seconds: float,
    on_event: OnEvent,
    shape: Shape | None = None,
    store: Path | None = None,
) -> Run:
    """Measure each (rung, config) at each size on a GPU; `shape` makes the products, two squares by default."""
    from gemmery.lab.gpu.climb import climb as gpu_climb  # loads NVIDIA's bindings
    from gemmery.lab.gpu.level import suited as gpu_suited

    lengths = asked.sides(sizes)
    asked.limit(seconds)
    return gpu_climb(
        experiment.suite, chosen, lengths, element(dtype), device, seconds, on_event, shape or gpu_suited, store
    )


def expected(rungs: int, sizes: Sequence[int], kind: str, special: int = 0) -> str:
    """Return the number of measurements of a ladder or a sweep and the time they take, as text.

    `special` products are measured besides those of every size.
    """
    lengths = sizes or LADDER.points[kind].sizes
    each = {"cpu": 3.0, "cuda": 1.5}.get(kind)  # seconds of a rung at one size, with its check and its rival
    if each is None:  # compilation, then some 10**8 emulated operations per second
        each = sum(0.2 + 0.15 * (n / 256) ** 3 for n in lengths) / len(lengths)
    return estimate(rungs * len(lengths) + special, each)


def estimate(measurements: int, each: float) -> str:
    """Return a number of measurements and their time as text, with `each` taking so many seconds.

    >>> estimate(33, 3.0), estimate(1, 3.0), estimate(60, 9.0)
    ('33 measurements, about 100 s', '1 measurement, about 3 s', '60 measurements, about 9 min')
    """
    seconds = max(measurements * each, 1.0)
    about = f"{seconds / 60:.0f} min" if seconds > 150 else f"{round(seconds, -1 if seconds > 20 else None):.0f} s"
    return f"{measurements} measurement{'s' * (measurements != 1)}, about {about}"


def climb(
    experiment: Experiment,
    chosen: Sequence[RungConfig],
    sizes: Sequence[int],
    dtype: str,
    threads: int,
    seconds: float,
    on_event: OnEvent,
    store: Path | None = None,
) -> Run:
    """Measure each (rung, config) at each size, smallest first: a rung's time at one size predicts the next."""
    from gemmery.lab.level import (  # here, so that wrong arguments are reported before it is loaded
        Level,
        is_threaded,
        meant,
        suited,
    )
    from gemmery.lab.session import CpuSession

    lengths = asked.sides(sizes)
    asked.limit(seconds)
    threads = threads or cpu_threads.get()
    ladder = asked.registry("cpu")
    special = [(rung, config, work) for rung, config in chosen if experiment is LADDER and (work := meant(rung, dtype))]
    with CpuSession(len(chosen) * len(lengths) + len(special), on_event, store) as session:
        for used in {threads if is_threaded(rung) else 1 for rung, _ in chosen}:
            session.limits(dtype, used)
        before: dict[int, Measurement] = {}
        for n in lengths:
            levels: dict[Work, Level] = {}
            try:
                for index, (rung, config) in enumerate(chosen):
                    work = suited(rung, n, dtype)
                    if work not in levels:
                        levels[work] = Level(session, experiment.suite, work, threads, seconds, ladder)
                    session.begin(f"{rung.name}, {work}")
                    m = levels[work].measure(rung, config, before.get(index))
                    if not m.refused:
                        before[index] = m
                    session.end(m)
            finally:  # also after Ctrl-C: the rungs so far were timed in turn with them
                for level in levels.values():
                    session.add(*level.rivals())
        for rung, config, work in special:
            level = Level(session, experiment.suite, work, threads, seconds, ladder)
            session.begin(f"{rung.name}, {work}")
            session.end(level.measure(rung, config, None))
            session.add(*level.rivals())
        return session.run
