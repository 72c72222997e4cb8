"""Check of a product on the device: every element is written, and a sample of them is within the bound."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gemmery import verify
from gemmery.bench.resident import Resident
from gemmery.dtypes import Array
from gemmery.lab.measurements import WRONG

SAMPLED = {"float64": 5e7}  # operations of the reference, which for f64 uses extended precision at 0.3 GFLOP/s
SAMPLED_WIDE = 2e8  # and for narrower types, which use NumPy's product
TF32 = 2.0**14 + 8  # two factors rounded to 11 bits each, 2^-10 together, in units of f32's 2^-24


def error(resident: Resident, run: Callable[[], None], bound: Callable[[int], float]) -> float:
    """Return the largest |C - reference| over its bound after `run`, which computes the first set of operands.

    C is filled with NaN first. An element outside its bound gives more than 1, an unwritten one WRONG.
    """
    resident.poison()
    run()
    resident.stream.synchronize()
    a, b, _ = resident.host
    return compared(resident.result(), a, b, bound, resident.work.precision)


def compared(c: Array, a: Array, b: Array, bound: Callable[[int], float], precision: str = "") -> float:
    """Return the largest error of C = A B over its bound; each is a batch of matrices.

    All of C must have been written over NaN with all bits set. Some rows and columns, including the first and the
    last, are compared with the reference.
    """
    bits = c.view(f"u{c.dtype.itemsize}")
    if (bits == np.iinfo(bits.dtype).max).any():
        return WRONG
    batch, rows, columns = sample(c.shape, a.shape[-1], SAMPLED.get(a.dtype.name, SAMPLED_WIDE))
    checked = verify.check(
        c[np.ix_(batch, rows, columns)],
        a[batch][:, rows],
        b[batch][:, :, columns],
        (lambda k: bound(k) + TF32) if precision == "tf32" else bound,
        most_flops=math.inf,
    )
    return min(checked.error_over_bound, WRONG)


def sample(shape: tuple[int, ...], k: int, most: float, seed: int = 0) -> tuple[Array, ...]:
    """Return indices of matrices, rows and columns whose product takes at most about `most` operations.

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

    def some(count: int, most: int) -> Array:
        if most >= count:
            return np.arange(count)
        inner = draw.choice(count, most, replace=False)
        inner[:2] = [0, count - 1][: len(inner)]
        return np.unique(inner)

    return some(batch, matrices), some(m, rows), some(n, columns)
