"""sweep(): the experiments behind the ladder's curves, each of which varies one quantity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gemmery.bench import record
from gemmery.bench.record import Run
from gemmery.bench.work import Work
from gemmery.errors import ArgumentError
from gemmery.lab import asked
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.rungs import EMULATED_SIZES, climb, climb_on_gpu, element
from gemmery.ladder.rung import Rung

if TYPE_CHECKING:
    from gemmery.ladder.emulated import EmulatedLadder, EmulatedRung

Chosen = tuple[Rung, Mapping[str, int]]
OnRung = Callable[[str, int, int, "EmulatedRung | None"], None]  # as in emulated_ladder
MOST_EMULATED = 1024  # the largest side there

GEMV_CONFIGS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("gemv_thread", {}),
    ("gemv_thread_smem", {}),
    *(("gemv_warp", {"r": r, "smem": smem}) for smem in (0, 1) for r in (1, 2, 4, 8, 16)),
    ("gemv_vectorized", {}),
)


@dataclass(frozen=True)
class Experiment:
    """A quantity to vary: a key of the rungs' config, or a side of the product."""

    name: str
    about: str  # one line
    rungs: tuple[str, ...]
    sizes: tuple[int, ...]  # sides of the products; only one if a key is varied
    key: str = ""  # of the config; "" if a side is varied
    values: tuple[int, ...] = ()  # of the key, including some that a device cannot run
    devices: tuple[str, ...] = ("cuda",)


POWERS = tuple(2**power for power in range(13))
SIZE = Experiment(
    "size",
    "speed against n",
    ("simd_row", "simd_blocked", "direct", "packed"),
    (64, 128, 256, 512, 1024, 2048),
    devices=("cpu", "cuda"),
)
GPU_SIZE = replace(
    SIZE,
    rungs=("simt_naive", "simt_smem", "simt_vectorized", "simt_pipelined", "mma_f64", "mma_ldmatrix", "mma_pipelined"),
    sizes=(256, 512, 1024, 2048, 4096, 8192),
)
ALL = (
    SIZE,
    Experiment("block", "time against block side", ("simd_blocked",), (2048,), "block", devices=("cpu",)),
    Experiment("threads", "time against threads a block", ("simt_linear",), (4096,), "threads", (*POWERS[1:11], 2048)),
    Experiment("tile", "time against the side of a tile", ("simt_smem",), (4096,), "tile", (*POWERS[1:6], 64)),
    Experiment(
        "stages",
        "time against tiles in flight",
        ("simt_pipelined", "mma_f64", "mma_pipelined"),
        (4096,),
        "stages",
        (2, 3, 4, 5, 6, 8),
    ),
    Experiment("gemv", "y = W x: time against the length of y, K = 128", (), (*POWERS, 1000, 3000)),
    Experiment("gemv_k", "y = W x: time against K, N = 4096", (), tuple(32 << power for power in range(10))),
)
EXPERIMENTS = tuple(one.name for one in ALL)
AT_ONE_SIZE = tuple(one.name for one in ALL if one.key)
GEMV_K, GEMV_N = 128, 4096  # the fixed sides of `gemv` and `gemv_k`


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
    """Measure a curve of EXPERIMENTS, compared with NumPy, or with cuBLAS on a GPU.

    "size" varies n for some rungs, on the CPU unless `device` is "cuda". "block" varies the block of `simd_blocked`
    on the CPU. "threads" (per block of `simt_linear`), "tile" (of `simt_smem`) and "stages" (of the pipelined rungs)
    vary that key at one size on a GPU; a value that the device cannot run has its reason in `refused`. "gemv" and
    "gemv_k" run all variants of the rungs for y = W x, with N or K from `sizes`. `rungs` and `sizes` default to those
    of the experiment; `seconds` is the limit per call, as in `ladder`. `Measurement.config` has the varied key;
    `suite` is "sweep_" and the name of the experiment. `store` is as in `bench`.

    >>> run = sweep("block", sizes=[1024])  # doctest: +SKIP

    Raises ArgumentError for an unknown experiment, rung, dtype, size or device; DeviceError if there is no such device.
    """
    plan = planned(experiment, rungs, sizes, dtype, threads, seconds, device)
    suite = f"sweep_{experiment}"
    if plan.gpu is None:
        return climb(suite, plan.chosen, plan.sizes, plan.dtype, threads, seconds, on_event, store)
    chosen = plan.chosen
    if not rungs:  # those that take the type
        chosen = [(rung, config) for rung, config in chosen if _serves(rung, element(plan.dtype), plan.device)]
    shape = {"gemv": partial(_vector, k=GEMV_K), "gemv_k": partial(_vector, n=GEMV_N)}.get(experiment)
    return climb_on_gpu(suite, chosen, plan.sizes, plan.dtype, plan.gpu, seconds, on_event, shape, store)


def emulated_sweep(
    experiment: str,
    rungs: Sequence[str] = (),
    sizes: Sequence[int] = (),
    dtype: str = "f32",
    device: str = "",
    on_rung: OnRung = lambda *_: None,
) -> EmulatedLadder:
    """Count a sweep over a key of GPU rungs ("threads", "tile" or "stages") on the emulator, which needs no GPU.

    A record's `rung` includes its config: "simt_smem tile=8". `sizes` defaults to EMULATED_SIZES, `device` is a card.

    >>> [one.rung for one in emulated_sweep("tile", sizes=[32]).rungs][:2]
    ['simt_smem tile=2', 'simt_smem tile=4']

    Raises ArgumentError as `sweep` does, and for an experiment without a key.
    """
    from gemmery.lab.emulated import emulated_rung  # loads the emulator
    from gemmery.ladder.emulated import EmulatedLadder

    one = countable(experiment)
    card, (n, *more) = asked.emulated_card(device), asked.sides(sizes or EMULATED_SIZES, MOST_EMULATED)
    if more:
        raise ArgumentError(f"sizes {list(sizes)}: the {one.key} is varied at one size; give one")
    like, chosen = element(asked.element_type(dtype, "emulator")), _chosen(one, rungs, "emulator", n)
    chosen = [(rung, config) for rung, config in chosen if rungs or like.dtype in rung.dtypes]
    started, found = record.now(), list["EmulatedRung"]()
    for done, (rung, config) in enumerate(chosen):
        label = f"{rung.name} {one.key}={config[one.key]}"
        on_rung(label, done, len(chosen), None)
        counted = emulated_rung(rung, replace(like, m=n, n=n, k=n), card, config)
        found.append(replace(counted, rung=label, size=n))
        on_rung(label, done + 1, len(chosen), found[-1])
    return EmulatedLadder(card, started, tuple(found))


def countable(experiment: str) -> Experiment:
    """Return an experiment that the emulator can run. Raises ArgumentError for another."""
    one = _named(experiment)
    if not one.key or "cuda" not in one.devices:
        known = ", ".join(other.name for other in ALL if other.key and "cuda" in other.devices)
        raise ArgumentError(f"`sweep {experiment}` compares times, and the emulator only counts; it runs {known}")
    return one


@dataclass(frozen=True)
class Plan:
    """A sweep with checked arguments."""

    chosen: list[Chosen]
    sizes: tuple[int, ...]
    dtype: str
    device: str
    gpu: int | None  # number of the GPU, None on the CPU


def planned(
    experiment: str,
    rungs: Sequence[str],
    sizes: Sequence[int],
    dtype: str,
    threads: int,
    seconds: float,
    device: str,
) -> Plan:
    """Check the arguments of `sweep`. Raises its ArgumentErrors."""
    one = _named(experiment)
    where = device or one.devices[0]
    gpu = asked.ordinal(where)
    kind = "cpu" if gpu is None else "cuda"
    if kind not in one.devices:
        raise ArgumentError(f"device {where!r}: `sweep {experiment}` runs on {' or '.join(one.devices)}")
    if one is SIZE and kind == "cuda":
        one = GPU_SIZE
    lengths = asked.sides(sizes or one.sizes)
    if one.key and len(lengths) > 1:
        raise ArgumentError(f"sizes {list(lengths)}: the {one.key} is varied at one size; give one")
    chosen = _chosen(one, rungs, kind, lengths[0])
    like = asked.element_type(dtype, kind)
    asked.limit(seconds)
    if gpu is not None:
        asked.no_threads(threads, where)
    return Plan(chosen, lengths, like, where, gpu)


def _named(experiment: str) -> Experiment:
    for one in ALL:
        if one.name == experiment:
            return one
    close = get_close_matches(experiment, EXPERIMENTS, 1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise ArgumentError(f"experiment {experiment!r} is not known; {meant}known: {', '.join(EXPERIMENTS)}")


def _chosen(one: Experiment, names: Sequence[str], kind: str, n: int) -> list[Chosen]:
    """The rungs with the configs of the experiment."""
    variants = dict.fromkeys(name for name, _ in GEMV_CONFIGS)
    found = asked.rungs(names or one.rungs or tuple(variants), kind)
    if one.key:
        rungs = [varied(asked.registry(kind), rung, one.key) for rung in found]
        return [(rung, {one.key: value}) for rung in rungs for value in one.values or sides(rung, n)]
    if one.rungs:
        return [(rung, {}) for rung in found]
    return [
        (rung, config)
        for rung in found
        for config in [config for other, config in GEMV_CONFIGS if other == rung.name] or [{}]
    ]


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
    from gemmery.lab.gpu.level import suited  # loads NVIDIA's bindings

    if like.dtype not in rung.dtypes:
        return False
    work = suited(rung, 2048, like, device)
    return not rung.refuses(work.problem._replace(device=device))


def _vector(rung: Rung, side: int, like: Work, device: str, n: int = 0, k: int = 0) -> Work:
    """Return x W' with a row-major W of n x k, one of them `side`; the columns of B are contiguous."""
    return replace(like, m=1, n=n or side, k=k or side, batch=1, a_layout="row", b_layout="col")
