"""Products of float32 in parts by the rules, bit for bit, in float64: splitting, tensor cores, sums, the guard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

U = 2.0**-24
_NOTHING = -(10**5)  # the exponent of zero


class Parts(NamedTuple):
    """How elements are split, and how many of k tensor cores sum at a time."""

    count: int
    bits: int
    least: int  # exponent of the smallest normal part
    shift: int
    top: int  # exponent of the largest scaled element of a row
    depth: int = 64


HALVES = Parts(2, 11, -14, 11, 14)
BFLOAT16 = Parts(3, 8, -126, 0, 50)
ORDER = [(0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)]  # of the products of three parts


def exponent(x, least):
    """The exponent of each element, that of the format's subnormal numbers at least."""
    return np.where(x == 0, _NOTHING, np.maximum(np.frexp(x)[1] - 1, least))


def float32(x):
    """Rounded to float32."""
    return x.astype(np.float32).astype(np.float64)


def scaling(x, axis, top):
    """The power of two that brings the largest element of each row to 2^top or more."""
    largest = np.abs(x).max(axis, keepdims=True, initial=0)
    return np.where(largest == 0, 0, top - (np.frexp(largest)[1] - 1))


def split(x, how):
    """The parts of scaled elements, each with the exponents of its elements."""
    parts = []
    for _ in range(how.count):
        last = how.bits - 1 - np.maximum(np.frexp(x)[1] - 1, how.least)
        part = np.ldexp(np.rint(np.ldexp(x, last)), -last)
        parts.append((part, exponent(part, how.least)))
        x = np.ldexp(x - part, how.shift)
    return parts


def multiply_add(total, a, b, first, end):
    """Tensor cores: 16 products at a time and the sum, cut to 25 bits behind the largest, then to 24 bits."""
    for k in range(first, end, 16):
        of_k = slice(k, min(k + 16, end))
        products = a[0][:, of_k, None] * b[0][None, of_k]
        exponents = (a[1][:, of_k, None] + b[1][None, of_k]).max(1)
        place = 25 - np.maximum(np.maximum(exponents, exponent(total, -126)), -133)
        cut = np.trunc(np.ldexp(products, place[:, None])).sum(1) + np.trunc(np.ldexp(total, place))
        total = np.ldexp(cut, -place)
        last = 23 - np.maximum(np.frexp(total)[1] - 1, -126)
        total = np.ldexp(np.trunc(np.ldexp(total, last)), -last)
    return total


def two_parts(a, b):
    """The product as split_fp16x3 computes it where its guard lets it."""
    x, y, back = _scaled(a, b, HALVES)
    k, zero = a.shape[1], np.zeros((a.shape[0], b.shape[1]))
    total, corrections = zero, zero
    for first in range(0, k, 64):
        end = min(first + 64, k)
        total = float32(total + multiply_add(zero, x[0], y[0], first, end))
        corrections = multiply_add(corrections, x[0], y[1], first, end)
        corrections = multiply_add(corrections, x[1], y[0], first, end)
    return np.ldexp(float32(total + np.ldexp(corrections, -11)), back).astype(np.float32)


def three_parts(a, b, depth=0, paired=False):
    """The product as split_bf16x6 computes it, and split_paired."""
    x, y, back = _scaled(a, b, BFLOAT16)
    k, zero = a.shape[1], np.zeros((a.shape[0], b.shape[1]))
    depth = depth or (64 if k >= 128 else 16)
    total, low = zero, zero
    for first in range(0, k, depth):
        part = zero
        for i, j in ORDER:
            part = multiply_add(part, x[i], y[j], first, min(first + depth, k))
        rounded = float32(total + part)
        low = float32(low + (total - rounded + part))  # exact in float64 where the exponents are near
        total = rounded
    return np.ldexp(total + low if paired else total, back).astype(np.float32)


def pairs(a, b):
    """The product as split_paired computes it."""
    return three_parts(a, b, 32, paired=True)


def chain(a, b):
    """The product as CUDA cores compute it: one multiply-add after the other."""
    total = np.zeros((a.shape[0], b.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(a.shape[1]):
            total = float32(total + a[:, k : k + 1] * b[k])
        return total.astype(np.float32)


def enough(a, b):
    """For each k, whether the guard of two parts lets the smallest elements pass."""
    k = a.shape[1]
    smallest = []
    for x, axis in ((a, 1), (b, 0)):
        scaled = np.abs(np.ldexp(x, scaling(x, axis, HALVES.top)))
        smallest.append(np.where(scaled > 0, scaled, 1).min(1 - axis, initial=2.0**-13))
    x, y = smallest
    return (x >= 2.0**-9 / k) & (y >= 2.0**-9 / k) & (x * y >= 2.0**-23 / k)


def expected(name, a, b):
    """The bits that a rung gives for finite float32 operands."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    k = a.shape[1]
    if k < (4 if name == "split_paired" else 16):
        return chain(a, b)
    if name == "split_paired":
        return pairs(a, b)
    return two_parts(a, b) if name == "split_fp16x3" and enough(a, b).all() else three_parts(a, b)


def _scaled(a, b, how):
    rows, columns = scaling(a, 1, how.top), scaling(b, 0, how.top)
    return split(np.ldexp(a, rows), how), split(np.ldexp(b, columns), how), -(rows + columns)
