"""Launches of the kernels on CUDA cores that keep tiles in registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda import device
from gemmery.cuda.device import STATIC_SHARED
from gemmery.cuda.geometry import LAYOUTS, Geometry, instance, tiles, vector
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]
WARP = 32
THREADS = 1024  # per block
REGISTERS = 65536  # per multiprocessor
MOST_REGISTERS = 255  # per thread
PAD = 4  # padding elements after each step of k in the tile of an operand contiguous in k


def threadtile(problem: Problem, config: Config) -> Geometry:
    """One thread per tm x tn elements of a tile of C; one element of A or B per access."""
    return _launch("simt_threadtile", problem, config)


def vectorized(problem: Problem, config: Config) -> Geometry:
    """As threadtile, with accesses as wide as each matrix allows."""
    return _launch("simt_vectorized", problem, config, *_accesses(problem, config))


def padded(problem: Problem, config: Config) -> Geometry:
    """As vectorized, with padded tiles that have k as the outer dimension."""
    return _launch("simt_padded", problem, config, *_accesses(problem, config), pad=PAD)


def swizzled(problem: Problem, config: Config) -> Geometry:
    """As padded, with swizzled tiles."""
    return _launch("simt_swizzled", problem, config, *_accesses(problem, config))


def warptile(problem: Problem, config: Config) -> Geometry:
    """As padded, with the threads of a warp on wm x wn elements."""
    _check_warps(config)
    return _launch("simt_warptile", problem, config, *_accesses(problem, config), keys=WARPS, pad=PAD)


def pipelined(problem: Problem, config: Config) -> Geometry:
    """As warptile, with `stages` tiles in shared memory: through registers if there are two, else by cp.async."""
    config = chosen(problem, config)
    _check_warps(config)
    stages = config["stages"]
    if stages < 2:
        raise RefusedError(f"stages={stages}: one tile is read while another is filled; use 2 or more")
    made = _launch(
        "simt_pipelined",
        problem,
        config,
        *_accesses(problem, config, transposing=stages == 2),
        keys=(*WARPS, "stages"),
        pad=PAD,
        stages=stages,
    )
    if stages == 2:
        return made
    if dtypes.get(problem.dtype).size != _word(problem):
        raise RefusedError(
            f"stages={stages} of {problem.dtype} into {problem.out}: cp.async does not widen; use stages=2"
        )
    return replace(made, needs=80, instructions="cp.async")


# Tiles for sums of 4 and 8 bytes: bm, bn, bk, wm, wn, tm, tn, stages, and the speed of each on a full
# device, in percent of the largest's.
TILES = {
    4: (
        (128, 256, 16, 32, 128, 16, 8, 3, 100),
        (128, 128, 8, 64, 32, 8, 8, 3, 95),
        (64, 64, 16, 32, 32, 8, 4, 3, 75),
        (32, 32, 16, 32, 16, 4, 4, 3, 45),
    ),
    8: (
        (64, 128, 8, 32, 64, 8, 8, 3, 100),
        (64, 64, 8, 32, 32, 8, 4, 3, 85),
        (32, 32, 16, 32, 16, 4, 4, 3, 60),
    ),
}
TILE = ("bm", "bn", "bk", "tm", "tn")
WARPS = ("bm", "bn", "bk", "wm", "wn", "tm", "tn")


def _launch(
    name: str,
    problem: Problem,
    config: Config,
    *accesses: int,
    keys: tuple[str, ...] = TILE,
    pad: int = 0,
    stages: int = 0,  # tiles in dynamic shared memory; 0: one, in static shared memory
) -> Geometry:
    _check_tile(config)
    bm, bn, bk, tm, tn = (config[key] for key in TILE)
    sides = bm + pad * (problem.a_layout == "row") + bn + pad * (problem.b_layout == "col")
    shared = max(1, stages) * bk * sides * _word(problem)
    if not stages and shared > STATIC_SHARED:
        raise RefusedError(
            f"bm={bm}, bn={bn}, bk={bk}: the tiles take {shared} bytes of shared memory, this kernel has "
            f"{STATIC_SHARED}; use a smaller bk, or simt_pipelined"
        )
    held = (tm * tn + tm + tn) * _word(problem) // 4
    if held > MOST_REGISTERS:
        raise RefusedError(
            f"tm={tm}, tn={tn} in {problem.out}: {held} registers; a thread has {MOST_REGISTERS}; use smaller ones"
        )
    kernel = instance(
        name,
        problem._replace(precision=""),  # exact f32 products satisfy tf32 too
        LAYOUTS[problem.a_layout],
        LAYOUTS[problem.b_layout],
        *accesses,
        *(config[key] for key in keys),
        config["blocks"] or _blocks(problem, config, 2 if stages else 1),
    )
    threads = bm // tm * (bn // tn)
    dynamic = shared if stages else 0
    return Geometry(f"{name}.cu", kernel, tiles(problem, bm, bn), (threads, 1, 1), dynamic, tile=(bm, bn))


def chosen(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: by the tile of TILES that should take least time, and its stages."""
    at = device.find(problem.device if problem.device != "cpu" else "h200")
    *best, _ = min(TILES[_word(problem)], key=lambda tile: _time(problem, tile, at.sms))
    tile = dict(zip((*WARPS, "stages"), best, strict=True))
    if at.capability < 80 or dtypes.get(problem.dtype).size != _word(problem):
        tile["stages"] = 2
    return {**config, **{key: config[key] or value for key, value in tile.items()}}


def _time(problem: Problem, tile: tuple[int, ...], sms: int) -> float:
    """Return the elements of C that the busiest multiprocessor computes, weighted by the tile's speed."""
    bm, bn, *_, speed = tile
    grid, _, _ = tiles(problem, bm, bn)
    return -(-grid // sms) * bm * bn / speed


def _blocks(problem: Problem, config: Config, fragments: int) -> int:
    """Return the blocks per multiprocessor that registers allow: a thread holds its sums and `fragments` of A and B."""
    tm, tn = config["tm"], config["tn"]
    held = (tm * tn + fragments * (tm + tn)) * (_word(problem) // 4)
    indices = 32 + 16 * ("any" in (problem.a_layout, problem.b_layout))
    threads = config["bm"] // tm * (config["bn"] // tn)
    return max(1, REGISTERS // (threads * (held + indices)))


def _word(problem: Problem) -> int:
    """Return the bytes of a sum."""
    return 8 if problem.out == "f64" else 4


def _accesses(problem: Problem, config: Config, transposing: bool = True) -> tuple[int, int, int]:
    """Return the elements of A, B and C per access. They divide the contiguous side, so that no access crosses an edge.

    A kernel that cannot transpose copies operands contiguous in k element by element.
    """
    along_k = config["bk"], problem.k
    lengths = {
        0: {"row": along_k, "col": (config["bm"], problem.m)},
        1: {"row": (config["bn"], problem.n), "col": along_k},
        2: {"row": (config["bn"], problem.n)},
    }
    given = []
    for operand, layout in enumerate((problem.a_layout, problem.b_layout, problem.c_layout)):
        width = vector(problem, operand)
        if layout not in lengths[operand] or (not transposing and lengths[operand][layout] is along_k):
            width = 1
        else:
            while any(length % width for length in lengths[operand][layout]):
                width //= 2
        given.append(width)
    return given[0], given[1], given[2]


def _check_tile(config: Config) -> None:
    bm, bn, bk, tm, tn = (config[key] for key in TILE)
    for key in TILE:
        if config[key] < 1 or config[key] & (config[key] - 1):
            raise RefusedError(f"{key}={config[key]}: threads share a tile evenly; use a power of two")
    if bk < 2 or bm < tm or bn < tn:
        raise RefusedError(
            f"bm={bm}, bn={bn}, bk={bk} for tm={tm}, tn={tn}: a block's tile is a thread's times 2 or more"
        )
    threads = bm // tm * (bn // tn)
    if threads < WARP or threads > THREADS:
        raise RefusedError(
            f"bm={bm}, bn={bn}, tm={tm}, tn={tn}: {threads} threads; a block has {WARP} to {THREADS}; change the "
            "thread's tile"
        )


def _check_warps(config: Config) -> None:
    bm, bn, _, wm, wn, tm, tn = (config[key] for key in WARPS)
    if min(wm, wn, tm, tn) < 1 or bm % wm or bn % wn:
        raise RefusedError(f"wm={wm}, wn={wn} of bm={bm}, bn={bn}: a warp's tile divides the block's; change either")
    if wm % tm or wn % tn or wm // tm * (wn // tn) != WARP:
        raise RefusedError(f"tm={tm}, tn={tn} of wm={wm}, wn={wn}: a warp's tile is that of {WARP} threads")
