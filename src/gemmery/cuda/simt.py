"""Launches of the kernels on CUDA cores with one element of C per thread."""

from __future__ import annotations

from collections.abc import Mapping

from gemmery import arrange, dtypes
from gemmery.arrays import View, alignment
from gemmery.cuda.device import GRID
from gemmery.cuda.geometry import Geometry, instance, tiles, vector
from gemmery.cuda.launch import Launch
from gemmery.errors import DeviceError, DTypeError, RefusedError, ShapeError
from gemmery.problem import Problem

Config = Mapping[str, int]
WARP = 32


def single_block(problem: Problem, config: Config) -> Geometry:
    """One block with one thread per element of C."""
    return Geometry(
        "simt_single_block.cu", instance("simt_single_block", problem), (1, 1, 1), (problem.n, problem.m, 1)
    )


def naive(problem: Problem, config: Config) -> Geometry:
    """A warp along a row of C, so that its lanes read adjacent elements of B."""
    return _by_warps("simt_naive", problem, config, problem.n, problem.m)


def uncoalesced(problem: Problem, config: Config) -> Geometry:
    """A warp down a column of C."""
    return _by_warps("simt_uncoalesced", problem, config, problem.m, problem.n)


def linear(problem: Problem, config: Config) -> Geometry:
    """One-dimensional blocks over all elements of C, with sums in scratch memory if C cannot hold them."""
    threads = _positive(config, "threads")
    count = problem.batch * problem.m * problem.n
    apart = problem.scaled or problem.out in ("f16", "bf16")
    return Geometry(
        "simt_linear.cu",
        instance("simt_linear", problem),
        (-(-count // threads), 1, 1),
        (threads, 1, 1),
        workspace=count * max(4, dtypes.get(problem.out).size) if apart else 0,
    )


def packed(problem: Problem, config: Config) -> Geometry:
    """A launch that copies A and B into blocks, and one that multiplies these."""
    side = _positive(config, "block")
    rows, columns, depth = (-(-length // side) for length in (problem.m, problem.n, problem.k))
    blocks = problem.batch * depth * (rows + columns)
    threads = (side, side, 1)
    columns_first = bool(config["layout"])
    copy = instance("simt_packed_blocks", problem._replace(epilogue="", scaled=False), side, columns_first)
    return Geometry(
        "simt_packed.cu",
        instance("simt_packed", problem, side, columns_first),
        tiles(problem, side, side),
        threads,
        workspace=blocks * side * side * dtypes.get(problem.dtype).size,
        before=(Geometry("simt_packed.cu", copy, (blocks, 1, 1), threads),) if blocks else (),
    )


def smem(problem: Problem, config: Config) -> Geometry:
    """One thread per element of a square tile of C."""
    tile = _positive(config, "tile")
    kernel = instance("simt_smem", problem, tile)
    return Geometry("simt_smem.cu", kernel, tiles(problem, tile, tile), (tile, tile, 1), tile=(tile, tile))


def smem_transposed(problem: Problem, config: Config) -> Geometry:
    """As smem, with warps of 4 x 8 elements."""
    tile = config["tile"]
    if tile not in (8, 16, 32):
        raise RefusedError(f"tile={tile}: a tile consists of warps of 4 x 8 elements; use 8, 16 or 32")
    kernel = instance("simt_smem_transposed", problem, tile, bool(config["swizzle"]))
    grid = tiles(problem, tile, tile)
    return Geometry("simt_smem_transposed.cu", kernel, grid, (tile * tile, 1, 1), tile=(tile, tile))


def addition(a: View, b: View, c: View) -> Launch:
    """Return a function that computes C = A + B on three views of this shape (batch, m, n) and these strides.

    Raises ShapeError, DTypeError or DeviceError if the three differ.
    """
    for what, error in (("shape", ShapeError), ("dtype", DTypeError), ("device", DeviceError)):
        found = [getattr(view, what) for view in (a, b, c)]
        if len(set(found)) > 1:
            raise error(f"A + B = C with a {what} of {', '.join(map(str, found))}: the three must be equal")
    batch, m, n = c.shape
    size = dtypes.get(c.dtype).size
    a_layout, b_layout, c_layout = (arrange.layout(m, n, view.strides[1], view.strides[2], size) for view in (a, b, c))
    alignments = (_alignment(a, size), _alignment(b, size), _alignment(c, size))
    problem = Problem(
        m, n, 0, a.dtype, c.dtype, batch, a_layout, b_layout, c_layout, device=c.device, alignments=alignments
    )
    return Launch(problem, {"threads": 256}, add)


def add(problem: Problem, config: Config) -> Geometry:
    """One thread per chunk of a row, as wide as one access may be in A, B and C."""
    rows = (problem.a_layout, problem.b_layout, problem.c_layout) == ("row", "row", "row")
    width = min(vector(problem, operand) for operand in range(3)) if rows else 1
    packs = problem.batch * problem.m * -(-problem.n // width)
    return Geometry(
        "simt_add.cu",
        instance("simt_add", problem, width),
        (-(-packs // config["threads"]), 1, 1),
        (config["threads"], 1, 1),
    )


def _by_warps(name: str, problem: Problem, config: Config, along: int, across: int) -> Geometry:
    """Warps along one direction of C; blocks step over the other, because a grid ends at 65535 blocks."""
    height = config["threads"] // WARP
    if config["threads"] != height * WARP or not height:
        raise RefusedError(f"threads={config['threads']}: a block consists of whole warps; use a multiple of {WARP}")
    grid = (-(-along // WARP), min(-(-across // height), GRID[1]), min(problem.batch, GRID[2]))
    return Geometry(f"{name}.cu", instance(name, problem), grid, (WARP, height, 1))


def _positive(config: Config, key: str) -> int:
    if config[key] < 1:
        raise RefusedError(f"{key}={config[key]}: it must be at least 1")
    return config[key]


def _alignment(view: View, size: int) -> int:
    """Return the alignment in bytes of the pointer and of all strides except that of adjacent elements."""
    walked = zip(view.strides, view.shape, strict=True)
    return alignment(view.pointer, tuple(step for step, length in walked if length > 1 and step != size))
