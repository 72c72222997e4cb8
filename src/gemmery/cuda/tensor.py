"""How the kernels on tensor cores by wmma, and by mma in float64, are launched."""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.cuda.device import find
from gemmery.cuda.geometry import LAYOUTS, Geometry, instance, tiles, vector
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]
WARP = 32
THREADS = 1024  # a block


def mma_f64(problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles, and the widest instruction that the device has."""
    bm, bn, bk, wm, wn, stages = (config[key] for key in ("bm", "bn", "bk", "wm", "wn", "stages"))
    threads = _threads(config, 16, 8, 16)
    if stages < 2:
        raise RefusedError(f"stages={stages}: one tile is read while another is filled; use 2 or more")
    kernel = instance(
        "mma_f64",
        problem,
        LAYOUTS[problem.a_layout],
        LAYOUTS[problem.b_layout],
        *_accesses(problem),
        *(bm, bn, bk, wm, wn, stages, config["blocks"]),
        find(problem.device).capability >= 90,
    )
    shared = stages * (bm + bn) * bk * 8
    return Geometry(
        "mma_f64.cu",
        kernel,
        tiles(problem, bm, bn),
        (threads, 1, 1),
        shared,
        needs=80,
        instructions="mma.sync in f64 and cp.async",
    )


def _threads(config: Config, m: int, n: int, k: int) -> int:
    """Threads of a block: a warp for each wm x wn of bm x bn, by instructions of m x n with steps of k."""
    bm, bn, bk, wm, wn = (config[key] for key in ("bm", "bn", "bk", "wm", "wn"))
    if min(bm, bn, bk, wm, wn) < 1 or bm % wm or bn % wn:
        raise RefusedError(f"wm={wm}, wn={wn} of bm={bm}, bn={bn}: a warp's tile divides the block's; change either")
    if wm % m or wn % n or bk % k:
        raise RefusedError(f"wm={wm}, wn={wn}, bk={bk}: they are multiples of {m}, {n} and {k} here; change them")
    threads = bm // wm * (bn // wn) * WARP
    if threads > THREADS:
        raise RefusedError(
            f"bm={bm}, bn={bn}, wm={wm}, wn={wn}: {threads} threads; a block has at most {THREADS}; make the warp's "
            "tile larger"
        )
    return threads


def _accesses(problem: Problem) -> tuple[int, int, int]:
    """Elements of A, B and C that one access takes: they divide the side along memory, so that none crosses an edge."""
    sides = {"row": (problem.k, problem.n, problem.n), "col": (problem.m, problem.k, problem.m)}
    given = []
    for operand, layout in enumerate((problem.a_layout, problem.b_layout, problem.c_layout)):
        width = vector(problem, operand) if layout != "any" else 1
        while width > 1 and sides[layout][operand] % width:
            width //= 2
        given.append(width)
    return given[0], given[1], given[2]
