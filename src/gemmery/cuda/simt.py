"""How the kernels on CUDA cores are launched."""

from __future__ import annotations

from collections.abc import Mapping

from gemmery.cuda.device import GRID
from gemmery.cuda.geometry import Geometry, instance
from gemmery.problem import Problem

Config = Mapping[str, int]


def naive(problem: Problem, config: Config) -> Geometry:
    """A warp along a row of C, so that its lanes read neighbours in B."""
    width = 32
    height = config["threads"] // width
    grid = (-(-problem.n // width), min(-(-problem.m // height), GRID[1]), min(problem.batch, GRID[2]))
    return Geometry("simt_naive.cu", instance("simt_naive", problem), grid, (width, height, 1))
