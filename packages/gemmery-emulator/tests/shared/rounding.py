"""Floating-point formats and rounding by their definitions (IEEE 754, sections 3.4 and 4.3), in Python's fractions.

A number is a Fraction, or a float where it is a zero, an infinity or NaN.
"""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    bits: int
    precision: int  # bits of the significand, the hidden one included
    infinite: bool = True  # whether the last exponent is for infinities and NaN
    unused: int = 0  # bits at the end that stay zero

    @property
    def fraction(self):
        return self.precision - 1

    @property
    def bias(self):
        return 2 ** (self.bits - self.unused - self.fraction - 2) - 1

    @property
    def least(self):
        """Exponent of the last bit of a subnormal number."""
        return 1 - self.bias - self.fraction

    @property
    def nan(self):
        return 2 ** (self.bits - 1) - 1

    @property
    def largest(self):
        """The largest number's bits."""
        if not self.infinite:
            return self.nan - 1
        return (2 ** (self.bits - self.unused - self.fraction - 1) - 1) * 2**self.fraction - 1 << self.unused


FORMATS = {
    "e4m3": Format(8, 4, infinite=False),
    "e5m2": Format(8, 3),
    "f16": Format(16, 11),
    "bf16": Format(16, 8),
    "tf32": Format(32, 11, unused=13),
    "f32": Format(32, 24),
    "f64": Format(64, 53),
}


def negative(x):
    return math.copysign(1, x) < 0 if isinstance(x, float) else x < 0


def rounded(value, mode, precision, least):
    """A fraction, not zero, in a binary format without an upper limit: a fraction, or a zero."""
    minus, size = value < 0, abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** max(exponent - precision + 1, least)
    count, rest = divmod(size, unit)
    away = {
        "rn": (rest * 2, count % 2) > (unit, 0),
        "rna": rest * 2 >= unit,
        "rz": False,
        "rm": minus and rest,
        "rp": not minus and rest,
    }
    size = (count + bool(away[mode])) * unit
    return (-size if minus else size) or math.copysign(0.0, -minus)


def encoded(x, form, mode="rn"):
    """The bits of a number in a format; NaN is the one with all bits set."""
    if isinstance(x, float) and math.isnan(x):
        return form.nan
    minus = negative(x)
    sign = int(minus) << (form.bits - 1)
    if not isinstance(x, float):
        x = rounded(x, mode, form.precision, form.least)
    top = decoded(form.largest, form)
    if isinstance(x, float) and x == 0:
        return sign
    if abs(x) > top:
        stays = form.infinite and (isinstance(x, float) or mode in ("rn", "rna", "rm" if minus else "rp"))
        return sign | form.largest + (2**form.unused if stays else 0)
    exponent = math.frexp(abs(x))[1] - 1
    biased = max(exponent + form.bias, 0)
    count = abs(x) / Fraction(2) ** (max(exponent, 1 - form.bias) - form.fraction)
    assert count.denominator == 1
    fraction = int(count) - (2**form.fraction if biased else 0)
    return sign | (biased * 2**form.fraction + fraction) << form.unused


def decoded(bits, form):
    """The number that bits stand for."""
    sign = -1 if bits >> (form.bits - 1) else 1
    size = (bits & (2 ** (form.bits - 1) - 1)) >> form.unused
    exponent, fraction = divmod(size, 2**form.fraction)
    if form.infinite and exponent == 2 * form.bias + 1:
        return math.copysign(math.nan, sign) if fraction else sign * math.inf
    if not form.infinite and size == form.nan:
        return math.copysign(math.nan, sign)
    if size == 0:
        return sign * 0.0
    hidden = 2**form.fraction if exponent else 0
    return sign * (hidden + fraction) * Fraction(2) ** (max(exponent, 1) - form.bias - form.fraction)
