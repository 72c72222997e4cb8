"""Activations, applied to a tile of C before it is stored: vectorized, in float32 or float64.

gelu(x) = x Phi(x) and silu(x) = x / (1 + exp(-x)), both by exponentials of negative numbers, so that nothing overflows
and the small results of negative x keep their relative accuracy. The relative error is at most 7 u for gelu and 4 u for
silu, down to the smallest normal number; u is 2**-24 or 2**-53. NaN and +inf stay, -inf gives NaN (-inf times 0).
"""

from __future__ import annotations

import math

from gemmery.cpu.convert import narrow
from gemmery.cpu.ir import Function, Value
from gemmery.cpu.ir_types import element_of, with_element
from gemmery.dtypes import DType
from gemmery.tuples import NamedTuple


class _Format(NamedTuple):
    """The constants of the approximations for a floating-point type."""

    integer: str
    exponent_at: int  # bits below the exponent
    bias: int
    upper: int  # mask that keeps few enough bits of a number for its square to be exact
    ln2: tuple[float, float]  # ln 2 in two parts; n times the first is exact
    terms: int  # terms of the series of exp on |r| <= ln(2) / 2; the next one is below u / 8
    tail: tuple[float, ...]  # coefficients of `_upper_tail`
    silent: tuple[float, float]  # smallest t for which exp(-t * t / 2) and exp(-t) are zero

    @property
    def rounder(self) -> float:
        """Adding this rounds a number to an integer, which is then in the lowest bits."""
        return float(3 << (self.exponent_at - 1))


# (t + 4) exp(t * t / 2) (1 - Phi(t)) as a polynomial in s = (t - 4) / (t + 4), which maps 0 ... inf to -1 ... 1: the
# Chebyshev interpolant of that degree, computed with 50 digits, in powers of s; its relative error is 1e-9 and 5e-17.
# The mapping is that of Shepherd and Laframboise, Math. Comp. 36 (1981), 249-253.
_TAIL_FLOAT = (
    0.75528514, -0.6078966, 0.38713738, -0.18652199, 0.060396645, -0.007538689, -0.003479943, 0.0016242476,
    0.00013364042, -0.00021777107, -1.7259923e-06, 2.1979044e-05,
)  # fmt: skip
_TAIL_DOUBLE = (
    0.7552851304157514, -0.6078966419718921, 0.3871374007422269, -0.18652185795965176, 0.06039657489034808,
    -0.007540188966996623, -0.0034796923564507777, 0.0016308184627789688, 0.00013334420755153713,
    -0.00023109498674854848, -1.9076685133202144e-06, 3.514498813160344e-05, 7.145802592193101e-07,
    -5.921289422115028e-06, -6.249141680900659e-07, 1.0242368988565404e-06, 2.6468456126470355e-07,
    -1.5916439391794904e-07, -7.874694430470838e-08, 1.7419125179458914e-08, 1.6051942514282524e-08,
    -4.1774838524334276e-10, -1.6858481937278877e-09, -1.493647950995503e-10,
)  # fmt: skip
_LN2_FLOAT = (0.693359375, -2.12194440e-4)
_LN2_DOUBLE = (float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33"))
_FORMATS = {
    "float": _Format("i32", 23, 127, 0xFFFFF000, _LN2_FLOAT, 8, _TAIL_FLOAT, (18.0, 110.0)),
    "double": _Format("i64", 52, 1023, 0xFFFFFFFFF8000000, _LN2_DOUBLE, 14, _TAIL_DOUBLE, (40.0, 750.0)),
}


def activate(f: Function, activation: str, value: Value, out: DType) -> Value:
    """Apply an activation to every lane of a result that will be stored as `out`; "" is none."""
    if not activation:
        return value
    if activation == "relu":
        if out.kind == "u":
            return value
        if out.kind == "i":
            value = narrow(f, value, out)  # relu tests the sign that C will have
        # A comparison that is false for NaN keeps NaN: max(x, 0) would drop it.
        return f.select(value < 0, f.zero(value.type), value)
    if activation == "gelu":
        return _gelu(f, value)
    if activation == "silu":
        return _silu(f, value)
    raise ValueError(activation)


def _gelu(f: Function, x: Value) -> Value:
    tail = _upper_tail(f, _magnitude(f, x, _FORMATS[element_of(x.type)].silent[0]))
    return x * f.select(x < 0, tail, 1.0 - tail)


def _silu(f: Function, x: Value) -> Value:
    t = _magnitude(f, x, _FORMATS[element_of(x.type)].silent[1])
    small = _exp(f, f.zero(x.type) - t, f.zero(x.type))
    return x * _divide(f, f.select(x < 0, small, f.const(x.type, 1)), small + 1.0)


def _upper_tail(f: Function, t: Value) -> Value:
    """Return 1 - Phi(t) for t >= 0, the probability of a normal number above t."""
    form = _FORMATS[element_of(t.type)]
    # Rounding t * t would cost the exponential a relative error of t * t * u, so t * t is an exact square plus a rest.
    head = f.bitcast(_bits(f, t) & form.upper, t.type)
    decay = _exp(f, head * head * -0.5, (t - head) * (t + head) * -0.5)
    inverse = _divide(f, f.const(t.type, 1), t + 4.0)
    return decay * (_polynomial(f, form.tail, (t - 4.0) * inverse) * inverse)


def _exp(f: Function, high: Value, low: Value) -> Value:
    """Return exp(high + low), low the smaller; it multiplies by 2**n in two halves, so the result may be subnormal."""
    form = _FORMATS[element_of(high.type)]
    rounded = f.fma(high + low, f.const(high.type, 1 / math.log(2)), f.const(high.type, form.rounder))
    n = rounded - form.rounder
    rest = (high - n * form.ln2[0]) + (low - n * form.ln2[1])
    series = _polynomial(f, tuple(1 / math.factorial(i) for i in range(form.terms)), rest)
    integer = _bits(f, rounded) - _bits(f, f.const(high.type, form.rounder))
    half = integer >> 1  # without the sign, which the shift below would lose
    for part in (half, integer - half):
        series = series * f.bitcast((part + form.bias) << form.exponent_at, high.type)
    return series


def _polynomial(f: Function, coefficients: tuple[float, ...], x: Value) -> Value:
    """Return the sum of coefficients[i] x**i, by Horner's rule."""
    total = f.const(x.type, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = f.fma(total, x, f.const(x.type, coefficient))
    return total


def _magnitude(f: Function, x: Value, most: float) -> Value:
    """Return the smaller of |x| and `most`; `most` for NaN."""
    negative = f.zero(x.type) - x
    t = f.select(x < 0, negative, x)
    return f.select(t < most, t, f.const(x.type, most))


def _bits(f: Function, x: Value) -> Value:
    return f.bitcast(x, with_element(x.type, _FORMATS[element_of(x.type)].integer))


def _divide(f: Function, x: Value, y: Value) -> Value:
    return f.emit(x.type, f"fdiv {x}, {y.text}")
