"""ladder(): every rung at a few sizes, checked and timed in turn with NumPy, or with cuBLAS on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gemmery.bench.record import Measurement, Run
from gemmery.bench.work import Work
from gemmery.cpu import threads as cpu_threads
from gemmery.experiments import LADDER, Experiment
from gemmery.lab import asked
from gemmery.lab.event import OnEvent, ignore
from gemmery.ladder.rung import Rung
from gemmery.problem import Config

RungConfig = tuple[Rung, Config]  # a rung and the keys that differ from its default config
Shape = Callable[[Rung, int], Work]  # the product of a rung at a size
MEANT = {
    "direct": (64, 64, 64),
    "streamed": (8, 2048, 2048),
}  # where rungs that lose on large squares are meant to be used


@dataclass(frozen=True)
class Conditions:
    """Where rungs are measured, within which limits, and what becomes of the records.

    `threads` 0 is one for each core; `seconds` is the limit of a call.
    """

    device: str = "cpu"
    threads: int = 0
    seconds: float = 5.0
    on_event: OnEvent = ignore
    store: Path | None = None


PLAIN = Conditions()


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
    kind = "cpu" if asked.ordinal(device) is None else "cuda"
    every, dtype = asked.rungs(rungs, kind), asked.element_type(dtype, kind)
    if kind == "cuda":
        asked.no_threads(threads, device)
        every = tuple(rung for rung in every if rungs or element(dtype).dtype in rung.dtypes)
    how = Conditions(device, threads, seconds, on_event, store)
    return climb(LADDER, [(rung, {}) for rung in every], sizes or LADDER.points[kind].sizes, dtype, how)


def meant(rung: Rung, dtype: str) -> Work | None:
    """Return the product that a rung is meant for unless that is a large square; None for other rungs."""
    shape = MEANT.get(rung.name)
    return Work(*shape, dtype, dtype, name="meant for it") if shape else None


def element(dtype: str) -> Work:
    """Return a 1 x 1 x 1 product of an element type; "tf32" is f32 of which products keep 10 bits of fraction."""
    name = "f32" if dtype == asked.TF32 else dtype
    return Work(1, 1, 1, name, name, precision=asked.TF32 if dtype == asked.TF32 else "")


def expected(rungs: int, sizes: Sequence[int], kind: str, special: int = 0) -> str:
    """Return the number of measurements of a ladder or a sweep and the time they take, as text.

    `special` products are measured besides those of every size.
    """
    lengths = sizes or LADDER.points[kind].sizes
    each = {"cpu": 3.0, "cuda": 1.5}.get(kind)  # seconds of a rung at one size, with its check and its rival
    if each is None:  # compilation, then some 10**8 emulated operations per second
        each = sum(0.2 + 0.15 * (n / 256) ** 3 for n in lengths) / len(lengths)
        each += 0.0 if sizes else 0.5  # a predicted time of a larger product
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
    rungs: Sequence[RungConfig],
    sizes: Sequence[int],
    dtype: str = "f32",
    how: Conditions = PLAIN,
    shape: Shape | None = None,
) -> Run:
    """Measure each (rung, config) at each size, smallest first: a rung's time at one size predicts the next.

    `shape` makes the product of a rung at a size, by default the one that suits it: two squares if it takes them.
    """
    lengths, gpu = asked.sides(sizes), asked.ordinal(how.device)
    asked.limit(how.seconds)
    # Here, so that wrong arguments are reported before it is loaded.
    from gemmery.lab.session import Level, open_session, threads_of

    asked_for = cpu_threads.checked(how.threads) if how.threads else cpu_threads.get()
    like, threads = element(dtype), 0 if gpu is not None else asked_for
    special = [(rung, config, meant(rung, dtype)) for rung, config in rungs if experiment is LADDER and gpu is None]
    groups = [[(rung, config, work)] for rung, config, work in special if work]
    with open_session(gpu, len(rungs) * len(lengths) + len(groups), how.on_event, how.store) as session:
        product = shape or partial(session.backend.product_for, like=like)
        groups = [[(rung, config, product(rung, n)) for rung, config in rungs] for n in lengths] + groups
        for rung, _, work in next(iter(groups), []):  # the limits before any time
            plain = session.backend.blank(experiment.suite, rung.name, work, threads_of(rung, threads))
            session.backend.limits(plain, session.begin)
        before: dict[object, Measurement] = {}
        for group in groups:
            levels: dict[Work, Level] = {}
            try:
                for rung, config, work in group:
                    if work not in levels:
                        levels[work] = Level(session, experiment.suite, work, threads, how.seconds)
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
