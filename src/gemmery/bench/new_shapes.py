"""Products of random shapes, each new to the process: the shapes, and the records that are taken of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemmery import dtypes
from gemmery.bench.work import Work, numpy_dtype

EMPTY, WARM, MET = "empty cache", "warm cache", "met before"
FIRST, REST, WORST = "first product", "after the first product", "worst later call"
CASES = (EMPTY, WARM, MET)  # totals over all shapes
COMPARED = (EMPTY, WARM, f"{WARM}, {REST}", MET)  # cases that are compared with the rival's total
Pairs = Sequence[tuple[Any, Any]]


def shapes(work: Work) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of `batch` products, each side 2**u with u uniform from 0 to log2 of the side of `work`.

    >>> shapes(Work(1024, 1024, 1024, "f32", "f32", batch=2, seed=5))
    [(265, 270, 35), (7, 1, 14)]
    """
    import numpy as np

    sides = 2 ** np.random.default_rng(work.seed).uniform(0, np.log2(work.m), (work.batch, 3))
    return [(int(m), int(n), int(k)) for m, n, k in sides]


def pairs(work: Work, convert: Callable[[Any], Any] = lambda array: array) -> Pairs:
    """Return operands of each shape, cut from one matrix; `convert` makes a library's array of NumPy's."""
    import numpy as np

    rng, side = np.random.default_rng(work.seed), work.m
    if dtypes.get(work.dtype).kind in "iu":
        every = rng.integers(-9, 9, (side, side)).astype(numpy_dtype(work.dtype))
    else:
        every = rng.standard_normal((side, side), np.float32).astype(numpy_dtype(work.dtype))
    return [(convert(every[:m, :k].copy()), convert(every[:k, :n].copy())) for m, n, k in shapes(work)]


def flops(work: Work) -> int:
    """Return the operations of all products."""
    return sum(2 * m * n * k for m, n, k in shapes(work))
