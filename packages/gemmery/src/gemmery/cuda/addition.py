"""The sum of two matrices, which the chain of products R = A (A + B) needs; no rung."""

from __future__ import annotations

from gemmery import arrange, dtypes
from gemmery.arrays import View, alignment
from gemmery.cuda.geometry import Geometry, instance, vector
from gemmery.cuda.launch import CudaLaunch
from gemmery.errors import DeviceError, DTypeError, ShapeError
from gemmery.problem import Config, Problem


def addition(a: View, b: View, c: View) -> CudaLaunch:
    """Return a function that computes C = A + B on three views of this shape (batch, m, n) and these strides.

    Raises ShapeError, DTypeError or DeviceError if the three differ.
    """
    for what, error in (("shape", ShapeError), ("dtype", DTypeError), ("device", DeviceError)):
        values = [getattr(view, what) for view in (a, b, c)]
        if len(set(values)) > 1:
            raise error(f"A + B = C with a {what} of {', '.join(map(str, values))}: the three must be equal")
    batch, m, n = c.shape
    size = dtypes.get(c.dtype).size
    a_layout, b_layout, c_layout = (arrange.layout(m, n, view.strides[1], view.strides[2], size) for view in (a, b, c))
    alignments = (_alignment(a, size), _alignment(b, size), _alignment(c, size))
    problem = Problem(
        m, n, 0, a.dtype, c.dtype, batch, a_layout, b_layout, c_layout, device=c.device, alignments=alignments
    )
    return CudaLaunch(problem, {"threads": 256}, geometry)


def geometry(problem: Problem, config: Config) -> Geometry:
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


def _alignment(view: View, size: int) -> int:
    """Return the alignment in bytes of the pointer and of all strides except that of adjacent elements."""
    walked = zip(view.strides, view.shape, strict=True)
    return alignment(view.pointer, tuple(step for step, length in walked if length > 1 and step != size))
