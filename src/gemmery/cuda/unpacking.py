"""A matrix of 8 or 4 bits an element as one of half precision, for products of many rows; no rung."""

from __future__ import annotations

from gemmery.cuda.geometry import Geometry, instance
from gemmery.cuda.launch import CudaLaunch
from gemmery.problem import Config, Problem

PIECE = 8  # elements that a thread writes at a time, of one group
_THREADS, _EACH = 256, 4  # threads of a block, pieces of a thread


def unpacking(rows: int, columns: int, dtype: str, bits: int, group: int, device: str) -> CudaLaunch:
    """Return a function that writes the (rows, columns) matrix C of packed B, whose factors lie in scratch memory.

    Arrays are contiguous and begin at multiples of 16 bytes, and `group` is a multiple of PIECE columns.
    """
    problem = Problem(rows, columns, 0, dtype, dtype, device=device, bits=bits, group=group)
    return CudaLaunch(problem, {}, _geometry)


def _geometry(problem: Problem, _: Config) -> Geometry:
    pieces = problem.m * problem.n // PIECE
    return Geometry(
        "unpack.cu",
        instance("unpack", problem, problem.bits, problem.group, _EACH),
        (-(-pieces // (_THREADS * _EACH)), 1, 1),
        (_THREADS, 1, 1),
    )
