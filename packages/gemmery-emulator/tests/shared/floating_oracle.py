"""What opcodes of floating-point arithmetic and conversions mean, by Python's fractions.

An oracle reads an opcode word by word, so a modifier that it does not know is an error.
"""

import math
from fractions import Fraction

import numpy as np

from rounding import FORMATS, decoded, encoded, negative, rounded

MODES = ("rn", "rz", "rm", "rp")
WHOLE = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
NAN = math.nan


def is_nan(x):
    return isinstance(x, float) and math.isnan(x)


def is_zero(x):
    return isinstance(x, float) and x == 0


def is_finite(x):
    return not isinstance(x, float) or x == 0


def mark(x):
    """A float of the number's sign, zero or infinite where it is."""
    return np.float64(x if isinstance(x, float) else math.copysign(1, x))


def signed(x, minus):
    return -abs(x) if minus else abs(x)


# Arithmetic of numbers without rounding, but for the sign of zero, which depends on its direction.


def fma(x, y, z, mode="rn"):
    if not (is_finite(x) and is_finite(y) and is_finite(z)):
        return float(mark(x) * mark(y) + mark(z))
    total = Fraction(x) * Fraction(y) + Fraction(z)
    minus = negative(x) != negative(y)
    if total or (minus == negative(z) and not (Fraction(x) * Fraction(y))):
        return total or signed(0.0, minus)
    return -0.0 if mode == "rm" else 0.0


def add(x, y, mode="rn"):
    return fma(x, Fraction(1), y, mode)


def sub(x, y, mode="rn"):
    return add(x, -y, mode)


def mul(x, y, mode="rn"):
    if is_zero(x) or is_zero(y) or not is_finite(x) or not is_finite(y):
        return float(mark(x) * mark(y))
    return x * y


def div(x, y, mode="rn"):
    if isinstance(x, float) or isinstance(y, float):
        return float(mark(x) / mark(y))
    return x / y


def sqrt(x, mode="rn"):
    """The root, with one bit more where it has no end."""
    if isinstance(x, float) or x < 0:
        return float(np.sqrt(mark(x)))
    scale = 4**700
    count = x.numerator * scale * x.denominator
    root = math.isqrt(count)
    return Fraction(2 * root + (root * root != count), 2 * 2**700 * x.denominator)


ARITHMETIC = {"add": add, "sub": sub, "mul": mul, "fma": fma, "mad": fma, "div": div, "sqrt": sqrt}


def least(x, y, nan, sign=1):
    """The smaller of two numbers, the larger with sign -1; NaN is missing, or with `nan` contagious."""
    if is_nan(x) or is_nan(y):
        return NAN if nan or (is_nan(x) and is_nan(y)) else y if is_nan(x) else x
    if is_zero(x) and is_zero(y):
        return -0.0 if (negative(x) or negative(y) if sign == 1 else negative(x) and negative(y)) else 0.0
    return x if (x < y) == (sign == 1) else y


def approximated(function):
    """A function of float64 as one of numbers."""

    def value(*operands):
        with np.errstate(all="ignore"):
            found = float(function(*(np.float64(float(x)) for x in operands)))
        return Fraction(found) if math.isfinite(found) and found else found

    return value


def rcp(x):
    return div(Fraction(1), x)


def rsqrt(x):
    return rcp(sqrt(x)) if not is_zero(x) else signed(math.inf, negative(x))


APPROXIMATE = {"rcp": rcp, "rsqrt": rsqrt, "sqrt": sqrt, "div": div} | {
    name: approximated(function)
    for name, function in {
        "sin": lambda x: math.sin(x) if np.isfinite(x) else NAN,
        "cos": lambda x: math.cos(x) if np.isfinite(x) else NAN,
        "tanh": math.tanh,
        "ex2": lambda x: math.pow(2, x) if x < 1000 else x * math.inf,
        "lg2": lambda x: math.log2(x) if x > 0 else -math.inf if x == 0 else NAN,
    }.items()
}


# What opcodes mean, of bits


def flushed(x, form):
    smallest = Fraction(2) ** (1 - form.bias)
    return signed(0.0, negative(x)) if not isinstance(x, float) and abs(x) < smallest else x


def clamped(x):
    return 0.0 if is_nan(x) or negative(x) else min(x, Fraction(1)) or 0.0


def relu(x):
    return x if is_nan(x) else 0.0 if negative(x) or is_zero(x) else x


def halves(function, count):
    """A function of bits for each 1 / count of the bits."""

    def wide(*operands):
        size = 64 if count == "f32x2" else 32
        part = size // 2
        low, high = (function(*(x >> at & 2**part - 1 for x in operands)) for at in (0, part))
        return high << part | low

    return wide


class Words:
    """The parts of an opcode, taken one after the other."""

    def __init__(self, opcode):
        self.left = opcode.split(".")

    def take(self, *words, default=None):
        if self.left and self.left[0] in words:
            return self.left.pop(0)
        assert default is not None, f"{self.left} where one of {words} is known"
        return default

    def has(self, word):
        return self.take(word, default="") == word

    def end(self):
        assert not self.left, self.left


def arithmetic(opcode):
    """add, sub, mul, fma, mad, div, rcp, sqrt, and approximate functions: one function of numbers, then a rounding."""
    words = Words(opcode)
    name = words.take(*ARITHMETIC, *APPROXIMATE)
    mode = words.take(*MODES, "approx", "full", default="rn")
    ftz, sat, positive = words.has("ftz"), words.has("sat"), words.has("relu")
    type_ = words.take("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
    narrow = words.take("f16", "bf16", default=type_.removesuffix("x2"))  # all operands but the last
    words.end()
    form = FORMATS[type_.removesuffix("x2")]
    near = mode in ("approx", "full")

    def number(*operands):
        if ftz:
            operands = [flushed(x, form) for x in operands]
        if near:
            if opcode.startswith("div.approx") and is_finite(operands[1]) and abs(operands[1]) > 2**126:
                return float(mark(operands[0]) * signed(0.0, negative(operands[1])))
            return APPROXIMATE[name](*operands)
        return rcp(*operands) if name == "rcp" else ARITHMETIC[name](*operands, mode=mode)

    def meaning(*bits):
        x = number(*(decoded(b, FORMATS[narrow]) for b in bits[:-1]), decoded(bits[-1], form))
        result = encoded(x, form, "rn" if near else mode)
        if ftz:
            result = encoded(flushed(decoded(result, form), form), form)
        if sat:
            result = encoded(clamped(decoded(result, form)), form)
        return encoded(relu(decoded(result, form)), form) if positive else result

    return halves(meaning, type_) if type_.endswith("x2") else meaning


def cut(bits):
    return bits & 0xFFFFFFFF << 32


def coarse(opcode):
    """rcp and rsqrt.approx.ftz.f64: of the upper 32 bits, and only these."""
    form, name = FORMATS["f64"], opcode.split(".")[0]

    def meaning(bits):
        x = decoded(bits, form)
        if is_nan(x):
            return form.nan
        x = flushed(decoded(cut(bits), form), form)
        result = encoded(APPROXIMATE[name](x), form)
        return (
            result if is_nan(decoded(result, form)) else cut(encoded(flushed(decoded(cut(result), form), form), form))
        )

    return meaning


def of_bits(opcode):
    """min, max, neg, abs, copysign, testp."""
    words = Words(opcode)
    name = words.take("min", "max", "neg", "abs", "copysign", "testp")
    test = words.take("finite", "infinite", "number", "notanumber", "normal", "subnormal") if name == "testp" else ""
    ftz, nan, by_size = words.has("ftz"), words.has("NaN"), words.has("xorsign") and words.has("abs")
    type_ = words.take("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    words.end()
    form = FORMATS[type_.removesuffix("x2")]
    smallest = Fraction(2) ** (1 - form.bias)
    tests = {
        "finite": is_finite,
        "infinite": lambda x: isinstance(x, float) and math.isinf(x),
        "number": lambda x: not is_nan(x),
        "notanumber": is_nan,
        "normal": lambda x: is_finite(x) and not 0 < abs(x) < smallest,
        "subnormal": lambda x: not isinstance(x, float) and abs(x) < smallest,
    }

    def extreme(x, y):
        minus = by_size and negative(x) != negative(y)
        x, y = (abs(x), abs(y)) if by_size else (x, y)
        found = least(x, y, nan, 1 if name == "min" else -1)
        return -found if minus else found

    def meaning(*bits):
        x = [flushed(v, form) if ftz else v for v in (decoded(b, form) for b in bits)]
        if name == "testp":
            return int(tests[test](x[0]))
        if name == "copysign":
            return bits[1] % 2 ** (form.bits - 1) | bits[0] >> (form.bits - 1) << (form.bits - 1)
        number = extreme(*x) if len(x) == 2 else -x[0] if name == "neg" else abs(x[0])
        return encoded(number, form)

    return halves(meaning, type_) if type_.endswith("x2") else meaning


def limits(type_):
    bits = int(type_[1:])
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if type_[0] == "s" else (0, 2**bits - 1)


def integer(bits, type_):
    return bits - 2 ** int(type_[1:]) if bits > limits(type_)[1] else bits


def unsigned(value, type_):
    return value % 2 ** int(type_[1:])


def whole(x, mode):
    """A number rounded to a whole number."""
    return x if isinstance(x, float) else rounded(x, mode, 5000, 0)


def to_integer(x, to, of):
    if is_nan(x):
        return 0 if of != "f64" and to not in ("u64", "s64") else 2 ** (int(to[1:]) - 1)
    low, high = limits(to)
    return unsigned(int(max(low, min(high, x))), to)


INTEGERS = [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]
NUMBERS = (*INTEGERS, "f16", "bf16", "f32", "f64", "tf32")
PAIRS = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2")


def conversion(opcode):
    words = Words(opcode)
    words.take("cvt")
    if words.has("pack"):
        return packing(words)
    mode = words.take(*MODES, "rna", *WHOLE, default="no")
    said = {word: words.has(word) for word in ("ftz", "relu", "satfinite", "sat")}
    said["relu"] |= words.has("relu")  # which stands before or behind .satfinite
    to, of = words.take(*NUMBERS, *PAIRS), words.take(*NUMBERS, *PAIRS)
    words.end()
    if to in PAIRS or of in PAIRS:
        return of_pairs(to, of, said, mode)

    def number(bits):
        if of in INTEGERS:
            return Fraction(integer(bits, of)) if bits else 0.0
        x = decoded(bits, FORMATS[of])
        return flushed(x, FORMATS[of]) if said["ftz"] and of == "f32" and to != "f16" else x

    def meaning(bits):
        if to in INTEGERS and of in INTEGERS:
            value, (low, high) = integer(bits, of), limits(to)
            return unsigned(max(low, min(high, value)) if said["sat"] else value, to)
        x = whole(number(bits), WHOLE[mode]) if mode in WHOLE else number(bits)
        if to in INTEGERS:
            assert mode in WHOLE
            return to_integer(x, to, of)
        return narrowed(x, to, said, mode if mode not in WHOLE else "rn")

    return meaning


def narrowed(x, to, said, mode):
    form = FORMATS[to]
    result = encoded(relu(x) if said["relu"] else x, form, "rn" if mode == "no" else mode)
    if mode == "no" and not isinstance(x, float) and to == "f64":
        assert decoded(result, form) == x  # no rounding is written where none is needed
    if said["satfinite"] and not is_nan(x) and result % 2 ** (form.bits - 1) > form.largest:
        result = form.largest | result >> (form.bits - 1) << (form.bits - 1)
    if said["ftz"] and to == "f32":
        result = encoded(flushed(decoded(result, form), form), form)
    return encoded(clamped(decoded(result, form)), form) if said["sat"] else result


def of_pairs(to, of, said, mode):
    part = to.removesuffix("x2")
    size, source = FORMATS[part].bits, of.removesuffix("x2")

    def one(bits):
        return narrowed(decoded(bits, FORMATS[source]), part, said, mode)

    if of in PAIRS:
        step = FORMATS[source].bits
        return lambda x: one(x >> step) << size | one(x % 2**step)
    return lambda high, low: one(high) << size | one(low)


def packing(words):
    words.take("sat")
    to, _, wide = words.take("u8", "s8", "u16", "s16"), words.take("s32"), words.has("b32")
    words.end()
    assert wide == to.endswith("8")
    low, high = limits(to)
    bits = int(to[1:])

    def meaning(a, b, c=0):
        a, b = (unsigned(max(low, min(high, integer(x, "s32"))), to) for x in (a, b))
        return (c << 2 * bits | a << bits | b) % 2**32

    return meaning


def oracle(opcode):
    first = opcode.split(".")[0]
    if first == "cvt":
        return conversion(opcode)
    if opcode in ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64"):
        return coarse(opcode)
    return of_bits(opcode) if first in ("min", "max", "neg", "abs", "copysign", "testp") else arithmetic(opcode)
