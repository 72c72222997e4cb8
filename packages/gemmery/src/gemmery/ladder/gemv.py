"""The rungs for matrix-vector products, y = W x, with m or n equal to 1."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gemmery import dtypes
from gemmery.cuda.device import GRID, WARP
from gemmery.cuda.geometry import Geometry, instance, sum_size, target, template, vector
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import gpu_rung
from gemmery.ladder.rung import without_vector
from gemmery.problem import Config, Problem

_COLUMNS, _FINISH = "gemv_columns", "gemv_finish"  # kernels of gemv_vectorized for columns of W, and for parts of k
_LARGEST_TEAM = 1024  # threads of a block
_MOST_CHUNKS = 8  # of 16 bytes, in flight in a thread
_MOST_SPLIT = 64  # blocks that share k
_BLOCKS = 128  # enough to keep a large device busy
_LINE = 128  # bytes of memory requested together
# Blocks of 512 threads with all of k from which an H200 runs some multiprocessors longer than others: half as
# many, for twice the columns and half of k each, take 0.74 of the time at 32000 x 4096, but 1.06 at 17000 x 3000.
_UNEVEN = 300


def _is_column(problem: Problem) -> bool:
    """Return True if C is a column, so that the matrix is A; if C is a row, the matrix is B transposed."""
    return problem.n == 1


def _results(problem: Problem) -> int:
    """Return the number of elements of y."""
    return problem.m if _is_column(problem) else problem.n


def _thread(name: str, problem: Problem, config: Config) -> Geometry:
    """One thread per result; with a `tile` in the config, x comes by such tiles into shared memory."""
    kernel = instance(name, problem, _is_column(problem), *([config["tile"]] if "tile" in config else []))
    return Geometry(f"{name}.cu", kernel, *_grid(problem, config["threads"], config["threads"]))


def _warp(name: str, problem: Problem, config: Config) -> Geometry:
    """One warp per `r` results; `smem` 1 keeps x in shared memory.

    Raises RefusedError if `r` does not divide the 32 lanes, or the threads are not whole warps.
    """
    r, threads, smem = config["r"], config["threads"], bool(config["smem"])
    if r not in (1, 2, 4, 8, 16):
        raise RefusedError(f"r = {r}: 32 lanes are shared by 1, 2, 4, 8 or 16 results; for 32 use gemv_thread")
    if threads % WARP:
        raise RefusedError(f"{threads} threads per block: shuffles need whole warps; use a multiple of 32")
    kernel = instance(name, problem, _is_column(problem), r, smem, config["tile"] if smem else 1)
    return Geometry(f"{name}.cu", kernel, *_grid(problem, threads // WARP * r, threads))


def _grid(problem: Problem, each: int, threads: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the grid for all results, `each` per block, and every product of the batch, and the threads of a block."""
    return (-(-_results(problem) // each), min(problem.batch, GRID[1]), 1), (threads, 1, 1)


def _vectorized(name: str, problem: Problem, config: Config) -> Geometry:
    """16-byte loads along the contiguous side of W; zeros of the config are chosen by the shape.

    Raises RefusedError for numbers of threads that are not powers of two, or too many for a block.
    """
    for key, value in config.items():
        if value & (value - 1):
            raise RefusedError(f"{key} = {value}: threads and rows are divided by halves; use a power of two, or 0")
    return _columns(problem, config) if _by_columns(problem) else _rows(name, problem, config)


def _by_columns(problem: Problem) -> bool:
    """Return True if columns of W are contiguous and have more than one element."""
    layout, contiguous = (problem.a_layout, "col") if _is_column(problem) else (problem.b_layout, "row")
    return layout == contiguous and _results(problem) > 1


def _rows(name: str, problem: Problem, config: Config) -> Geometry:
    vec, rows_in_all = _chunk(problem), _results(problem) * problem.batch
    chunks = max(1, problem.k // vec)
    team = config["team"] or _team(chunks, rows_in_all)
    split = config["split"] or _split(chunks // (4 * team), rows_in_all)
    rows = config["rows"] or 1
    steps = config["steps"] or min(_power_above(-(-chunks // (team * split))), 2)
    if not rows <= team <= _LARGEST_TEAM:
        raise RefusedError(
            f"rows = {rows}, team = {team}: each member stores a row, so rows <= team <= {_LARGEST_TEAM}"
        )
    if rows * steps > _MOST_CHUNKS:
        raise RefusedError(f"rows = {rows}, steps = {steps}: at most {_MOST_CHUNKS} chunks fit a thread's registers")
    threads = max(team, config["threads"] or (128 if rows_in_all * team < 1 << 14 else 256))
    parameters = (vec, _cover(problem.k, vec * team * split * steps, vec), team, rows, steps, threads)
    return _launches(problem, config, name, parameters, threads // team * rows, threads, split)


def _overlaps(problem: Problem, config: Config, blocks: int, threads: int) -> bool:
    """Return True if the launch may start while the previous one ends: from sm_90 on, if all its blocks run at once.

    Otherwise its blocks would take places from the previous launch (f16, 4096 x 4096: 9.7 us instead of 9.1).
    """
    if not config["overlap"] or problem.device == "cpu":
        return False
    device = target(problem)
    return device.capability >= 90 and blocks * threads <= device.sms * device.limits.warps_sm * WARP


def _chunk(problem: Problem) -> int:
    """Return the elements of a row of W, and of x, per access; the kernel itself checks an x that is a column."""
    if _is_column(problem):
        return vector(problem, 0) if problem.a_layout == "row" else 1
    return min(vector(problem, 0), vector(problem, 1)) if problem.a_layout == "row" and problem.b_layout == "col" else 1


def _cover(k: int, step: int, vec: int) -> str:
    """Return the Cover of gemv_vectorized.cu: whether steps of `step` elements end with k, or one step is all of k."""
    return "PARTS" if vec == 1 or k % step else "ONCE" if k == step else "WHOLE"


def _columns(problem: Problem, config: Config) -> Geometry:
    vec, in_all = vector(problem, 0 if _is_column(problem) else 1), _results(problem) * problem.batch
    size = dtypes.get(problem.dtype).size
    lanes = config["team"] or min(32, _LINE // (vec * size))
    if not config["team"] and lanes == 8 and size == 2 and problem.batch == 1 and in_all > _UNEVEN * lanes * vec:
        lanes = 16
    if lanes > 32:
        raise RefusedError(f"team = {lanes}: with contiguous columns a team is part of a warp; use at most 32")
    steps = config["steps"] or 2
    threads = config["threads"] or max(64, min(512, _power_above(problem.k) * lanes // steps))
    split = config["split"] or _split(problem.k // 256, -(-in_all // (lanes * vec)), 4 * _BLOCKS)
    parameters = (vec, lanes, steps, threads // WARP)
    return _launches(problem, config, _COLUMNS, parameters, lanes * vec, threads, split)


def _split(most: int, blocks: int, enough: int = _BLOCKS) -> int:
    """Return how many blocks share k if there are few: another launch adds up, so each needs plenty of work."""
    split = 1
    while split < _MOST_SPLIT and 2 * split <= most and 2 * split * blocks <= enough:
        split *= 2
    return split


def _launches(
    problem: Problem, config: Config, name: str, parameters: tuple[object, ...], each: int, threads: int, split: int
) -> Geometry:
    """The kernel, and the one that adds up the parts of k if there are several."""
    blocks, block = _grid(problem, each, threads)
    overlaps = _overlaps(problem, config, blocks[0] * blocks[1] * split, threads)
    launch = template("GemvLaunch", _is_column(problem), problem.batch > 1, split > 1, overlaps)
    kernel = instance(name, problem, launch, *parameters)
    product = Geometry(f"{name}.cu", kernel, blocks, block, overlaps=overlaps)
    if split == 1:
        return product
    lanes = min(32, split)
    return Geometry(
        f"{_FINISH}.cu",
        instance(_FINISH, problem, _is_column(problem), split, lanes),
        *_grid(problem, 128 // lanes, 128),
        workspace=_results(problem) * problem.batch * split * sum_size(problem),
        before=(replace(product, grid=(blocks[0], blocks[1], split)),),
    )


def _team(chunks: int, rows_in_all: int) -> int:
    """Return the threads per row: two chunks each, in whole cache lines, up to 256; more if rows are few."""
    most = 256
    while most < _LARGEST_TEAM and 2 * most * rows_in_all <= _BLOCKS * _LARGEST_TEAM:
        most *= 2
    return min(most, _power_above(chunks), max(8, _power_above(-(-chunks // 2))))


def _power_above(number: int) -> int:
    """Return the smallest power of two that is not below the number.

    >>> [_power_above(n) for n in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << max(0, number - 1).bit_length()


_gemv_rung = partial(gpu_rung, refuses=without_vector)
GEMV = (
    _gemv_rung(
        "gemv_thread",
        idea="one thread per result of y = W x",
        parent="simt_naive",
        geometry=_thread,
        space={"threads": (32, 64, 128, 256)},
        default={"threads": 128},
        expect={"divergent_branches": 0, "load_sectors_a_request": 16.5, "load_bytes_a_sector": 4},
        lesson=(
            "Each thread reads its own row of W, so the 32 lanes of a warp read 32 rows at once: every load touches 32 "
            "sectors and uses 2 or 4 bytes of each. With few results most of the device is idle. If the columns of W "
            "are contiguous instead, the same code is coalesced."
        ),
    ),
    _gemv_rung(
        "gemv_thread_smem",
        idea="each block reads x once, into shared memory",
        parent="gemv_thread",
        geometry=_thread,
        space={"threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"threads": 128, "tile": 2048},
        expect={"divergent_branches": 0, "bank_conflicts": 0},
        lesson=(
            "All threads need the same x, and x is small: shared memory broadcasts one word to a whole warp. But W is "
            "nearly all the traffic and is read only once; staging x saves only what the L1 cache already served, and "
            "costs two barriers per tile."
        ),
    ),
    _gemv_rung(
        "gemv_warp",
        idea="a warp computes r results with 32 / r lanes each, and sums by XOR shuffles",
        parent="gemv_thread",
        geometry=_warp,
        space={"r": (1, 2, 4, 8, 16), "smem": (0, 1), "threads": (32, 64, 128, 256), "tile": (512, 1024, 2048, 4096)},
        default={"r": 1, "smem": 0, "threads": 128, "tile": 2048},
        expect={"bank_conflicts": 0, "load_sectors_a_request": 4, "load_bytes_a_sector": 32},
        lesson=(
            "Lanes next to each other read adjacent elements of one row of W, so a warp's load touches r rows instead "
            "of 32. There are 32 / r times as many threads, so a short y fills the device sooner. The price is log2(32 "
            "/ r) shuffles per result, and idle lanes when k is smaller than 32 / r."
        ),
    ),
    _gemv_rung(
        "gemv_vectorized",
        idea="16-byte loads, several rows in flight per thread, k shared by part of a warp or up to many blocks",
        parent="gemv_warp",
        geometry=_vectorized,
        space={
            "team": (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
            "rows": (0, 1, 2, 4),
            "steps": (0, 1, 2, 4, 8),
            "threads": (0, 64, 128, 256, 512),
            "split": (0, 1, 2, 4, 8, 16, 32, 64),
            "overlap": (0, 1),
        },
        default={"team": 0, "rows": 0, "steps": 0, "threads": 0, "split": 0, "overlap": 1},
        expect={"bank_conflicts": 0, "load_bytes_a_sector": 32},
        lesson=(
            "y = W x does two operations per element it reads, so all that matters is how early W is requested and "
            "that enough of it is in flight: wide loads, several of them before the first is used, and no idle "
            "threads. Below a megabyte most of the time is the launch itself, so the kernel starts while the launch "
            "before it on the stream ends, prefetches its part of W, and only then waits."
        ),
    ),
)
