"""The half of C below the diagonal, copied to above it, for products of a matrix with its own transpose; no rung."""

from __future__ import annotations

from gemmery.arrays import View
from gemmery.cuda.geometry import Geometry, instance
from gemmery.cuda.launch import CudaLaunch, Ready
from gemmery.problem import Config, Problem

_SIDE, _ROWS = 32, 8  # of a tile; rows of a block's threads


def mirroring(problem: Problem, c: View) -> Ready:
    """Return a function that mirrors square matrices of the shape and strides of C, at any address."""
    batch, n, _ = c.shape
    bare = Problem(n, n, 0, problem.dtype, problem.out, batch, c_layout=problem.c_layout, device=problem.device)
    a, b = (View(0, (batch, *sides), (0, 0, 0), problem.dtype) for sides in ((n, 0), (0, n)))
    return CudaLaunch(bare, {}, _geometry).ready(a, b, c)


def _geometry(problem: Problem, _: Config) -> Geometry:
    tiles = -(-problem.n // _SIDE)
    grid = tiles * (tiles + 1) // 2, problem.batch, 1
    return Geometry("mirror.cu", instance("mirror", problem, _SIDE), grid, (_SIDE, _ROWS, 1))
