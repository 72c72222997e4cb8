"""Sums of wgmma in f32 as Hopper's tensor cores round them.

One instruction adds 32 bytes along k to the sums. All its products and the sum before are aligned to the largest
exponent, cut toward zero to some bits of fraction below it, and added exactly; the result is cut to the bits of a sum.
The order within an instruction does not matter. Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores"
(arXiv 2512.07004), state the rule and publish results of devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemmery.dtypes import Array

LEAST = -133  # exponent below which nothing is aligned
ZERO = -(1 << 14)  # the exponent of a zero: below all others
NORMAL = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}  # least exponents of normal numbers


@dataclass(frozen=True)
class SumRule:
    """Bits of fraction that are kept of each product, and of the result."""

    aligned: int
    result: int


WIDE, NARROW = SumRule(25, 23), SumRule(13, 13)
RULES = {"f16": WIDE, "bf16": WIDE, "tf32": WIDE, "e4m3": NARROW, "e5m2": NARROW}


def added(before: Array, a: Array, b: Array, a_type: str, b_type: str) -> Array:
    """Add A (warpgroups, rows, k) times the transpose of B (warpgroups, n, k) to sums in f32, as one instruction does.

    >>> ones = np.ones((1, 1, 16), np.float32)
    >>> start = np.full((1, 1, 1), 2.0**25, np.float32)
    >>> float(added(start, ones, ones / 4, "f16", "f16")[0, 0, 0] - 2.0**25)  # each of the quarters is cut off
    0.0
    """
    parts = [_of_one(*pair, a_type, b_type) for pair in zip(before, a, b, strict=True)]
    return np.stack(parts)


def _of_one(before: Array, a: Array, b: Array, a_type: str, b_type: str) -> Array:
    """The sums of one warpgroup: (rows, n)."""
    rule = RULES[a_type]
    products = a[:, None, :].astype(np.float64) * b
    exponents = _exponents(a, NORMAL[a_type])[:, None, :] + _exponents(b, NORMAL[b_type])
    largest = np.maximum(exponents.max(axis=2), _exponents(before, NORMAL["bf16"]))
    scale = np.ldexp(1.0, rule.aligned - np.maximum(largest, LEAST))
    products *= scale[:, :, None]
    np.trunc(products, out=products)
    sums = (products.sum(axis=2) + np.trunc(before * scale)) / scale
    if not np.isfinite(sums).all():  # infinities and NaN follow the usual rules
        plain = (a[:, None, :].astype(np.float64) * b).sum(axis=2) + before
        sums = np.where(np.isfinite(sums), sums, plain)
    return _cut(sums, rule.result)


def _exponents(values: Array, normal: int) -> NDArray[np.int16]:
    """The exponent of each number, that of the least normal number for those below it."""
    exponents = np.frexp(values)[1].astype(np.int16) - np.int16(1)
    return np.where(values == 0, np.int16(ZERO), np.maximum(exponents, np.int16(normal)))


def _cut(sums: Array, fraction: int) -> Array:
    """Round toward zero to f32 with so many bits of fraction."""
    cut = sums.astype(np.float32)
    beyond = np.abs(cut.astype(np.float64)) > np.abs(sums)
    cut = np.where(beyond & np.isfinite(sums), np.nextafter(cut, np.float32(0)), cut)
    if fraction < 23:
        keep = np.uint32(0xFFFFFFFF << 23 - fraction & 0xFFFFFFFF)
        cut = np.where(np.isfinite(cut), (cut.view(np.uint32) & keep).view(np.float32), cut)
    return cut
