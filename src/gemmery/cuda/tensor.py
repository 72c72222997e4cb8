"""Launches of the tensor-core kernels by wmma, and by mma in float64."""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.cuda.device import find
from gemmery.cuda.geometry import LAYOUTS, Geometry, instance, tiles, vector
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]
WARP = 32
THREADS = 1024  # per block
REGISTERS, LEAST_F64 = 65536, 64  # per multiprocessor; per thread that multiplies in f64
TILE = ("bm", "bn", "bk", "wm", "wn")
BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
MMA_F64 = ("bm", "bn", "bk", "wm", "wn", "stages", "blocks")
TILES_F64 = (  # values of MMA_F64, and the share of its speed that a full device reaches with the first of them (H200)
    ((128, 128, 16, 64, 32, 3, 1), 1.0),
    ((64, 64, 16, 32, 32, 3, 3), 0.94),
    ((32, 64, 32, 16, 32, 3, 3), 0.8),
    ((32, 32, 32, 16, 16, 4, 4), 0.81),
)


def wmma_f64(problem: Problem, config: Config) -> Geometry:
    """Fragments of 8 x 8 x 4."""
    return _fragments("wmma_f64", problem, config)


def wmma_f16(problem: Problem, config: Config) -> Geometry:
    """Fragments of 16 x 16 x 16, in tf32 of 16 x 16 x 8, two along k in a tile unless `bk` says more."""
    return _fragments("wmma_f16", problem, {**config, "bk": config["bk"] or 64 // BYTES[problem.dtype]})


def mma_f64(problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles, and the widest instruction of the device."""
    config = {key: config[key] or value for key, value in zip(MMA_F64, _tile_f64(problem), strict=True)}
    bm, bn, bk, stages = (config[key] for key in ("bm", "bn", "bk", "stages"))
    threads = _threads(config, 16, 8, 16)
    if stages < 2:
        raise RefusedError(f"stages={stages}: one tile is read while another is filled; use 2 or more")
    if (left := REGISTERS // (threads * config["blocks"])) < LEAST_F64:
        raise RefusedError(
            f"blocks={config['blocks']} of {threads} threads: {left} registers are left for each, and mma in f64 takes "
            f"{LEAST_F64} at least; use fewer blocks or larger tiles of a warp"
        )
    wide = find(problem.device).capability >= 90
    return Geometry(
        "mma_f64.cu",
        instance("mma_f64", problem, *_operands(problem), *_tile(config), stages, config["blocks"], wide),
        tiles(problem, bm, bn),
        (threads, 1, 1),
        shared=stages * (bm + bn) * bk * 8,
        needs=80,
        instructions="mma.sync in f64 and cp.async",
        tile=(bm, bn),
    )


def _tile_f64(problem: Problem) -> tuple[int, ...]:
    """Return the tile with which the busiest multiprocessor finishes first."""

    def longest(row: tuple[tuple[int, ...], float]) -> float:
        (bm, bn, *_), speed = row
        return -(-tiles(problem, bm, bn)[0] // find(problem.device).sms) * bm * bn / speed

    return min(TILES_F64, key=longest)[0]


def _fragments(name: str, problem: Problem, config: Config) -> Geometry:
    """A kernel with the fragments of wmma.cuh; shared memory holds two padded tiles of A and B, then sums for C."""
    bm, bn, bk, _, wn = _tile(config)
    size = BYTES[problem.dtype]
    m, n, k = (8, 8, 4) if size == 8 else (16, 16, 32 // size)
    threads = _threads(config, m, n, 2 * k)
    filled = _padded(bm, bk, size, problem.a_layout != "col") + _padded(bn, bk, size, problem.b_layout != "row")
    patches = threads // WARP * m * (wn + 4) * max(4, size)
    return Geometry(
        f"{name}.cu",
        instance(name, problem, *_operands(problem), *_tile(config), config["blocks"]),
        tiles(problem, bm, bn),
        (threads, 1, 1),
        shared=max(2 * filled, patches),
        needs=75 if problem.dtype == "f16" else 80,
        instructions="" if problem.dtype == "f16" else f"wmma of {problem.precision or problem.dtype}",
        tile=(bm, bn),
    )


def _padded(side: int, bk: int, size: int, along_k: bool) -> int:
    """Return the bytes of a tile of wmma.cuh, whose rows have 16 or 32 bytes of padding."""
    rows, width = (side, bk) if along_k else (bk, side)
    return rows * (width * size + (32 if size == 8 or (size == 4 and not along_k) else 16))


def _tile(config: Config) -> tuple[int, ...]:
    return tuple(config[key] for key in TILE)


def _threads(config: Config, m: int, n: int, k: int) -> int:
    """Return the threads of a block: a warp per wm x wn of bm x bn, by instructions of m x n, with at least this k."""
    sides = {key: config[key] for key in TILE}
    for key, least in zip(TILE, (m, n, k, m, n), strict=True):
        if sides[key] < least or sides[key] & (sides[key] - 1):
            raise RefusedError(f"{key}={sides[key]}: a side of a tile is a power of two from {least} on")
    bm, bn, _, wm, wn = sides.values()
    if wm > bm or wn > bn:
        raise RefusedError(f"wm={wm}, wn={wn} of bm={bm}, bn={bn}: a warp's tile must fit in the block's; change one")
    threads = bm // wm * (bn // wn) * WARP
    if threads > THREADS:
        raise RefusedError(
            f"bm={bm}, bn={bn}, wm={wm}, wn={wn}: {threads} threads; a block has at most {THREADS}; make the warp's "
            "tile larger"
        )
    return threads


def _operands(problem: Problem) -> tuple[str | int, ...]:
    """Return the layouts of A and B, and the elements of A, B and C per access.

    The widths divide the contiguous sides, so that no access crosses an edge.
    """
    sides = {"row": (problem.k, problem.n, problem.n), "col": (problem.m, problem.k, problem.m)}
    widths = []
    for operand, layout in enumerate((problem.a_layout, problem.b_layout, problem.c_layout)):
        width = vector(problem, operand) if layout != "any" else 1
        while width > 1 and sides[layout][operand] % width:
            width //= 2
        widths.append(width)
    return (LAYOUTS[problem.a_layout], LAYOUTS[problem.b_layout], *widths)
