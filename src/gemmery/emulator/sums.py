"""Sums of products in float32 as Hopper's tensor cores add them.

A tensor core adds some products and the sum before at once: all are aligned to the largest exponent, each is cut toward
zero to some bits of fraction below it, they are added exactly, and the result is rounded to the type of the sum. Their
order does not matter. Numbers below the least normal one of their type have its exponent, and nothing is aligned
below 2^-133. Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004), and Xie et al.,
"MMA-Sim" (arXiv 2511.10909), state the rule; tests/data/sums_h200.npz has what an H200 adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmery.dtypes import Array

Added = Callable[[Array, Array, Array, "SumRule"], Array]

LEAST = -133  # exponent below which nothing is aligned
ZERO = -(1 << 12)  # the exponent of a zero: below all others
NORMAL = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}  # of least normal numbers
NAN = np.uint32(0x7FFFFFFF).view("f4")  # the bits of every NaN that a tensor core makes


@dataclass(frozen=True)
class SumRule:
    """How a tensor core adds products of two types."""

    depth: int  # products that are added at once
    a: int  # exponent of the least normal number of A's type
    b: int
    aligned: int = 25  # bits of fraction of what is added
    result: int = 23  # and of the sum in f32
    halves: bool = False  # sums are f16, to nearest: in f32 the last bit is set where bits are lost, to round again


def added(before: Array, a: Array, b: Array, rule: SumRule) -> Array:
    """Add A (any, m, k) times the transpose of B (any, n, k) to sums (any, m, n), all float32, `depth` of k at once.

    >>> ones, start = np.ones((1, 1, 16), np.float32), np.full((1, 1, 1), 2.0**25, np.float32)
    >>> rule = SumRule(16, NORMAL["f16"], NORMAL["f16"])
    >>> float(added(start, ones, ones / 4, rule)[0, 0, 0] - 2.0**25)  # each of the quarters is cut off
    0.0
    """
    for k in range(0, a.shape[2], rule.depth):
        part = slice(k, k + rule.depth)
        before = _at_once(before, a[:, :, None, part], b[:, None, :, part], rule)
    return before


def chained(core: Added, before: Array, a: Array, b: Array, rule: SumRule) -> Array:
    """Return what `added`, or the function `core` with the same bits, adds; sums in f16 are rounded after each step."""
    if not rule.halves:
        return core(before, a, b, rule)
    for k in range(0, a.shape[2], rule.depth):
        part = slice(k, k + rule.depth)
        before = core(before, a[:, :, part], b[:, :, part], rule).astype(np.float16) + np.float32(0)
    return usual(before)


def usual(sums: Array) -> Array:
    """Give all NaN the bits that the hardware gives them."""
    return np.where(np.isnan(sums), NAN, sums)


def _at_once(before: Array, a: Array, b: Array, rule: SumRule) -> Array:
    """The sums after one addition; each pass over them is for one k, so that what it needs stays in the cache."""
    depth = range(a.shape[3])
    of_a, of_b = _exponents(a, rule.a), _exponents(b, rule.b)
    largest = np.maximum(_exponents(before, NORMAL["f32"]), np.int16(LEAST))
    pair, term = np.empty(before.shape, np.int16), np.empty(before.shape)
    for k in depth:
        np.maximum(largest, np.add(of_a[..., k], of_b[..., k], out=pair), out=largest)
    scale = np.ldexp(1.0, rule.aligned - largest)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    total = np.trunc(before * scale)
    for k in depth:
        np.multiply(wide_a[..., k], wide_b[..., k], out=term)
        total += np.trunc(np.multiply(term, scale, out=term), out=term)
    sums = _rounded(total / scale, rule)
    special = ~np.isfinite(total)
    if special.any():  # infinities and NaN follow the usual rules
        sums = np.where(special, usual(((wide_a * wide_b).sum(axis=3) + before).astype(np.float32)), sums)
    return sums


def _exponents(values: Array, normal: int) -> NDArray[np.int16]:
    """The exponent of each number, that of the least normal number for those below it."""
    exponents = np.frexp(values)[1].astype(np.int16) - np.int16(1)
    return np.where(values == 0, np.int16(ZERO), np.maximum(exponents, np.int16(normal)))


def _rounded(sums: Array, rule: SumRule) -> Array:
    """Cut float64 toward zero to float32 with the bits of the result, or round it to odd; there is no negative zero."""
    grid = np.maximum(np.frexp(sums)[1] - 1, NORMAL["f32"]) - rule.result
    units = np.trunc(np.ldexp(sums, -grid))
    if rule.halves:
        lost = np.ldexp(units, grid) != sums
        units += np.where(lost & (units % 2 == 0), np.copysign(1.0, sums), 0.0)
    rounded: Array = np.ldexp(units, grid).astype(np.float32) + np.float32(0)
    return rounded
