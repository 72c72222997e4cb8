"""The rungs on CUDA cores that keep an element of C in each thread, from one block to tiles in shared memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from gemmery import dtypes
from gemmery.cuda.device import GRID, THREADS, WARP
from gemmery.cuda.geometry import Geometry, instance, sum_size, tiles
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import EVERY, OTHERS, WHOLE, gpu_rung, of_tiles
from gemmery.problem import Config, Problem

_ALONG_ROWS = {"divergent_branches": 0, "store_sectors_a_request": 4, "store_bytes_a_sector": 32}
_FROM_TILES = {**_ALONG_ROWS, "bank_conflicts": 0, "load_sectors_a_request": 4, "load_bytes_a_sector": 32}


def _one_block(problem: Problem) -> str:
    threads = problem.m * problem.n
    many = f"C has {threads} elements and a block at most {THREADS} threads: use simt_naive"
    return many if threads > THREADS else ""


def _by_warps(name: str, problem: Problem, config: Config, down: bool = False) -> Geometry:
    """A warp along a row of C, so that its lanes read adjacent elements of B, or `down` a column.

    Blocks step over the other direction, because a grid ends at 65535 blocks.
    """
    height = config["threads"] // WARP
    if config["threads"] != height * WARP or not height:
        raise RefusedError(f"threads={config['threads']}: a block consists of whole warps; use a multiple of {WARP}")
    along, across = (problem.m, problem.n) if down else (problem.n, problem.m)
    grid = (-(-along // WARP), min(-(-across // height), GRID[1]), min(problem.batch, GRID[2]))
    return Geometry(f"{name}.cu", instance(name, problem), grid, (WARP, height, 1))


def _linear(name: str, problem: Problem, config: Config) -> Geometry:
    """One-dimensional blocks over all elements of C, with sums in scratch memory if C cannot hold them."""
    threads = _positive(config, "threads")
    count = problem.batch * problem.m * problem.n
    apart = problem.scaled or problem.out in ("f16", "bf16")
    workspace = count * sum_size(problem) if apart else 0
    grid = (-(-count // threads), 1, 1)
    return Geometry(f"{name}.cu", instance(name, problem), grid, (threads, 1, 1), workspace=workspace)


def _packed(name: str, problem: Problem, config: Config) -> Geometry:
    """A launch that copies A and B into blocks, and one that multiplies these."""
    side = _positive(config, "block")
    rows, columns, depth = (-(-length // side) for length in (problem.m, problem.n, problem.k))
    blocks = problem.batch * depth * (rows + columns)
    threads = (side, side, 1)
    columns_first = bool(config["layout"])
    copy = instance(f"{name}_blocks", problem._replace(epilogue="", scaled=False), side, columns_first)
    return Geometry(
        f"{name}.cu",
        instance(name, problem, side, columns_first),
        tiles(problem, side, side),
        threads,
        workspace=blocks * side * side * dtypes.get(problem.dtype).size,
        before=(Geometry(f"{name}.cu", copy, (blocks, 1, 1), threads),) if blocks else (),
    )


def _smem(name: str, problem: Problem, config: Config) -> Geometry:
    """One thread per element of a square tile of C."""
    tile = _positive(config, "tile")
    return replace(of_tiles(name, problem, (tile, tile), tile, tile), block=(tile, tile, 1))


def _smem_transposed(name: str, problem: Problem, config: Config) -> Geometry:
    """As _smem, with warps of 4 x 8 elements."""
    tile = config["tile"]
    if tile not in (8, 16, 32):
        raise RefusedError(f"tile={tile}: a tile consists of warps of 4 x 8 elements; use 8, 16 or 32")
    return of_tiles(name, problem, (tile, tile), tile * tile, tile, bool(config["swizzle"]))


def _positive(config: Config, key: str) -> int:
    if config[key] < 1:
        raise RefusedError(f"{key}={config[key]}: it must be at least 1")
    return config[key]


_thread_rung = partial(gpu_rung, space={"threads": (32, 64, 128, 256, 512, 1024)}, default={"threads": 256})
SIMT = (
    gpu_rung(
        "simt_single_block",
        idea="one thread per element of C, all in one block",
        parent=None,
        refuses=_one_block,
        geometry=lambda name, p, _: Geometry(f"{name}.cu", instance(name, p), (1, 1, 1), (p.n, p.m, 1)),
        expect={**_ALONG_ROWS, "load_sectors_a_request": 2.5},
        lesson=(
            "A block has at most 1024 threads, so C has at most 1024 elements: 32 x 32. One block also runs on a "
            "single multiprocessor, however many the device has."
        ),
    ),
    _thread_rung(
        "simt_naive",
        idea="one thread per element of C, many blocks",
        parent="simt_single_block",
        semirings=True,
        geometry=_by_warps,
        expect={**_ALONG_ROWS, "load_sectors_a_request": 2.5},
        lesson=(
            "Two loads per multiply-add make memory the limit. The 32 lanes of a warp share an element of A and read "
            "32 adjacent elements of B, so each load is one request for one cache line."
        ),
    ),
    _thread_rung(
        "simt_uncoalesced",
        idea="simt_naive with x and y of the thread swapped, to show what thread order costs",
        parent="simt_naive",
        geometry=partial(_by_warps, down=True),
        expect={"divergent_branches": 0, "load_sectors_a_request": 16.5, "store_sectors_a_request": 32},
        lesson=(
            "A deliberate dead end. The lanes of a warp read 32 different rows of A, so a request that touched 4 "
            "sectors of memory now touches 32: the same work takes several times as long."
        ),
    ),
    _thread_rung(
        "simt_linear",
        idea="one-dimensional blocks, thread id -> (i, j), each thread adding to C in global memory",
        parent="simt_naive",
        geometry=_linear,
        space={"threads": (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)},
        expect=_ALONG_ROWS,
        lesson=(
            "With fewer than 32 threads per block, lanes of every warp stay idle: half the threads take twice the "
            "time. From 64 threads on there are enough warps and the curve is flat. The device refuses 1025 threads."
        ),
    ),
    gpu_rung(
        "simt_packed",
        idea="a first kernel copies A and B into square blocks, contiguous and padded with zeros",
        parent="simt_naive",
        geometry=_packed,
        space={"layout": (0, 1), "block": (8, 16, 32)},
        default={"layout": 0, "block": 32},
        expect=_ALONG_ROWS,
        lesson=(
            "On a CPU packing avoids cache misses. Here it saves address arithmetic: inside a block all offsets are "
            "constants. With layout 1, B is stored column by column as a CPU would want it, and the lanes of a warp no "
            "longer read adjacent elements."
        ),
    ),
    gpu_rung(
        "simt_smem",
        idea="a block reads each tile of A and B once, into shared memory",
        parent="simt_naive",
        mixed=(*EVERY, *WHOLE),
        dtypes=(*EVERY, *OTHERS),
        semirings=True,
        geometry=_smem,
        space={"tile": (2, 4, 8, 16, 32)},
        default={"tile": 16},
        expect=_FROM_TILES,
        lesson=(
            "Each element of a 16 x 16 tile is read from memory once and used 16 times, so the limit is no longer "
            "global memory but shared memory, with two loads per multiply-add. Small tiles leave warps half empty and "
            "reuse each element less."
        ),
    ),
    gpu_rung(
        "simt_smem_transposed",
        idea="B's tile transposed, and both tiles stored without bank conflicts",
        parent="simt_smem",
        geometry=_smem_transposed,
        space={"tile": (8, 16, 32), "swizzle": (0, 1)},
        default={"tile": 32, "swizzle": 1},
        expect=_FROM_TILES,
        lesson=(
            "With k contiguous in both tiles, one load fetches 16 bytes. Stored plainly (swizzle 0), rows are 32 banks "
            "apart and the lanes of a warp queue for the same four banks; with chunks permuted differently in each row "
            "they do not."
        ),
    ),
)
