"""Products in which other operations take the place of addition and multiplication: what they are, and log_sum_exp.

C[i, j] is the "sum" over k of the "products" of A[i, k] and B[k, j]:

| semiring | product | sum | where k is 0 |
| --- | --- | --- | --- |
| min_plus | a + b | the least | inf |
| max_plus | a + b | the largest | -inf |
| max_times | a b | the largest | -inf |
| or_and | a and b | or | False |
| log_sum_exp | a + b | log(sum(exp(...))) | -inf |

Each product of the first three is rounded once, in float64, or in float32 for narrower types, and nothing else is. One
that is NaN (inf - inf, 0 inf, an operand) is left out, as np.fmin and np.fmax leave it out. log_sum_exp keeps NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmery import arrays
from gemmery.api import compute
from gemmery.api.checked import CheckedCall
from gemmery.api.checks import checked_call
from gemmery.arrays import view
from gemmery.cpu.packed_once import PackedView
from gemmery.dtypes import Array
from gemmery.keywords import NO_OPTIONS

# Sums of exponentials below this may have lost terms that underflow; those above lost less than 2^-60 of themselves.
_LEAST = 2.0**-900
_AT_ONCE = 1 << 20  # terms that are evaluated one by one at a time


def product(call: CheckedCall, out: Any) -> Any:
    """Return the product on the CPU in the semiring of the call, as `compute.product` does."""
    if call.options.semiring != "log_sum_exp":
        return compute.product(call, out)
    a, b = call.operands
    if isinstance(call.b, PackedView):
        b.check(call.common, call.result, call.options.semiring)
    arrays.unchanged(a=call.a, b=call.b, out=None if out is None else call.c)
    p, q = (arrays.as_numpy(z if z.dtype == "f64" else arrays.converted(z, "f64")) for z in (call.a, call.b))
    value = log_sum_exp(p, q, call.options.threads)
    like = arrays.kind(a, b) if out is None else value
    c = arrays.empty(like, value.shape, call.result)
    arrays.store(view(value), c)
    if out is None:
        return arrays.wrap(like, c.owner)
    arrays.store(c, call.c)
    arrays.written(out)
    return out


def log_sum_exp(a: Array, b: Array, threads: int | None) -> Array:
    """Return log(sum over k of exp(a[i, k] + b[k, j])) of float64.

    That is a product of exponentials, each divided by that of the largest element of its row of A or column of B. Where
    it is so small that terms may be lost, or no number, its terms are summed one by one, next to the largest.
    """
    one_row, one_column = a.ndim == 1, b.ndim == 1
    a, b = a[None] if one_row else a, b[:, None] if one_column else b
    if a.shape[-1] == b.shape[-2] == 0:
        values = np.full((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), -np.inf)
    else:
        with np.errstate(all="ignore"):
            tops = [_finite(z.max(axis, keepdims=True, initial=-np.inf)) for z, axis in ((a, -1), (b, -2))]
            p, q = (np.exp(z - top) for z, top in zip((a, b), tops, strict=True))
            options = NO_OPTIONS._replace(threads=threads)
            sums = compute.product(checked_call("matmul", view(p), view(q), None, options, operands=(p, q)), None)
            values = np.log(sums) + tops[0] + tops[1]
            lost = ~((sums >= _LEAST) & (sums < np.inf))
        if lost.any():
            values[lost] = _one_by_one(a, b, np.nonzero(lost))
    values = values.squeeze(-1) if one_column else values  # of operands of one dimension
    return values.squeeze(-1 if one_column else -2) if one_row else values


def _finite(tops: Array) -> Array:
    """Return the largest elements, and 0 where they are infinite or NaN."""
    return np.where(np.isfinite(tops), tops, 0)


def _one_by_one(a: Array, b: Array, places: tuple[Array, ...]) -> Array:
    """Return elements of the result at these indices, each from all of its terms."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(z, (*batch, *z.shape[-2:])) for z in (a, b))
    values = np.empty(len(places[0]))
    step = max(1, _AT_ONCE // a.shape[-1])
    for first in range(0, len(values), step):
        *along, i, j = (each[first : first + step] for each in places)
        with np.errstate(all="ignore"):
            terms = a[(*along, i)] + np.moveaxis(b, -2, -1)[(*along, j)]
            top = _finite(terms.max(-1, keepdims=True))
            values[first : first + step] = np.log(np.exp(terms - top).sum(-1)) + top[:, 0]
    return values
