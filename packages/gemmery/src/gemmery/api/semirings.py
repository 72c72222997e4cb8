"""Products in which other operations take the place of addition and multiplication: what is checked, log_sum_exp.

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

from gemmery import arrays, dtypes
from gemmery.api import compute
from gemmery.api.repeats import Terms
from gemmery.arrays import View, view
from gemmery.cpu.packed_once import PackedView
from gemmery.dtypes import Array
from gemmery.errors import ArgumentError, DTypeError, brief
from gemmery.keywords import SEMIRINGS, Options

_NOTHING = {"bias": "add it to the result", "activation": "apply it to the result", "precision": "leave it out"}
_FACTORS = dict.fromkeys(("scale_a", "scale_b"), "multiply the operands by them first")
# Sums of exponentials below this may have lost terms that underflow; those above lost less than 2^-60 of themselves.
_LEAST = 2.0**-900
_AT_ONCE = 1 << 20  # terms that are evaluated one by one at a time


def check(options: Options, common: str) -> str:
    """Return the semiring of a product of operands that promote to `common`; "" for the usual one, which bools have.

    Raises ArgumentError for a name that is none and for options that it has not, DTypeError for other element types.
    """
    name: Any = options.semiring
    if name is None:
        return ""
    if not isinstance(name, str) or name not in SEMIRINGS:
        raise ArgumentError(f"semiring={brief(name)} must be one of {', '.join(SEMIRINGS)}, or None")
    for option, way_out in {**_NOTHING, **_FACTORS}.items():
        if getattr(options, option) is not None:
            raise ArgumentError(f"semiring={name!r} has no {option}: {way_out}")
    long, kind = dtypes.get(common).numpy, dtypes.get(common).kind
    if name == "or_and":
        if kind != "b" or options.dtype is not None:
            raise DTypeError(f"semiring='or_and' takes bools, not {options.dtype or long}: pass a != 0 and b != 0")
        return ""
    if kind != "f" or common in dtypes.FLOAT8:
        raise DTypeError(f"semiring={name!r} takes float64, float32, float16 and bfloat16, not {long}: convert first")
    return name


def product(a: Any, b: Any, x: View, y: View, common: str, result: str, out: Any, terms: Terms) -> Any:
    """Return the product of views on the CPU in the semiring of `terms`, as `compute.product` does."""
    if terms.semiring != "log_sum_exp":
        return compute.product(a, b, x, y, common, result, out, terms)
    if isinstance(y, PackedView):
        b.check(common, result, terms.semiring)
    arrays.unchanged(a=x, b=y)
    left, right = (arrays.as_numpy(z if z.dtype == "f64" else arrays.converted(z, "f64")) for z in (x, y))
    value = log_sum_exp(left, right, terms)
    like = arrays.kind(a, b) if out is None else value
    target = arrays.empty(like, value.shape, result)
    arrays.store(view(value), target)
    if out is None:
        return arrays.wrap(like, target.owner)
    compute.writable(view(out), value.shape, result)
    arrays.store(target, view(out))
    arrays.written(out)
    return out


def log_sum_exp(a: Array, b: Array, terms: Terms) -> Array:
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
            sums = compute.product(p, q, view(p), view(q), "f64", "f64", None, Terms(threads=terms.threads))
            values = np.log(sums) + tops[0] + tops[1]
            lost = ~((sums >= _LEAST) & (sums < np.inf))
        if lost.any():
            values[lost] = _one_by_one(a, b, np.nonzero(lost))
    return _squeezed(values, one_row, one_column)


def _squeezed(values: Array, one_row: bool, one_column: bool) -> Array:
    """Return the values without the sides that operands of one dimension have not."""
    values = values[..., 0] if one_column else values
    return values[..., 0] if one_row and one_column else values[..., 0, :] if one_row else values


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
