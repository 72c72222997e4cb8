"""How the kernels on CUDA cores that keep tiles in registers are launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gemmery import dtypes
from gemmery.cuda.device import STATIC_SHARED
from gemmery.cuda.geometry import LAYOUTS, Geometry, instance, tiles, vector
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]
WARP = 32
THREADS = 1024  # a block
PAD = 4  # elements that follow each step of k in the tile of an operand that lies along k


def threadtile(problem: Problem, config: Config) -> Geometry:
    """A thread for each tm x tn elements of a tile of C; one element of A and B an access."""
    return _launch("simt_threadtile", problem, config)


def vectorized(problem: Problem, config: Config) -> Geometry:
    """The same, with as wide an access as each matrix allows."""
    return _launch("simt_vectorized", problem, config, *_accesses(problem, config))


def padded(problem: Problem, config: Config) -> Geometry:
    """The same, with padded tiles that have k outermost."""
    return _launch("simt_padded", problem, config, *_accesses(problem, config), pad=PAD)


def swizzled(problem: Problem, config: Config) -> Geometry:
    """The same, with swizzled tiles."""
    return _launch("simt_swizzled", problem, config, *_accesses(problem, config))


def warptile(problem: Problem, config: Config) -> Geometry:
    """The same, with the threads of a warp on wm x wn elements."""
    _check_warps(config)
    return _launch("simt_warptile", problem, config, *_accesses(problem, config), keys=WARPS, pad=PAD)


def pipelined(problem: Problem, config: Config) -> Geometry:
    """The same with `stages` tiles in shared memory: filled through registers when there are two, else by cp.async."""
    config = {**config, **_chosen(problem, config)}
    _check_warps(config)
    stages = config["stages"]
    if stages < 2:
        raise RefusedError(f"stages={stages}: one tile is read while another is filled; use 2 or more")
    made = _launch(
        "simt_pipelined",
        problem,
        config,
        *_accesses(problem, config, transposing=stages == 2),
        keys=(*WARPS, "stages", "blocks"),
        pad=PAD,
        stages=stages,
    )
    if stages == 2:
        return made
    if dtypes.get(problem.dtype).size < 4:
        raise RefusedError(f"stages={stages} of {problem.dtype}: cp.async copies 4 bytes or more; use stages=2")
    return replace(made, needs=80, instructions="cp.async")


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
    shared = max(1, stages) * bk * sides * (8 if problem.out == "f64" else 4)
    if not stages and shared > STATIC_SHARED:
        raise RefusedError(
            f"bm={bm}, bn={bn}, bk={bk}: the tiles take {shared} bytes of shared memory, this kernel has "
            f"{STATIC_SHARED}; use a smaller bk, or simt_pipelined"
        )
    kernel = instance(
        name,
        replace(problem, precision=""),  # products are exact to f32, so they are to tf32
        LAYOUTS[problem.a_layout],
        LAYOUTS[problem.b_layout],
        *accesses,
        *(config[key] for key in keys),
    )
    threads = bm // tm * (bn // tn)
    dynamic = shared if stages else 0
    return Geometry(f"{name}.cu", kernel, tiles(problem, bm, bn), (threads, 1, 1), dynamic, tile=(bm, bn))


def _accesses(problem: Problem, config: Config, transposing: bool = True) -> tuple[int, int, int]:
    """Elements of A, B and C that one access takes: they divide the side along memory, so that none crosses an edge.

    What cannot be transposed is copied element by element where it lies along k.
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


def _chosen(problem: Problem, config: Config) -> Config:
    """What the config leaves open (0)."""
    return {}


def _check_tile(config: Config) -> None:
    bm, bn, bk, tm, tn = (config[key] for key in TILE)
    if min(bm, bn, bk, tm, tn) < 1 or bm % tm or bn % tn:
        raise RefusedError(f"tm={tm}, tn={tn} of bm={bm}, bn={bn}: a thread's tile divides the block's; change either")
    if bk < 2 or bk & (bk - 1):
        raise RefusedError(f"bk={bk}: a tile has 2, 4, 8, ... steps of k; use a power of two")
    threads = bm // tm * (bn // tn)
    if threads % WARP or threads > THREADS:
        raise RefusedError(
            f"bm={bm}, bn={bn}, tm={tm}, tn={tn}: {threads} threads; a block has whole warps of {WARP} and at most "
            f"{THREADS} threads; change the thread's tile"
        )


def _check_warps(config: Config) -> None:
    bm, bn, _, wm, wn, tm, tn = (config[key] for key in WARPS)
    if min(wm, wn, tm, tn) < 1 or bm % wm or bn % wn:
        raise RefusedError(f"wm={wm}, wn={wn} of bm={bm}, bn={bn}: a warp's tile divides the block's; change either")
    if wm % tm or wn % tn or wm // tm * (wn // tn) != WARP:
        raise RefusedError(f"tm={tm}, tn={tn} of wm={wm}, wn={wn}: a warp's tile is that of {WARP} threads")
