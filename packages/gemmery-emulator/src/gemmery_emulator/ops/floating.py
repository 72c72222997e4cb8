"""Arithmetic of f32 and f64: PTX ISA 9.0, "Floating-Point Instructions".

The exact results of the hardware's approximations (ex2.approx, rcp.approx ...) are not documented: here they are
correctly rounded, within the errors that the ISA states. The payloads of NaNs are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np

from gemmery_emulator import exact
from gemmery_emulator.exact import where
from gemmery_emulator.op import Meaning, Op, Values

FTZ = ("", ".ftz")
SAT = ("", ".ftz", ".sat", ".ftz.sat")
DIRECTED = ("rz", "rm", "rp")


def flushed(x: Values) -> Values:
    """Replace subnormal float32 by zeros with their sign."""
    return x * (np.abs(x) >= np.float32(2.0**-126))


def saturated(x: Values) -> Values:
    """Clamp to 0 ... 1, NaN to +0."""
    kind = np.asarray(x).dtype.type
    # The addition turns -0 into +0.
    return where(np.isnan(x), kind(0), np.minimum(np.maximum(x, kind(0)), kind(1)) + kind(0))


def modified(meaning: Meaning, modifiers: str, flush: Meaning = flushed) -> Meaning:
    """Add ".ftz" (`flush` subnormal operands and results to zero) and ".sat" to a meaning."""
    ftz, sat = ".ftz" in modifiers, ".sat" in modifiers
    if not ftz and not sat:
        return meaning

    def changed(*operands: Values) -> Values:
        result = flush(meaning(*map(flush, operands))) if ftz else meaning(*operands)
        return saturated(result) if sat else result

    return changed


def _modifiers(type_: str, of_f32: tuple[str, ...]) -> tuple[str, ...]:
    return of_f32 if type_ == "f32" else ("",)


# add, sub, mul, fma, mad

NEAREST: dict[str, tuple[Meaning, Callable[[str], Meaning], str, int]] = {  # in other roundings, kind, operands
    "add": (np.add, exact.directed_add, "fadd", 2),
    "sub": (np.subtract, exact.directed_sub, "fadd", 2),
    "mul": (np.multiply, exact.directed_mul, "fmul", 2),
    "fma": (exact.fma, exact.directed_fma, "fma", 3),
}


def _halves(x: Values) -> tuple[Values, Values]:
    """Return the two float32 in 64 bits, the low one first."""
    low, high = (np.asarray(half).astype(np.uint32) for half in (x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)))
    return low.view(np.float32)[()], high.view(np.float32)[()]


def _pairwise(meaning: Meaning) -> Meaning:
    """Apply a meaning for float32 to both halves of 64 bits."""

    def both(*operands: Values) -> Values:
        low, high = (
            np.asarray(meaning(*half)).view(np.uint32).astype(np.uint64)
            for half in zip(*map(_halves, operands), strict=True)
        )
        return (low | high << np.uint64(32))[()]

    return both


def _arithmetic() -> dict[str, Op]:
    """Arithmetic in all roundings; add, sub and mul round to nearest by default. f32x2 has 64 bits (sm_100)."""
    table = {}
    for name, (nearest, directed, kind, count) in NEAREST.items():
        flops = 2 if name == "fma" else 1
        for mode in ("", "rn", *DIRECTED) if name != "fma" else ("rn", *DIRECTED):
            base = directed(mode) if mode in DIRECTED else nearest
            opcode = f"{name}.{mode}" if mode else name
            for type_ in ("f32", "f64"):
                for modifiers in _modifiers(type_, SAT):
                    op = Op((type_,), (type_,) * count, modified(base, modifiers), kind=kind, flops=flops)
                    table[f"{opcode}{modifiers}.{type_}"] = op
                    if name == "fma":
                        table[f"mad.{mode}{modifiers}.{type_}"] = op
            for ftz in FTZ:
                both = _pairwise(modified(base, ftz))
                table[f"{opcode}{ftz}.f32x2"] = Op(("b64",), ("b64",) * count, both, kind=kind, flops=2 * flops)
    return table


# div, rcp, sqrt, rsqrt, and the approximations


def _through_float64(function: Meaning) -> Meaning:
    """Compute a function of float32 in float64."""
    return lambda *operands: function(*(np.float64(1) * x for x in operands)).astype(np.float32)


def _divided_approximately(x: Values, y: Values) -> Values:
    """Return x times 1 / y, where 1 / y is 0 for |y| > 2**126."""
    return where((np.abs(y) > 2.0**126) & np.isfinite(y), x * np.copysign(np.float32(0), y), x / y)


def _upper_half(function: Meaning) -> Meaning:
    """A function of float64 whose operand and result have 32 bits of zeros at the end, without subnormals."""
    bits, least = np.uint64(0xFFFFFFFF00000000), 2.0**-1022

    def cut(x: Values) -> Values:
        short = (np.asarray(x, np.float64).view(np.uint64) & bits).view(np.float64)
        return where(np.isnan(x), x, where(np.abs(short) < least, np.copysign(0.0, x), short))

    return lambda x: cut(function(cut(x)))


def _rounded_functions() -> dict[str, Op]:
    """div, rcp and sqrt in all roundings."""
    table = {}
    for mode, type_ in product(("rn", *DIRECTED), ("f32", "f64")):
        divide = np.divide if mode == "rn" else exact.directed_div(mode)
        meanings: dict[str, Meaning] = {
            "div": divide,
            "rcp": _reciprocal(divide),
            "sqrt": np.sqrt if mode == "rn" else exact.directed_sqrt(mode),
        }
        for name, meaning in meanings.items():
            for ftz in _modifiers(type_, FTZ):
                operands = (type_,) * (2 if name == "div" else 1)
                table[f"{name}.{mode}{ftz}.{type_}"] = Op((type_,), operands, modified(meaning, ftz), kind=name)
    return table


def _reciprocal(divide: Meaning) -> Meaning:
    return lambda x: divide(np.asarray(x).dtype.type(1), x)


def _inverse_root(x: Values) -> Values:
    return 1 / np.sqrt(x)


APPROXIMATE: dict[str, Meaning] = {
    "rcp": _through_float64(np.reciprocal),
    "sqrt": np.sqrt,
    "rsqrt": _through_float64(_inverse_root),
    "sin": _through_float64(np.sin),
    "cos": _through_float64(np.cos),
    "lg2": _through_float64(np.log2),
    "ex2": _through_float64(np.exp2),
}


def _approximations() -> dict[str, Op]:
    table = {
        f"{name}.approx{ftz}.f32": Op(("f32",), ("f32",), modified(meaning, ftz), kind="mufu")
        for name, meaning in APPROXIMATE.items()
        for ftz in FTZ
    }
    table["tanh.approx.f32"] = Op(("f32",), ("f32",), _through_float64(np.tanh), kind="mufu")
    table["rsqrt.approx.f64"] = Op(("f64",), ("f64",), _inverse_root, kind="mufu")
    for name in ("rcp", "rsqrt"):
        coarse = _upper_half(np.reciprocal if name == "rcp" else _inverse_root)
        table[f"{name}.approx.ftz.f64"] = Op(("f64",), ("f64",), coarse, kind="mufu")
    for ftz in FTZ:
        approx, full = modified(_divided_approximately, ftz), modified(np.divide, ftz)
        table[f"div.approx{ftz}.f32"] = Op(("f32",), ("f32", "f32"), approx, kind="div")
        table[f"div.full{ftz}.f32"] = Op(("f32",), ("f32", "f32"), full, kind="div")
    return table


# min, max, and instructions on the bits


def _of_numbers(choose: Meaning) -> Meaning:
    """Return the other operand if one is NaN, as numpy.fmin, but also for signalling NaNs."""
    return lambda x, y: where(np.isnan(x), y, where(np.isnan(y), x, choose(x, y)))


def _ordered(choose: Meaning) -> Meaning:
    """min or max for which -0 is less than +0."""
    low = choose(1, 2) == 1

    def extreme(x: Values, y: Values) -> Values:
        picked = choose(x, y)
        zeros = (picked == 0) & (x == y)
        negative = (np.signbit(x) | np.signbit(y)) if low else (np.signbit(x) & np.signbit(y))
        kind = np.asarray(picked).dtype.type
        return where(zeros, np.copysign(kind(0), where(negative, kind(-1), kind(1))), picked)

    return extreme


def _by_size(choose: Meaning) -> Meaning:
    """.xorsign.abs: compare the absolute values, and return the sign of the product."""

    def extreme(x: Values, y: Values) -> Values:
        size = choose(np.abs(x), np.abs(y))
        return where(np.signbit(x) ^ np.signbit(y), -size, size)

    return extreme


_MINIMUM, _MAXIMUM = _of_numbers(np.minimum), _of_numbers(np.maximum)

EXTREMES: dict[str, Meaning] = {
    "min": _ordered(_MINIMUM),
    "max": _ordered(_MAXIMUM),
    "min.NaN": _ordered(np.minimum),
    "max.NaN": _ordered(np.maximum),
    "min.xorsign.abs": _by_size(_MINIMUM),
    "max.xorsign.abs": _by_size(_MAXIMUM),
    "min.NaN.xorsign.abs": _by_size(np.minimum),
    "max.NaN.xorsign.abs": _by_size(np.maximum),
}


def with_ftz(name: str, ftz: str) -> str:
    """Insert .ftz: min.NaN becomes min.ftz.NaN."""
    base, dot, rest = name.partition(".")
    return f"{base}{ftz}{dot}{rest}"


def _subnormal(x: Values) -> Values:
    return (np.abs(x) < np.finfo(np.asarray(x).dtype).tiny) & (x != 0)


TESTS: dict[str, Meaning] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & ~_subnormal(x),  # the ISA counts zeros as normal
    "subnormal": _subnormal,
}


def _bitwise() -> dict[str, Op]:
    """abs, neg, copysign, testp, min, max."""
    table = {}
    signs: dict[str, Meaning] = {"abs": np.abs, "neg": np.negative}
    for type_ in ("f32", "f64"):
        for name, meaning in signs.items():
            for ftz in _modifiers(type_, FTZ):
                table[f"{name}{ftz}.{type_}"] = Op((type_,), (type_,), modified(meaning, ftz))
        # copysign takes the sign first.
        table[f"copysign.{type_}"] = Op((type_,), (type_, type_), lambda sign, x: np.copysign(x, sign))
        table |= {f"testp.{name}.{type_}": Op(("pred",), (type_,), meaning) for name, meaning in TESTS.items()}
    for name, ftz in product(EXTREMES, FTZ):
        meaning, folds = modified(EXTREMES[name], ftz), "abs" not in name
        table[f"{with_ftz(name, ftz)}.f32"] = Op(("f32",), ("f32", "f32"), meaning, folds=folds)
    table |= {f"{name}.f64": Op(("f64",), ("f64", "f64"), EXTREMES[name]) for name in ("min", "max")}
    return table


TABLE: dict[str, Op] = _arithmetic() | _rounded_functions() | _approximations() | _bitwise()
