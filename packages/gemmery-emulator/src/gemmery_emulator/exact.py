"""Sums and products rounded as in hardware, using only NumPy: once, or as Hopper's tensor cores add products.

A fused multiply-add of float32 goes through float64, where the product is exact; a two-sum gives the error of the
addition, and rounding to odd prevents double rounding. float64 uses the sums of Boldo and
Melquiond, Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd (IEEE Transactions on
Computers 57, 2008), and Python's fractions where a product leaves the range in which its error is a float64.

A tensor core adds some products and the sum before at once: all are aligned to the largest exponent, each is cut toward
zero to some bits of fraction below it, they are added exactly, and the result is rounded to the type of the sum. Their
order does not matter. Numbers below the least normal one of their type have its exponent, and nothing is aligned
below 2^-133. Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004), and Xie et al.,
"MMA-Sim" (arXiv 2511.10909), state the rule; tests/data/sums_h200.npz has what an H200 adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemmery.dtypes import DTYPES, Array

Reals = Any  # NumPy scalars or arrays of one float type

_BITS = {np.dtype(np.float32): np.dtype(np.uint32), np.dtype(np.float64): np.dtype(np.uint64)}


def fma(x: Reals, y: Reals, z: Reals) -> Reals:
    """Return x * y + z of float32 or float64, rounded once to nearest even.

    >>> fma(np.float64(1 + 2**-52), np.float64(1 - 2**-52), np.float64(-1)) == -(2.0**-104)
    np.True_
    """
    if np.result_type(x, y, z) == np.float64:
        return _fma64(x, y, z)[0]
    product = np.multiply(x, y, dtype=np.float64)
    total = product + z
    rounded = total.astype(np.float32)
    # The second rounding can only be wrong for a sum that was rounded to the midpoint of two float32: such a midpoint
    # ends with 28 zeros.
    doubtful = ((_bits(total) & np.uint64(0x0FFFFFFF)) == 0) & (rounded != total)
    if not doubtful.any():
        return rounded
    return where(doubtful, odd_sum(product, np.float64(1) * z).astype(np.float32), rounded)


def chain(a: Reals, b: Reals, c0: Reals, c1: Reals) -> tuple[Reals, Reals]:
    """Return C + A B in f64 as chains of fused multiply-adds, k ascending: 8 x 4 by 4 x 8, each an array (warps, 32).

    Lane 4 r + w holds A[r, w], B[w, r], and the sums C[r, 2 w] in the first array and C[r, 2 w + 1] in the second.
    """
    rows, lines = a.reshape(-1, 8, 4), b.reshape(-1, 4, 2, 4)
    sums = [c0, c1]
    for k in range(4):
        words = np.repeat(rows[..., k], 4, axis=1)
        for side in range(2):
            columns = np.broadcast_to(lines[:, None, :, side, k], (len(a), 8, 4)).reshape(-1, 32)
            sums[side] = fma(words, columns, sums[side])
    return sums[0], sums[1]


def two_sum(a: Reals, b: Reals) -> tuple[Reals, Reals]:
    """Return the rounded sum and its exact error (Knuth); NaN where the sum is not finite."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Reals, b: Reals) -> tuple[Reals, Reals]:
    """Return the rounded product and its exact error (Dekker, with Veltkamp's splitting)."""
    product = a * b
    splitter = np.float64(2**27 + 1)
    (a1, a0), (b1, b0) = ((c - (c - v), v - (c - (c - v))) for v, c in ((a, a * splitter), (b, b * splitter)))
    return product, ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0


def odd_sum(a: Reals, b: Reals) -> Reals:
    """Return a + b of float64 rounded to odd: unless the sum is exact, to the neighbor whose last bit is set.

    Rounding such a sum again, to a type of at most 51 bits, gives the exact sum rounded once.
    """
    total, error = two_sum(a, b)
    return _odd(total, error)


def odd_float32(x: Reals) -> Reals:
    """Convert float64 to float32, rounded to odd; infinite only if x is."""
    nearest = x.astype(np.float32)
    return _odd(nearest, x - nearest)


def _odd(nearest: Reals, residual: Reals) -> Reals:
    """Return the exact value nearest + residual, rounded to odd."""
    bits = _bits(nearest)
    even = (bits & bits.dtype.type(1)) == 0
    up, down = even & (residual > 0), even & (residual < 0)
    end = np.where(up, np.inf, -np.inf).astype(np.asarray(nearest).dtype)
    return where(up | down, np.nextafter(nearest, end), nearest)


def where(condition: Reals, yes: Reals, no: Reals) -> Reals:
    """Return `numpy.where`, as a scalar for scalar operands."""
    values: Any = np.where(condition, yes, no)
    return values[()]


def _bits(x: Reals) -> Any:
    x = np.asarray(x)
    return x.view(_BITS[x.dtype])


def _fma64(x: Reals, y: Reals, z: Reals) -> tuple[Reals, Reals]:
    """Return x * y + z of float64 to nearest, and a number with the sign of the rounding error (NaN: not finite)."""
    x, y, z = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (x, y, z)))
    high, low = _two_product(x, y)
    middle, tail = two_sum(z, low)
    top, rest = two_sum(high, middle)
    nearest, residual = two_sum(top, odd_sum(rest, tail))
    size = np.abs(high)
    # Between these bounds the splitting and the error of the product are normal numbers.
    safe = (size > 2.0**-900) & (size < 2.0**1000) & (np.maximum(np.abs(x), np.abs(y)) < 2.0**990)
    safe &= np.abs(z) < 2.0**1000
    if safe.all():
        return nearest[()], residual[()]
    plain = (x == 0) | (y == 0) | ~np.isfinite(x) | ~np.isfinite(y) | ~np.isfinite(z)
    # The product of finite numbers counts as finite even if float64 overflows: its sum with infinity is that infinity.
    product = np.where(np.isfinite(x) & np.isfinite(y) & np.isinf(z), 0.0, x * y)
    nearest = np.where(plain, product + z, nearest)
    residual = np.where(plain, 0.0, residual)
    for place in map(tuple, np.argwhere(~(safe | plain))):
        nearest[place], residual[place] = _fraction_fma(float(x[place]), float(y[place]), float(z[place]))
    return nearest[()], residual[()]


def _fraction_fma(x: float, y: float, z: float) -> tuple[float, float]:
    value = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        nearest = float(value)
    except OverflowError:
        return (np.inf, -1.0) if value > 0 else (-np.inf, 1.0)
    rest = value - Fraction(nearest)
    return nearest, float((rest > 0) - (rest < 0))


def _fma32(x: Reals, y: Reals, z: Reals) -> tuple[Reals, Reals]:
    """The same as _fma64, for float32."""
    exact = odd_sum(np.multiply(x, y, dtype=np.float64), np.float64(1) * z)
    nearest = exact.astype(np.float32)
    return nearest, exact - nearest


def step(nearest: Reals, residual: Reals, mode: str) -> Reals:
    """Return nearest + residual rounded toward zero ("rz"), down ("rm") or up ("rp")."""
    kind = np.asarray(nearest).dtype.type
    if mode == "rz":
        beyond = np.where(nearest > 0, residual < 0, (residual > 0) & (nearest < 0))
        return where(beyond, np.nextafter(nearest, kind(0)), nearest)
    beyond, end = (residual < 0, kind(-np.inf)) if mode == "rm" else (residual > 0, kind(np.inf))
    return where(beyond, np.nextafter(nearest, end), nearest)


BF16_NAN = np.uint16(0x7FFF)


def from_bf16(bits: Reals) -> Reals:
    """Convert the bits of bf16 to float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)[()]


def to_bf16(x: Reals, mode: str = "rn") -> Reals:
    """Round float32 or float64 to the bits of bf16: to nearest ("rn"), toward zero ("rz"), down ("rm") or up ("rp")."""
    x = np.asarray(x)
    bits = np.asarray(odd_float32(x) if x.dtype == np.float64 else x).view(np.uint32)
    short, rest = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
    if mode == "rn":
        # More than half, or half and odd.
        short = short + ((rest + (short & np.uint32(1))) > 0x8000)
    elif mode != "rz":
        short = short + ((rest > 0) & (np.signbit(x) == (mode == "rm")))
    return where(np.isnan(x), BF16_NAN, short.astype(np.uint16))


def to_f16(x: Reals, mode: str = "rn") -> Reals:
    """Round float32 or float64 to float16, once."""
    nearest = np.asarray(x).astype(np.float16)[()]
    return nearest if mode == "rn" else step(nearest, x - nearest.astype(np.float64), mode)


def unpacked(bits: Reals) -> Reals:
    """Split 32 bits into two 16-bit parts along a last axis of 2, the low one first."""
    return np.ascontiguousarray(bits).reshape(*np.shape(bits), 1).view(np.uint16)


def packed(parts: Reals) -> Reals:
    """Join two 16-bit parts along a last axis of 2 to 32 bits."""
    return np.ascontiguousarray(parts).view(np.uint32)[..., 0][()]


def directed_fma(mode: str, x: Reals, y: Reals, z: Reals) -> Reals:
    """Return x * y + z rounded toward zero ("rz"), down ("rm") or up ("rp")."""
    core = _fma64 if np.result_type(x, y, z) == np.float64 else _fma32
    nearest, residual = core(x, y, z)
    result = step(nearest, residual, mode)
    if mode != "rm":
        return result
    # Rounded down, an exactly zero sum of opposite signs is -0.
    opposite = np.signbit(x) ^ np.signbit(y) ^ np.signbit(z)
    return where((result == 0) & (residual == 0) & opposite, -result.dtype.type(0), result)


def directed_add(mode: str, x: Reals, y: Reals) -> Reals:
    """Return x + y rounded toward zero, down or up."""
    return directed_fma(mode, x, np.asarray(x).dtype.type(1), y)


def directed_sub(mode: str, x: Reals, y: Reals) -> Reals:
    """Return x - y rounded toward zero, down or up."""
    return directed_add(mode, x, -y)


def directed_mul(mode: str, x: Reals, y: Reals) -> Reals:
    """Return x * y rounded toward zero, down or up."""
    # Only a zero with the sign of the product can be added without an effect.
    return directed_fma(mode, x, y, np.copysign(np.asarray(x).dtype.type(0), _sign(x) * _sign(y)))


def _sign(x: Reals) -> Reals:
    return np.copysign(np.asarray(x).dtype.type(1), x)


def _remainder(quotient: Reals, y: Reals, x: Reals) -> Reals:
    """Return a number with the sign of x - quotient * y."""
    core = _fma64 if np.result_type(x, y) == np.float64 else _fma32
    nearest, residual = core(-quotient, y, x)
    return np.where(nearest == 0, residual, nearest)


def directed_div(mode: str, x: Reals, y: Reals) -> Reals:
    """Return x / y rounded toward zero, down or up."""
    nearest = x / y
    return step(nearest, _remainder(nearest, y, x) * _sign(y), mode)


def directed_sqrt(mode: str, x: Reals) -> Reals:
    """Return the square root rounded toward zero, down or up."""
    nearest = np.sqrt(x)
    return step(nearest, _remainder(nearest, nearest, x), mode)


Added = Callable[[Array, Array, Array, "SumRule"], Array]

LEAST = -133  # exponent below which nothing is aligned
ZERO = -(1 << 12)  # the exponent of a zero: below all others
NORMAL = {row.ptx: row.normal for row in DTYPES if row.ptx} | {"tf32": -126}  # exponents of least normal numbers
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
    >>> float(added(start, ones, ones / 4, rule)[0, 0, 0] - 2.0**25)  # each 1/4 is cut off
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
