"""Whether a product on the device is right: every element written, and a sample of them within the bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gemmery import verify
from gemmery.bench.gpu.operands import Resident
from gemmery.lab.results import WRONG

SAMPLED = {"f64": 5e7}  # operations of the reference: for f64 it has extended precision, and does 0.3 GFLOP/s
SAMPLED_WIDE = 2e8  # and by NumPy's own product for what is narrower
TF32 = 2.0**14 + 8  # two factors rounded to 11 bits each, 2^-10 together, in units of f32's 2^-24


def error(resident: Resident, run: Callable[[], None], bound: Callable[[int], float]) -> float:
    """The largest |C - reference| over its bound after `run`, which computes the first set of operands.

    C is full of NaN before. All of it must have been written; some rows and columns, the first and the last among
    them, are compared with the reference. An element outside its bound gives more than 1, an unwritten one WRONG.
    """
    resident.poison()
    run()
    resident.stream.synchronize()
    c = resident.result()
    bits = c.view(f"u{c.dtype.itemsize}")
    if (bits == np.iinfo(bits.dtype).max).any():
        return WRONG
    a, b, _ = resident.host
    work = resident.work
    where = sample(c.shape, work.k, SAMPLED.get(work.dtype, SAMPLED_WIDE))
    batch, rows, columns = np.ix_(*where)
    loose = (lambda k: bound(k) + TF32) if work.precision == "tf32" else bound
    found = verify.check(
        c[batch, rows, columns],
        a[where[0]][:, where[1]],
        b[where[0]][:, :, where[2]],
        loose,
        most_flops=math.inf,
    )
    return min(found.error_over_bound, WRONG)


def sample(
    shape: tuple[int, ...], k: int, most: float, seed: int = 0
) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], ...]:
    """Indices of matrices, rows and columns whose product takes at most about `most` operations.

    >>> [len(some) for some in sample((1, 4096, 4096), 4096, 2e8)]
    [1, 156, 156]
    """
    batch, m, n = shape
    elements = max(1, int(most / (2 * max(k, 1))))
    matrices = min(batch, max(1, elements // (m * n), min(batch, 4)))
    each = max(1, elements // matrices)
    rows = min(m, max(1, math.isqrt(each), each // n))
    columns = min(n, max(1, each // rows))
    draw = np.random.default_rng(seed)

    def some(count: int, wanted: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        if wanted >= count:
            return np.arange(count)
        inner = draw.choice(count, wanted, replace=False)
        inner[:2] = [0, count - 1][: len(inner)]
        return np.unique(inner)

    return some(batch, matrices), some(m, rows), some(n, columns)
