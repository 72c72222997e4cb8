"""Check of a product on the device: every element is written, and a sample of them is within the bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from gemmery import dtypes, verify
from gemmery.bench import work as works
from gemmery.bench.resident import Resident, poison
from gemmery.bench.work import BLOCK
from gemmery.dtypes import Array
from gemmery.lab.measurements import WRONG

SAMPLED = {"float64": 5e7}  # operations of the reference, which for f64 uses extended precision at 0.3 GFLOP/s
SAMPLED_WIDE = 2e8  # and for narrower types, which use NumPy's product
TF32 = 2.0**14 + 8  # two factors rounded to 11 bits each, 2^-10 together, in units of f32's 2^-24


def error(resident: Resident, run: Callable[[], None], bound: Callable[[int], float]) -> float:
    """Return the largest |C - reference| over its bound after `run`, which computes the first set of operands.

    C is filled with what no product has first. An element outside its bound gives more than 1, an unwritten one WRONG.
    """
    resident.poison()
    run()
    resident.stream.synchronize()
    a, b, _ = resident.host
    work, c = resident.work, resident.result()
    if work.groups:
        rows = [slice(*ends) for ends in itertools.pairwise([0, *works.offsets(work).tolist()])]
        pairs = [(c[:, part], a[:, part], b[group : group + 1]) for group, part in enumerate(rows)]
        share = 1 / len(pairs)
        return max(compared(*pair, bound, share=share) for pair in pairs if pair[1].size)
    return compared(c, a, b, bound, work.precision, factors=works.factors(work) if work.scales else ())


def compared(
    c: Array,
    a: Array,
    b: Array,
    bound: Callable[[int], float],
    precision: str = "",
    factors: tuple[Array, ...] = (),
    share: float = 1.0,
) -> float:
    """Return the largest error of C = A B over its bound; each is a batch of matrices.

    All of C must have been written over `resident.poison`. Some rows and columns, including the first and the last, are
    compared with the reference; with a `share` below 1, fewer.
    """
    bits = c.view(f"u{c.dtype.itemsize}")
    if (bits == int.from_bytes(bytes([poison(c.dtype)]) * c.dtype.itemsize, "little")).any():
        return WRONG
    batch, rows, columns = sample(c.shape, a.shape[-1], share * SAMPLED.get(a.dtype.name, SAMPLED_WIDE))
    x, y = (exact(z) for z in (a[batch][:, rows], b[batch][:, :, columns]))
    if factors:
        blocks = np.arange(a.shape[-1]) // BLOCK
        x = x * _every(factors[0], rows, blocks)
        y = y * _every(factors[1], blocks, columns // BLOCK)
    checked = verify.check(
        c[np.ix_(batch, rows, columns)],
        x,
        y,
        (lambda k: bound(k) + TF32) if precision == "tf32" else bound,
        most_flops=math.inf,
    )
    return min(checked.error_over_bound, WRONG)


def exact(x: Array) -> Array:
    """Return elements of float8 as float32, others as they are."""
    return x.astype(np.float32) if dtypes.get(x.dtype.name).name in dtypes.FP8 else x


def _every(factors: Array, rows: Array, columns: Array) -> Array:
    """Return the factor of each element of some rows and columns."""
    return factors if factors.ndim == 1 else factors[np.ix_(rows, columns)]


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
