"""Launches of the matrix-vector kernels: y = W x, with m or n equal to 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gemmery.cuda import device
from gemmery.cuda.device import GRID
from gemmery.cuda.geometry import Geometry, instance, vector
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]


def is_column(problem: Problem) -> bool:
    """Return True if C is a column, so that the matrix is A; if C is a row, the matrix is B transposed."""
    return problem.n == 1


def results(problem: Problem) -> int:
    """Return the number of elements of y."""
    return problem.m if is_column(problem) else problem.n


def thread(problem: Problem, config: Config) -> Geometry:
    """One thread per result."""
    name = instance("gemv_thread", problem, is_column(problem))
    return Geometry("gemv_thread.cu", name, *_grid(problem, config["threads"], config["threads"]))


def thread_smem(problem: Problem, config: Config) -> Geometry:
    """One thread per result, with x in shared memory."""
    name = instance("gemv_thread_smem", problem, is_column(problem), config["tile"])
    return Geometry("gemv_thread_smem.cu", name, *_grid(problem, config["threads"], config["threads"]))


def warp(problem: Problem, config: Config) -> Geometry:
    """One warp per `r` results; `smem` 1 keeps x in shared memory.

    Raises RefusedError if `r` does not divide the 32 lanes, or the threads are not whole warps.
    """
    r, threads, smem = config["r"], config["threads"], bool(config["smem"])
    if r not in (1, 2, 4, 8, 16):
        raise RefusedError(f"r = {r}: 32 lanes are shared by 1, 2, 4, 8 or 16 results; for 32 use gemv_thread")
    if threads % 32:
        raise RefusedError(f"{threads} threads per block: shuffles need whole warps; use a multiple of 32")
    name = instance("gemv_warp", problem, is_column(problem), r, smem, config["tile"] if smem else 1)
    return Geometry("gemv_warp.cu", name, *_grid(problem, threads // 32 * r, threads))


def _grid(problem: Problem, each: int, threads: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the grid for all results, `each` per block, and every product of the batch, and the threads of a block."""
    return (-(-results(problem) // each), min(problem.batch, GRID[1]), 1), (threads, 1, 1)


LARGEST_TEAM = 1024  # threads of a block
MOST_CHUNKS = 8  # of 16 bytes, in flight in a thread
MOST_SPLIT = 64  # blocks that share k
BLOCKS = 128  # enough to keep a large device busy
LINE = 128  # bytes of memory requested together


def vectorized(problem: Problem, config: Config) -> Geometry:
    """16-byte loads along the contiguous side of W; zeros of the config are chosen by the shape.

    Raises RefusedError for numbers of threads that are not powers of two, or too many for a block.
    """
    for key, value in config.items():
        if value & (value - 1):
            raise RefusedError(f"{key} = {value}: threads and rows are divided by halves; use a power of two, or 0")
    return _columns(problem, config) if _by_columns(problem) else _rows(problem, config)


def _by_columns(problem: Problem) -> bool:
    """Return True if columns of W are contiguous and have more than one element."""
    layout, contiguous = (problem.a_layout, "col") if is_column(problem) else (problem.b_layout, "row")
    return layout == contiguous and results(problem) > 1


def _rows(problem: Problem, config: Config) -> Geometry:
    vec, rows_in_all = _chunk(problem), results(problem) * problem.batch
    chunks = max(1, problem.k // vec)
    team = config["team"] or _team(chunks, rows_in_all)
    split = config["split"] or _split(chunks // (4 * team), rows_in_all)
    rows = config["rows"] or 1
    steps = config["steps"] or min(_power_above(-(-chunks // (team * split))), 2)
    if not rows <= team <= LARGEST_TEAM:
        raise RefusedError(f"rows = {rows}, team = {team}: each member stores a row, so rows <= team <= {LARGEST_TEAM}")
    if rows * steps > MOST_CHUNKS:
        raise RefusedError(f"rows = {rows}, steps = {steps}: at most {MOST_CHUNKS} chunks fit a thread's registers")
    threads = max(team, config["threads"] or (128 if rows_in_all * team < 1 << 14 else 256))
    parameters = (split > 1, vec, _cover(problem.k, vec * team * split * steps, vec), team, rows, steps, threads)
    return _launches(problem, config, "gemv_vectorized", parameters, threads // team * rows, threads, split)


def _overlaps(problem: Problem, config: Config, blocks: int, threads: int) -> bool:
    """Return True if the launch may start while the previous one ends: from sm_90 on, if all its blocks run at once.

    Otherwise its blocks would take places from the previous launch (f16, 4096 x 4096: 9.7 us instead of 9.1).
    """
    if not config["overlap"] or problem.device == "cpu":
        return False
    found = device.find(problem.device)
    return found.capability >= 90 and blocks * threads <= found.sms * found.limits.warps_sm * 32


def _chunk(problem: Problem) -> int:
    """Return the elements of a row of W, and of x, per access; the kernel itself checks an x that is a column."""
    if is_column(problem):
        return vector(problem, 0) if problem.a_layout == "row" else 1
    return min(vector(problem, 0), vector(problem, 1)) if problem.a_layout == "row" and problem.b_layout == "col" else 1


def _cover(k: int, step: int, vec: int) -> str:
    """Return the Cover of gemv_vectorized.cu: whether steps of `step` elements end with k, or one step is all of k."""
    return "PARTS" if vec == 1 or k % step else "ONCE" if k == step else "WHOLE"


def _columns(problem: Problem, config: Config) -> Geometry:
    vec, in_all = vector(problem, 0 if is_column(problem) else 1), results(problem) * problem.batch
    size = {"f64": 8, "f32": 4}.get(problem.dtype, 2)
    lanes = config["team"] or min(32, LINE // (vec * size))
    if lanes > 32:
        raise RefusedError(f"team = {lanes}: with contiguous columns a team is part of a warp; use at most 32")
    steps = config["steps"] or 2
    threads = config["threads"] or max(64, min(512, _power_above(problem.k) * lanes // steps))
    split = config["split"] or _split(problem.k // 256, -(-in_all // (lanes * vec)), 4 * BLOCKS)
    parameters = (split > 1, vec, lanes, steps, threads // 32)
    return _launches(problem, config, "gemv_columns", parameters, lanes * vec, threads, split)


def _split(most: int, blocks: int, wanted: int = BLOCKS) -> int:
    """Return how many blocks share k if there are few: another launch adds up, so each needs plenty of work."""
    split = 1
    while split < MOST_SPLIT and 2 * split <= most and 2 * split * blocks <= wanted:
        split *= 2
    return split


def _launches(
    problem: Problem, config: Config, name: str, parameters: tuple[object, ...], each: int, threads: int, split: int
) -> Geometry:
    """The kernel, and the one that adds up the parts of k if there are several."""
    blocks, block = _grid(problem, each, threads)
    overlaps = _overlaps(problem, config, blocks[0] * blocks[1] * split, threads)
    kernel = instance(name, problem, is_column(problem), problem.batch > 1, *parameters, overlaps)
    made = Geometry(f"{name}.cu", kernel, blocks, block, overlaps=overlaps)
    if split == 1:
        return made
    lanes = min(32, split)
    size = 8 if "f64" in (problem.dtype, problem.out) else 4
    return Geometry(
        "gemv_finish.cu",
        instance("gemv_finish", problem, is_column(problem), split, lanes),
        *_grid(problem, 128 // lanes, 128),
        workspace=results(problem) * problem.batch * split * size,
        before=(replace(made, grid=(blocks[0], blocks[1], split)),),
    )


def _team(chunks: int, rows_in_all: int) -> int:
    """Return the threads per row: two chunks each, in whole cache lines, up to 256; more if rows are few."""
    most = 256
    while most < LARGEST_TEAM and 2 * most * rows_in_all <= BLOCKS * LARGEST_TEAM:
        most *= 2
    return min(most, _power_above(chunks), max(8, _power_above(-(-chunks // 2))))


def _power_above(number: int) -> int:
    """Return the smallest power of two that is not below the number.

    >>> [_power_above(n) for n in (1, 2, 3, 1000)]
    [1, 2, 4, 1024]
    """
    return 1 << max(0, number - 1).bit_length()
