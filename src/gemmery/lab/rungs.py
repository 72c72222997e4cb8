"""ladder(): every rung at a few sizes, checked, and timed beside NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gemmery import dtypes
from gemmery.bench.record import Measurement, Run
from gemmery.bench.work import Work
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import ArgumentError
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.level import Level, is_threaded, suited
from gemmery.lab.session import Session
from gemmery.ladder.cpu import CPU
from gemmery.ladder.rung import Rung, find


def ladder(
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (512, 1024, 2048),
    dtype: str = "f32",
    threads: int = 0,
    seconds: float = 5.0,
    on_event: OnEvent = ignore,
) -> Run:
    """Climb the ladder: each rung on square matrices, checked against the reference and timed beside NumPy.

    `rungs` are names, () for every one. `threads` is what the threaded rungs may use, 0 for every core; the
    others run on one. `seconds` is how long one call of a rung may take: a slower one is not run but recorded
    with the reason in `refused`. `versus` of a measurement holds "numpy" and the rung's parent. A rung outside
    its error bound has `error` > 1.

    >>> run = ladder(["simd_row", "packed"], sizes=[256])  # doctest: +SKIP

    Raises ArgumentError for an unknown rung, dtype or size below 1.
    """
    chosen = tuple(find(CPU, name) for name in rungs) or CPU
    return climb("ladder", [(rung, {}) for rung in chosen], sizes, dtype, threads, seconds, on_event)


def climb(
    suite: str,
    chosen: Sequence[tuple[Rung, Mapping[str, int]]],
    sizes: Sequence[int],
    dtype: str,
    threads: int,
    seconds: float,
    on_event: OnEvent,
) -> Run:
    """Each (rung, config) at each size, smallest first: a rung's time at one size predicts the next."""
    check_arguments(sizes, dtype, seconds)
    threads = threads or cpu_threads.get()
    with Session(len(chosen) * len(sizes), on_event) as session:
        for used in {threads if is_threaded(rung) else 1 for rung, _ in chosen}:
            session.limits(dtype, used)
        before: dict[int, Measurement] = {}
        for n in sorted(sizes):
            levels: dict[Work, Level] = {}
            for index, (rung, config) in enumerate(chosen):
                work = suited(rung, n, dtype)
                if work not in levels:
                    levels[work] = Level(session, suite, work, threads, seconds, CPU)
                session.begin(f"{rung.name}, {work}")
                m = levels[work].measure(rung, config, before.get(index))
                if not m.refused:
                    before[index] = m
                session.end(m)
            for level in levels.values():
                session.add(*level.rivals())
        return session.run


def check_arguments(sizes: Sequence[int], dtype: str, seconds: float) -> None:
    """Raise ArgumentError for a size, an element type or a limit that makes no sense."""
    for n in sizes:
        if n < 1:
            raise ArgumentError(f"size {n!r}: a side must be a whole number >= 1")
    if dtype not in dtypes.NAMES:
        raise ArgumentError(f"dtype {dtype!r} is not served; known: {', '.join(dtypes.NAMES)}")
    if not seconds > 0:
        raise ArgumentError(f"seconds={seconds}: the limit of a call must be above 0")
