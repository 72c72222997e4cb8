"""ladder(): every rung at a few sizes, checked, and timed beside NumPy, on a GPU beside cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmery import dtypes
from gemmery.bench.record import Measurement, Run
from gemmery.bench.work import Work
from gemmery.cpu import threads as cpu_threads
from gemmery.errors import ArgumentError
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.gpu.climb import climb as gpu_climb
from gemmery.lab.gpu.session import ordinal
from gemmery.lab.level import Level, is_threaded, suited
from gemmery.lab.session import CpuSession
from gemmery.ladder.cpu import CPU
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import Rung, find

SIZES = (512, 1024, 2048)
GPU_SIZES = (1024, 2048, 4096)


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
    """Climb the ladder: each rung on square matrices, checked against the reference and timed beside NumPy.

    `rungs` are names, () for every one. `sizes` () takes SIZES, or GPU_SIZES. `threads` is what the threaded rungs
    may use, 0 for every core; the others run on one. `seconds` is how long one call of a rung may take: a slower
    one is not run but recorded with the reason in `refused`. `versus` of a measurement holds "numpy" and the rung's
    parent. A rung outside its error bound has `error` > 1.

    With `device` "cuda" or "cuda:N" it is the GPU's ladder, beside cuBLAS; "tf32" is a dtype there. Rungs that
    are not written for the dtype are left out unless they are named. `store` is as in `bench`.

    >>> run = ladder(["simd_row", "packed"], sizes=[256])  # doctest: +SKIP

    Raises ArgumentError for an unknown rung, dtype or device, or a size below 1, DeviceError for no such device.
    """
    gpu, ladder = ordinal(device), registry(device)
    chosen = tuple(find(ladder, name) for name in rungs) or ladder
    if gpu is None:
        every: list[tuple[Rung, Mapping[str, int]]] = [(rung, {}) for rung in chosen]
        return climb("ladder", every, sizes or SIZES, dtype, threads, seconds, on_event, store)
    like = element(dtype)
    check_arguments(sizes, like.dtype, seconds)
    check_of_gpu(dtype, threads, device)
    served: list[tuple[Rung, Mapping[str, int]]] = [(rung, {}) for rung in chosen if rungs or like.dtype in rung.dtypes]
    return gpu_climb("ladder", served, sizes or GPU_SIZES, like, gpu, seconds, on_event, store=store)


def check_of_gpu(dtype: str, threads: int, device: str) -> None:
    """Raises ArgumentError for what the CPU's ladder may be asked for and a GPU's may not."""
    known = dict.fromkeys(name for rung in CUDA for name in rung.dtypes)
    if element(dtype).dtype not in known:
        raise ArgumentError(f"dtype {dtype!r}: no rung on {device} is written for it; known: {', '.join(known)}, tf32")
    if threads:
        raise ArgumentError(f"threads={threads}: it is for rungs of the CPU; leave it out on {device}")


def registry(device: str) -> tuple[Rung, ...]:
    """The ladder of a device: "cpu", "cuda" or "cuda:N"."""
    return CPU if ordinal(device) is None else CUDA


def on_gpu(device: str) -> bool:
    """True for "cuda" and "cuda:N", False for "cpu". Raises ArgumentError for any other name."""
    try:
        return ordinal(device) is not None
    except ArgumentError as error:
        raise ArgumentError(f"{error}; or emulator, which needs none") from None


def element(dtype: str) -> Work:
    """A product of one element of a type, which on a GPU may be "tf32": f32 of which 10 bits of fraction are kept."""
    name = "f32" if dtype == "tf32" else dtype
    return Work(1, 1, 1, name, name, precision="tf32" if dtype == "tf32" else "")


def climb(
    suite: str,
    chosen: Sequence[tuple[Rung, Mapping[str, int]]],
    sizes: Sequence[int],
    dtype: str,
    threads: int,
    seconds: float,
    on_event: OnEvent,
    store: Path | None = None,
) -> Run:
    """Each (rung, config) at each size, smallest first: a rung's time at one size predicts the next."""
    check_arguments(sizes, dtype, seconds)
    threads = threads or cpu_threads.get()
    with CpuSession(len(chosen) * len(sizes), on_event, store) as session:
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
