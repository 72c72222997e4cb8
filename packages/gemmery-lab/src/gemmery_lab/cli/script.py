"""Run a script with gemmery's kernels behind NumPy's products, and say what they saved."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from traceback import walk_tb

import numpy as np

from gemmery import numpy as installing
from gemmery.errors import ArgumentError
from gemmery.numpy import ProductCount
from gemmery.tuples import NamedTuple

_MOST_WORK = 1 << 24  # multiply-adds of a sample, 10 to 60 ms in NumPy's loops; larger products are cut along m
_BUDGET = 2.0  # s that all samples may take; classes with the most work come first


class UnrunnableError(ArgumentError):
    """What `gemmery run` was asked to run is neither a script nor a module."""


class TimedCount(NamedTuple):
    """Products of one element type and class of shapes, and the time that NumPy's own loops would have taken."""

    counted: ProductCount
    numpy_seconds: float | None  # None: not measured


def run(target: str, arguments: Sequence[str], types: Sequence[str], as_module: bool = False) -> None:
    """Run a script, or a module by name, as Python does, and count its products for `summary`.

    `types` are element types beside those of `gemmery.numpy.DEFAULT`. Exceptions of the script pass through.

    Raises UnrunnableError for what Python finds no code of.
    """
    installing.install([*installing.DEFAULT, *types])
    sys.argv[:] = [target, *arguments]
    installing.count(True)
    try:
        if as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    except ImportError as error:
        if any(frame.f_globals.get("__name__") not in (__name__, "runpy") for frame, _ in walk_tb(error.__traceback__)):
            raise
        raise UnrunnableError(
            f"{'module' if as_module else 'script'} {target!r}: {error}; give the path of a script or of a folder with "
            "__main__.py, or -m and the name of a module that Python finds"
        ) from error
    finally:
        installing.count(False)
        installing.uninstall()


def summary() -> tuple[TimedCount, ...]:
    """Return the products counted, with the times of NumPy's loops on samples of their last shapes."""
    counted = sorted(installing.counts(), key=lambda row: -row.work)
    late = time.perf_counter() + _BUDGET
    return tuple(TimedCount(row, _numpy_seconds(row) if time.perf_counter() < late else None) for row in counted)


def _numpy_seconds(row: ProductCount) -> float | None:
    """Return the time of NumPy's loop for all products of a class, from the shapes that it had last."""
    seconds = work = 0.0
    rng = np.random.default_rng(0)
    for batch, m, n, k in row.samples:
        rows = max(1, min(m, _MOST_WORK // max(n * k, 1)))
        count = max(1, min(batch, _MOST_WORK // max(rows * n * k, 1)))
        a, b = (rng.integers(0, 2, shape).astype(row.dtype) for shape in ((count, rows, k), (count, k, n)))
        start = time.perf_counter()
        a @ b
        seconds += time.perf_counter() - start
        work += count * rows * n * k
    return seconds * row.work / work if work else None


def text(rows: Sequence[TimedCount]) -> str:
    """Return the summary as lines of text."""
    if not rows:
        return "gemmery: no product of these types ran"
    lines = ["gemmery: products behind NumPy's matmul, vecdot, matvec and vecmat"]
    for counted, numpys in rows:
        spent = f"{counted.products:,} products in {counted.seconds:.3g} s"
        would = "" if numpys is None or not counted.products else f", by NumPy's loop about {numpys:.3g} s"
        rest = f"; {counted.numpys:,} by NumPy's loop in {counted.numpys_seconds:.3g} s" if counted.numpys else ""
        lines.append(f"  {counted.dtype}, {counted.shapes}: {spent}{would}{rest}")
    lines.append(
        "  NumPy's times are estimates: its loop was timed after the run, on random operands of the last shapes"
    )
    return "\n".join(lines)
