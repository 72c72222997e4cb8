"""The rungs on tensor cores by wmma, and by mma in float64."""

from __future__ import annotations

from gemmery import dtypes
from gemmery.cuda.choose import complete
from gemmery.cuda.choose.cost import quickest
from gemmery.cuda.choose.data import MMA_F64
from gemmery.cuda.device import REGISTERS, THREADS, WARP
from gemmery.cuda.geometry import Geometry, access, instance, target, template, tiles
from gemmery.errors import RefusedError
from gemmery.ladder.gpu import gpu_rung, tensor_rung
from gemmery.problem import Config, Problem

_KEYS = ("bm", "bn", "bk", "wm", "wn")
_LEAST_REGISTERS = 64  # per thread that multiplies in f64
_SPACE = {
    "bm": (32, 64, 128, 256),
    "bn": (32, 64, 128, 256),
    "bk": (16, 32, 64),
    "wm": (16, 32, 64),
    "wn": (16, 32, 64),
    "blocks": (1, 2, 3, 4),
}
_RING = {key: (0, *values) for key, values in {**_SPACE, "stages": (2, 3, 4, 5)}.items()}  # 0: chosen by the rung

_WIDE = {
    "divergent_branches": 0,
    "local_requests": 0,
    "load_sectors_a_request": 16,
    "load_bytes_a_sector": 32,
    "store_sectors_a_request": 16,
    "store_bytes_a_sector": 32,
}


def _resolve_f16(problem: Problem, config: Config) -> Config:
    """Return the config with a `bk` of 0 replaced by 64 bytes: two fragments of 16, in tf32 of 8."""
    return complete(config, {"bk": 64 // dtypes.get(problem.dtype).size})


def _mma_f64(name: str, problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles, and the widest instruction of the device."""
    bm, bn, bk, stages = (config[key] for key in ("bm", "bn", "bk", "stages"))
    threads = _threads(config, 16, 8, 16)
    if stages < 2:
        raise RefusedError(f"stages={stages}: one tile is read while another is filled; use 2 or more")
    if (registers := REGISTERS // (threads * config["blocks"])) < _LEAST_REGISTERS:
        raise RefusedError(
            f"blocks={config['blocks']} of {threads} threads: {registers} registers are left for each, and mma in f64 "
            f"takes {_LEAST_REGISTERS} at least; use fewer blocks or larger tiles of a warp"
        )
    wide = target(problem).capability >= 90
    return Geometry(
        f"{name}.cu",
        instance(name, problem, access(problem), _tiling(config), stages, config["blocks"], wide),
        tiles(problem, bm, bn),
        (threads, 1, 1),
        shared=stages * (bm + bn) * bk * 8,
        needs=80,
        instructions="mma.sync in f64 and cp.async",
        tile=(bm, bn),
    )


def _resolve_f64(problem: Problem, config: Config) -> Config:
    """Return the config with every 0 replaced: by the tile that should take least time."""
    return complete(config, quickest(MMA_F64, problem.m, problem.n, problem.batch, target(problem).sms)._asdict())


def _fragments(name: str, problem: Problem, config: Config) -> Geometry:
    """A kernel with the fragments of wmma.cuh, of 8 x 8 x 4 in f64.

    Shared memory holds two padded tiles of A and B, then sums for C.
    """
    bm, bn, bk, _, wn = _tile(config)
    size = dtypes.get(problem.dtype).size
    m, n, k = (8, 8, 4) if size == 8 else (16, 16, 32 // size)
    threads = _threads(config, m, n, 2 * k)
    filled = _padded(bm, bk, size, problem.a_layout != "col") + _padded(bn, bk, size, problem.b_layout != "row")
    patches = threads // WARP * m * (wn + 4) * max(4, size)
    return Geometry(
        f"{name}.cu",
        instance(name, problem, access(problem), _tiling(config), config["blocks"]),
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
    return tuple(config[key] for key in _KEYS)


def _tiling(config: Config) -> str:
    return template("WarpTiles", *_tile(config))


def _threads(config: Config, m: int, n: int, k: int) -> int:
    """Return the threads of a block: a warp per wm x wn of bm x bn, by instructions of m x n, with at least this k."""
    sides = {key: config[key] for key in _KEYS}
    for key, least in zip(_KEYS, (m, n, k, m, n), strict=True):
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


TENSOR = (
    gpu_rung(
        "wmma_f64",
        idea="a warp multiplies fragments of 8 x 4 and 4 x 8 in one instruction",
        parent="simt_smem",
        dtypes=("f64",),
        geometry=_fragments,
        space=_SPACE,
        default={"bm": 128, "bn": 128, "bk": 16, "wm": 64, "wn": 32, "blocks": 1},
        expect=_WIDE,
        lesson=(
            "One warp instruction does the work of eight multiply-adds per thread, on fragments distributed over the "
            "lanes. The limit moves: shared memory and tile loads must keep up, so a warp computes a tile of 64 x 32. "
            "This instruction runs at half the rate that Hopper's tensor cores reach in float64."
        ),
    ),
    tensor_rung(
        "wmma_f16",
        idea="fragments of 16 x 16 x 16 in half precision, with sums in f32",
        parent="wmma_f64",
        geometry=_fragments,
        resolve=_resolve_f16,
        space={**_SPACE, "bk": (0, 16, 32, 64)},
        default={"bm": 128, "bn": 128, "bk": 0, "wm": 64, "wn": 32, "blocks": 2},  # bk 0: 64 bytes
        expect=_WIDE,
        lesson=(
            "The same program with another element type is four to eight times as fast: the easy way to use tensor "
            "cores. It reaches a third of the vendor's speed: arithmetic no longer hides the wait for tiles, and the "
            "compiler chooses the layout of fragments, so they cannot be loaded in a better way."
        ),
    ),
    gpu_rung(
        "mma_f64",
        idea="mma.sync in f64 from a swizzled ring of tiles, 16 x 8 x 4 per instruction where available",
        parent="wmma_f64",
        dtypes=("f64",),
        geometry=_mma_f64,
        resolve=_resolve_f64,
        space=_RING,
        expect={**_WIDE, "bank_conflicts": 0},
        lesson=(
            "mma.sync defines which lane holds which element, so the tile can be laid out for it: no bank conflicts, "
            "and no registers needed to store tiles. A ring of tiles hides the latency of memory, and reading "
            "fragments one step ahead hides that of shared memory. Which instruction shape reaches the peak depends on "
            "the architecture: measure it first."
        ),
    ),
)
