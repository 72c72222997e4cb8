"""Arithmetic of f64, f32, f16, bf16 and pairs of 16 bits.

PTX ISA 9.0, "Floating-Point Instructions" and "Half Precision Floating-Point Instructions".

The exact results of the hardware's approximations (ex2.approx, rcp.approx ...) are not documented: here they are
correctly rounded, within the errors that the ISA states. The payloads of NaNs are not modeled.

Results of half precision are computed in float64 and rounded once. Operands of f16 have 11 bits and exponents from -24
to 15: a sum of a product and a third number that float64 cannot hold, 53 bits, has either a product beyond 2**28, which
overflows anyway, or one so far below the third number that the sum rounds to that number anyway: the rounding of
float64 has no effect. bf16 reaches from 2**-133 to 2**128, so there a sum that was rounded to the midpoint of two bf16
is rounded to odd first.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from gemmery_emulator import exact
from gemmery_emulator.exact import from_bf16, packed, to_bf16, to_f16, unpacked, where
from gemmery_emulator.op import Meaning, Op, Values

FTZ = ("", ".ftz")
SAT = ("", ".ftz", ".sat", ".ftz.sat")
DIRECTED = ("rz", "rm", "rp")


def flushed(x: Values) -> Values:
    """Replace subnormal float32 by zeros with their sign."""
    return x * (np.abs(x) >= np.float32(2.0**-126))


def saturated(x: Values) -> Values:
    """Clamp to 0 ... 1, NaN to +0."""
    kind = x.dtype.type
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


# add, sub, mul, fma, mad

NEAREST: dict[str, tuple[Meaning, Meaning, str, int]] = {  # in other roundings, kind, operands
    "add": (np.add, exact.directed_add, "fadd", 2),
    "sub": (np.subtract, exact.directed_sub, "fadd", 2),
    "mul": (np.multiply, exact.directed_mul, "fmul", 2),
    "fma": (exact.fma, exact.directed_fma, "fma", 3),
}


def _halves(x: Values) -> tuple[Values, Values]:
    """Return the two float32 in 64 bits, the low one first."""
    low, high = (np.asarray(half).astype(np.uint32) for half in (x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)))
    return low.view(np.float32)[()], high.view(np.float32)[()]


def _pairwise(meaning: Meaning, *operands: Values) -> Values:
    """Apply a meaning for float32 to both halves of 64 bits."""
    low, high = (
        np.asarray(meaning(*half)).view(np.uint32).astype(np.uint64)
        for half in zip(*map(_halves, operands), strict=True)
    )
    return (low | high << np.uint64(32))[()]


_WIDENED: dict[str, Meaning] = {"f16": lambda x: x.astype(np.float32), "bf16": from_bf16}


def _mixed(meaning: Meaning, widened: Meaning, *operands: Values) -> Values:
    """Apply a meaning for float32 to operands of which only the last is one."""
    *narrow, last = operands
    return meaning(*map(widened, narrow), last)


def _arithmetic() -> dict[str, Op]:
    """Arithmetic in all roundings; add, sub and mul round to nearest by default. f32x2 has 64 bits (sm_100)."""
    table = {}
    for name, (nearest, directed, kind, count) in NEAREST.items():
        flops = 2 if name == "fma" else 1
        for mode in ("", "rn", *DIRECTED) if name != "fma" else ("rn", *DIRECTED):
            base = partial(directed, mode) if mode in DIRECTED else nearest
            opcode = f"{name}.{mode}" if mode else name
            for type_ in ("f32", "f64"):
                for modifiers in SAT if type_ == "f32" else ("",):
                    op = Op((type_,), (type_,) * count, modified(base, modifiers), kind=kind, flops=flops)
                    table[f"{opcode}{modifiers}.{type_}"] = op
                    if name == "fma":
                        table[f"mad.{mode}{modifiers}.{type_}"] = op
            for half, sat in product(_WIDENED, ("", ".sat")) if name != "mul" else ():  # sm_100: the factors are narrow
                narrow = count - 1
                mixed = partial(_mixed, modified(base, sat), _WIDENED[half])
                op = Op(("f32",), (half,) * narrow + ("f32",), mixed, kind=kind, flops=flops)
                table[f"{opcode}{sat}.f32.{half}"] = op
            for ftz in FTZ:
                both = partial(_pairwise, modified(base, ftz))
                table[f"{opcode}{ftz}.f32x2"] = Op(("b64",), ("b64",) * count, both, kind=kind, flops=2 * flops)
    return table


# div, rcp, sqrt, rsqrt, and the approximations


def _through_float64(function: Meaning) -> Meaning:
    """Compute a function of float32 in float64."""
    return lambda *operands: function(*(np.float64(1) * x for x in operands)).astype(np.float32)


def _upper_half(function: Meaning, x: Values) -> Values:
    """A function of float64 whose operand and result have 32 bits of zeros at the end, without subnormals."""
    return _cut(function(_cut(x)))


def _cut(x: Values) -> Values:
    short = (np.asarray(x, np.float64).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    return where(np.isnan(x), x, where(np.abs(short) < 2.0**-1022, np.copysign(0.0, x), short))


def _rounded_functions() -> dict[str, Op]:
    """div, rcp and sqrt in all roundings."""
    table = {}
    for mode, type_ in product(("rn", *DIRECTED), ("f32", "f64")):
        divide: Meaning = np.divide if mode == "rn" else partial(exact.directed_div, mode)
        meanings: dict[str, Meaning] = {
            "div": divide,
            "rcp": partial(_reciprocal, divide),
            "sqrt": np.sqrt if mode == "rn" else partial(exact.directed_sqrt, mode),
        }
        for name, meaning in meanings.items():
            for ftz in FTZ if type_ == "f32" else ("",):
                operands = (type_,) * (2 if name == "div" else 1)
                table[f"{name}.{mode}{ftz}.{type_}"] = Op((type_,), operands, modified(meaning, ftz), kind=name)
    return table


def _reciprocal(divide: Meaning, x: Values) -> Values:
    return divide(x.dtype.type(1), x)


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


def _divided_approximately(x: Values, y: Values) -> Values:
    """Return x times 1 / y, where 1 / y is 0 for |y| > 2**126."""
    return where((np.abs(y) > 2.0**126) & np.isfinite(y), x * np.copysign(np.float32(0), y), x / y)


def _approximations() -> dict[str, Op]:
    table = {
        f"{name}.approx{ftz}.f32": Op(("f32",), ("f32",), modified(meaning, ftz), kind="mufu")
        for name, meaning in APPROXIMATE.items()
        for ftz in FTZ
    }
    table["tanh.approx.f32"] = Op(("f32",), ("f32",), _through_float64(np.tanh), kind="mufu")
    table["rsqrt.approx.f64"] = Op(("f64",), ("f64",), _inverse_root, kind="mufu")
    coarse: dict[str, Meaning] = {"rcp": np.reciprocal, "rsqrt": _inverse_root}
    for name, meaning in coarse.items():
        table[f"{name}.approx.ftz.f64"] = Op(("f64",), ("f64",), partial(_upper_half, meaning), kind="mufu")
    divisions: dict[str, Meaning] = {"approx": _divided_approximately, "full": np.divide}
    for (name, meaning), ftz in product(divisions.items(), FTZ):
        table[f"div.{name}{ftz}.f32"] = Op(("f32",), ("f32", "f32"), modified(meaning, ftz), kind="div")
    return table


# min, max, and instructions on the bits


def _of_numbers(choose: Meaning) -> Meaning:
    """Return the other operand if one is NaN, as numpy.fmin, but also for signaling NaNs."""
    return lambda x, y: where(np.isnan(x), y, where(np.isnan(y), x, choose(x, y)))


def _ordered(choose: Meaning) -> Meaning:
    """min or max for which -0 is less than +0."""
    low = choose(1, 2) == 1

    def extreme(x: Values, y: Values) -> Values:
        picked = choose(x, y)
        zeros = (picked == 0) & (x == y)
        negative = (np.signbit(x) | np.signbit(y)) if low else (np.signbit(x) & np.signbit(y))
        kind = picked.dtype.type
        return where(zeros, np.copysign(kind(0), where(negative, kind(-1), kind(1))), picked)

    return extreme


def _by_size(choose: Meaning, x: Values, y: Values) -> Values:
    """.xorsign.abs: compare the absolute values, and return the sign of the product."""
    size = choose(np.abs(x), np.abs(y))
    return where(np.signbit(x) ^ np.signbit(y), -size, size)


_MINIMUM, _MAXIMUM = _of_numbers(np.minimum), _of_numbers(np.maximum)

EXTREMES: dict[str, Meaning] = {
    "min": _ordered(_MINIMUM),
    "max": _ordered(_MAXIMUM),
    "min.NaN": _ordered(np.minimum),
    "max.NaN": _ordered(np.maximum),
    "min.xorsign.abs": partial(_by_size, _MINIMUM),
    "max.xorsign.abs": partial(_by_size, _MAXIMUM),
    "min.NaN.xorsign.abs": partial(_by_size, np.minimum),
    "max.NaN.xorsign.abs": partial(_by_size, np.maximum),
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
            for ftz in FTZ if type_ == "f32" else ("",):
                table[f"{name}{ftz}.{type_}"] = Op((type_,), (type_,), modified(meaning, ftz))
        # copysign takes the sign first.
        table[f"copysign.{type_}"] = Op((type_,), (type_, type_), lambda sign, x: np.copysign(x, sign))
        table |= {f"testp.{name}.{type_}": Op(("pred",), (type_,), meaning) for name, meaning in TESTS.items()}
    for name, ftz in product(EXTREMES, FTZ):
        meaning, folds = modified(EXTREMES[name], ftz), "abs" not in name
        table[f"{with_ftz(name, ftz)}.f32"] = Op(("f32",), ("f32", "f32"), meaning, folds=folds)
    table |= {f"{name}.f64": Op(("f64",), ("f64", "f64"), EXTREMES[name]) for name in ("min", "max")}
    return table


def _of_f16(meaning: Meaning) -> Meaning:
    """Turn a meaning for float64 into one for float16."""
    return lambda *operands: to_f16(meaning(*(np.asarray(x).astype(np.float64) for x in operands)))


def _of_bf16(meaning: Meaning) -> Meaning:
    """Turn a meaning for float64 into one for the bits of bf16."""
    return lambda *operands: to_bf16(meaning(*map(_wide, operands)))


def _wide(bits: Values) -> Values:
    return from_bf16(bits).astype(np.float64)


def _sum_to_bf16(x: Values, y: Values) -> Values:
    """Return the bits of the bf16 nearest to the sum of two float64."""
    x, y = np.broadcast_arrays(x, y)
    total = np.asarray(x + y)
    nearest = total.astype(np.float32)
    # Only a value that was rounded to the midpoint of two bf16 can be rounded the wrong way now.
    middle = (nearest.view(np.uint32) & np.uint32(0xFFFF)) == 0x8000
    doubtful = middle & ((nearest != total) | (total - x != y) | (total - y != x))
    if doubtful.any():
        nearest[doubtful] = exact.odd_float32(exact.odd_sum(x[doubtful], y[doubtful]))
    return to_bf16(nearest)


def _of_pairs(meaning: Meaning, kind: str) -> Meaning:
    """Turn a meaning for float16 or bits of bf16 into one for two of them in 32 bits."""
    return lambda *operands: packed(meaning(*(unpacked(x).view(kind) for x in operands)))


def flushed_f16(x: Values) -> Values:
    """Replace subnormal float16 by zeros with their sign."""
    return where(np.abs(x) < np.float16(2.0**-14), np.copysign(np.float16(0), x), x)


def _fused(x: Values, y: Values, z: Values) -> Values:
    return x * y + z


def _fused_relu(x: Values, y: Values, z: Values) -> Values:
    """.relu: replace negative results by 0; keep NaN. The addition turns -0 into +0."""
    return np.maximum(x * y + z, 0) + 0.0


BF16: dict[str, Meaning] = {
    "add": lambda x, y: _sum_to_bf16(_wide(x), _wide(y)),
    "sub": lambda x, y: _sum_to_bf16(_wide(x), -_wide(y)),
    "mul": _of_bf16(np.multiply),
    "fma": lambda x, y, z: _sum_to_bf16(_wide(x) * _wide(y), _wide(z)),
    "fma.relu": lambda x, y, z: _bits_relu(_sum_to_bf16(_wide(x) * _wide(y), _wide(z))),
}


def _bits_relu(bits: Values) -> Values:
    """The same for bits of bf16, whose NaN has no sign here."""
    return where(bits >= 0x8000, np.uint16(0), bits)


def _forms(
    opcode: str, count: int, f16: Meaning | None, bf16: Meaning | None, kind: str = "alu", flops: int = 0
) -> dict[str, Op]:
    """Return the ops of an instruction for f16, bf16 and pairs of them, from meanings for float16 and bits of bf16."""
    table = {}
    for type_, meaning, numpy in (("f16", f16, "f2"), ("bf16", bf16, "u2")):
        if meaning:
            pairs, pair = _of_pairs(meaning, numpy), f"{type_}x2"
            table[f"{opcode}.{type_}"] = Op((type_,), (type_,) * count, meaning, kind=kind, flops=flops)
            table[f"{opcode}.{pair}"] = Op((pair,), (pair,) * count, pairs, kind=kind, flops=2 * flops)
    return table


def _half_arithmetic() -> dict[str, Op]:
    """add, sub, mul and fma; bf16 has no .ftz and no .sat."""
    meanings: dict[str, tuple[str, int, Meaning]] = {
        "add": ("hadd", 2, np.add),
        "sub": ("hadd", 2, np.subtract),
        "mul": ("hmul", 2, np.multiply),
        "fma": ("hfma", 3, _fused),
        "fma.relu": ("hfma", 3, _fused_relu),
    }
    table: dict[str, Op] = {}
    for (name, (kind, count, f16)), modifiers in product(meanings.items(), SAT):
        base, dot, relu = name.partition(".")
        if relu and "sat" in modifiers:
            continue
        meaning = modified(_of_f16(f16), modifiers, flushed_f16)
        brain, flops = None if modifiers else BF16[name], 2 if base == "fma" else 1
        for rounding in (".rn",) if base == "fma" else ("", ".rn"):
            table |= _forms(f"{base}{rounding}{modifiers}{dot}{relu}", count, meaning, brain, kind, flops)
    return table


def _half_functions() -> dict[str, Op]:
    """neg, abs, ex2, tanh, min, max; ex2 of bf16 is always .ftz."""
    sign = np.uint16(0x8000)
    table = _forms("neg", 1, None, lambda bits: bits ^ sign) | _forms("abs", 1, None, lambda bits: bits & ~sign)
    for ftz in FTZ:
        table |= _forms(f"neg{ftz}", 1, modified(np.negative, ftz, flushed_f16), None)
        table |= _forms(f"abs{ftz}", 1, modified(np.abs, ftz, flushed_f16), None)
    table |= _forms("tanh.approx", 1, _of_f16(np.tanh), _of_bf16(np.tanh), "mufu")
    table |= _forms("ex2.approx", 1, _of_f16(np.exp2), None, "mufu")
    table |= _forms("ex2.approx.ftz", 1, None, _exp2_of_bf16, "mufu")
    for name, ftz in product(EXTREMES, FTZ):
        meaning, brain = modified(EXTREMES[name], ftz, flushed_f16), None if ftz else _of_bf16(EXTREMES[name])
        table |= _forms(with_ftz(name, ftz), 2, meaning, brain)
    return table


def _exp2_of_bf16(bits: Values) -> Values:
    """Replace subnormal operands and results by zero."""
    return to_bf16(flushed(from_bf16(to_bf16(np.exp2(np.float64(1) * flushed(from_bf16(bits)))))))


TABLE: dict[str, Op] = {
    **_arithmetic(),
    **_rounded_functions(),
    **_approximations(),
    **_bitwise(),
    **_half_arithmetic(),
    **_half_functions(),
}
