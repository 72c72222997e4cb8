"""sweep(): one quantity varied, everything else held: the experiments behind the ladder's curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gemmery.bench.record import Run
from gemmery.bench.work import Work
from gemmery.errors import ArgumentError
from gemmery.lab.event import OnEvent, ignore
from gemmery.lab.gpu.climb import climb as gpu_climb
from gemmery.lab.gpu.level import suited
from gemmery.lab.gpu.session import ordinal
from gemmery.lab.rungs import check_arguments, check_of_gpu, climb, element, registry
from gemmery.ladder.rung import Rung, find

Chosen = tuple[Rung, Mapping[str, int]]

GEMV_CONFIGS: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("gemv_thread", {}),
    ("gemv_thread_smem", {}),
    *(("gemv_warp", {"r": r, "smem": smem}) for smem in (0, 1) for r in (1, 2, 4, 8, 16)),
    ("gemv_vectorized", {}),
)


@dataclass(frozen=True)
class Experiment:
    """One quantity that is varied: a key of the rungs' config, or a side of the product."""

    name: str
    about: str  # in a line, for the command's help
    rungs: tuple[str, ...]
    sizes: tuple[int, ...]  # sides of the products; one where a key is varied
    key: str = ""  # of the config; "" where a side is varied
    values: tuple[int, ...] = ()  # of the key, some of them beyond what a device can run
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
GEMV_K, GEMV_N = 128, 4096  # what `gemv` and `gemv_k` hold


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
    """Measure a curve of EXPERIMENTS beside NumPy, on a GPU beside cuBLAS.

    "size" is time against n for chosen rungs, on the CPU unless `device` says "cuda". "block" varies the block of
    `simd_blocked` on the CPU; "threads" (a block of `simt_linear`), "tile" (of `simt_smem`) and "stages" (of the
    pipelined rungs) vary that key on a GPU, at one size, also beyond what the device can run: such a record has its
    reason in `refused`. "gemv" and "gemv_k" run every variant of the rungs for y = W x, of N or K = `sizes`.
    `rungs` and `sizes` () take the experiment's own; `seconds` is the limit of one call, as in `ladder`. What is
    varied stands in `Measurement.config`; the `suite` is "sweep_" and the experiment's name. `store` is as in `bench`.

    >>> run = sweep("block", sizes=[1024])  # doctest: +SKIP

    Raises ArgumentError for an unknown experiment, rung, dtype, size or device; DeviceError for no such device.
    """
    one = _named(experiment)
    where = device or one.devices[0]
    gpu = ordinal(where)
    kind = "cpu" if gpu is None else "cuda"
    if kind not in one.devices:
        raise ArgumentError(f"device {where!r}: `sweep {experiment}` runs on {' or '.join(one.devices)}")
    if one is SIZE and kind == "cuda":
        one = GPU_SIZE
    if one.key and len(sizes) > 1:
        raise ArgumentError(f"sizes {list(sizes)}: the {one.key} is varied at one size; give one")
    lengths, suite = tuple(sizes) or one.sizes, f"sweep_{experiment}"
    chosen = _chosen(one, rungs, where, lengths[0])
    if gpu is None:
        return climb(suite, chosen, lengths, dtype, threads, seconds, on_event, store)
    like = element(dtype)
    check_arguments(lengths, like.dtype, seconds)
    check_of_gpu(dtype, threads, where)
    if not rungs:  # those that serve the type
        chosen = [(rung, config) for rung, config in chosen if _serves(rung, like, where)]
    shape = {"gemv": partial(_vector, k=GEMV_K), "gemv_k": partial(_vector, n=GEMV_N)}.get(experiment, suited)
    return gpu_climb(suite, chosen, lengths, like, gpu, seconds, on_event, shape, store)


def _named(experiment: str) -> Experiment:
    for one in ALL:
        if one.name == experiment:
            return one
    raise ArgumentError(f"experiment {experiment!r} is not known; known: {', '.join(EXPERIMENTS)}")


def _chosen(one: Experiment, names: Sequence[str], device: str, n: int) -> list[Chosen]:
    """Rungs with the configs that the experiment gives them."""
    ladder = registry(device)
    if one.key:
        rungs = [varied(ladder, name, one.key) for name in names or one.rungs]
        return [(rung, {one.key: value}) for rung in rungs for value in one.values or sides(rung, n)]
    if one.rungs:
        return [(find(ladder, name), {}) for name in names or one.rungs]
    variants = dict.fromkeys(name for name, _ in GEMV_CONFIGS)
    return [
        (find(ladder, name), config)
        for name in names or variants
        for config in [config for other, config in GEMV_CONFIGS if other == name] or [{}]
    ]


def varied(ladder: tuple[Rung, ...], name: str, key: str) -> Rung:
    """The rung called `name`, whose config must have the key that is varied."""
    rung = find(ladder, name)
    if key not in rung.space:
        having = ", ".join(other.name for other in ladder if key in other.space)
        raise ArgumentError(f"rung {name!r} has no {key} to vary; these have: {having}")
    return rung


def sides(rung: Rung, n: int) -> tuple[int, ...]:
    """The block sides worth trying at size n: those of the rung's space up to the first that holds the whole matrix."""
    smaller = tuple(side for side in sorted(rung.space["block"]) if side < n)
    whole = tuple(side for side in sorted(rung.space["block"]) if side >= n)[:1]
    return smaller + whole


def _serves(rung: Rung, like: Work, device: str) -> bool:
    if like.dtype not in rung.dtypes:
        return False
    work = suited(rung, 2048, like, device)
    return not rung.refuses(replace(work.problem, device=device))


def _vector(rung: Rung, side: int, like: Work, device: str, n: int = 0, k: int = 0) -> Work:
    """x W' with W of n x k row by row, one of them `side`: columns of B are contiguous."""
    return replace(like, m=1, n=n or side, k=k or side, batch=1, a_layout="row", b_layout="col")
