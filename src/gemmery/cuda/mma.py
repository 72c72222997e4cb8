"""How the kernels on tensor cores by mma.sync and ldmatrix are launched."""

from __future__ import annotations

import math
from collections.abc import Mapping

from gemmery.cuda.geometry import LAYOUTS, Geometry, instance, tiles, vector
from gemmery.errors import RefusedError
from gemmery.problem import Problem

Config = Mapping[str, int]
WARP = 32


def ldmatrix(problem: Problem, config: Config) -> Geometry:
    """One tile of A and of B at a time."""
    return _by_warps("mma_ldmatrix", problem, config, 1)


def pipelined(problem: Problem, config: Config) -> Geometry:
    """A ring of `stages` tiles of A and of B."""
    stages = config["stages"]
    if not 2 <= stages <= 8:
        raise RefusedError(f"stages={stages}: a ring has 2 to 8 tiles; 3 or 4 hide the latency of memory")
    return _by_warps("mma_pipelined", problem, config, stages, stages)


def _by_warps(name: str, problem: Problem, config: Config, stages: int, *parameters: int) -> Geometry:
    """A block of bm x bn, a warp for each wm x wn of it, and `stages` tiles of both operands in shared memory."""
    bm, bn, bk, wm, wn = (config[key] for key in ("bm", "bn", "bk", "wm", "wn"))
    size = 4 if problem.precision else 2
    _check_tile(bm, bn, bk, wm, wn, 32 // size)
    threads = (bm // wm) * (bn // wn) * WARP
    vectors = _elements(problem, 0), _elements(problem, 1), math.gcd(_elements(problem, 2), problem.n)
    layouts = (LAYOUTS[problem.a_layout], LAYOUTS[problem.b_layout])
    return Geometry(
        f"{name}.cu",
        instance(name, problem, *layouts, *vectors, _ragged(problem, vectors), bm, bn, bk, wm, wn, *parameters),
        tiles(problem, bm, bn),
        (threads, 1, 1),
        shared=stages * (bm + bn) * bk * size,
        needs=80,
        instructions="mma.m16n8k16 and cp.async",
        tile=(bm, bn),
    )


def _elements(problem: Problem, operand: int) -> int:
    """How many elements of A (0), B (1) or C (2) one access takes: one where neighbours are not adjacent."""
    layout = (problem.a_layout, problem.b_layout, problem.c_layout)[operand]
    return 1 if layout == "any" else vector(problem, operand)


def _ragged(problem: Problem, vectors: tuple[int, ...]) -> bool:
    """Whether an access to A or B may begin inside and end outside of it."""
    a_side = problem.m if problem.a_layout == "col" else problem.k
    b_side = problem.k if problem.b_layout == "col" else problem.n
    return a_side % vectors[0] != 0 or b_side % vectors[1] != 0


def _check_tile(bm: int, bn: int, bk: int, wm: int, wn: int, group: int) -> None:
    sides = {"bm": bm, "bn": bn, "bk": bk, "wm": wm, "wn": wn}
    for key, side in sides.items():
        if side < 16 or side & (side - 1):
            raise RefusedError(f"{key}={side}: a side of a swizzled tile is a power of two from 16 on")
    if bm < 32 or bn < 32 or bk < 2 * group or wm > bm or wn > bn:
        text = ", ".join(f"{key}={side}" for key, side in sides.items())
        raise RefusedError(
            f"{text}: a block has at least 32 x 32, warps of it at most its size, and bk two groups of {group}"
        )
