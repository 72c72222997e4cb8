"""Arithmetic of f16, bf16 and their pairs: PTX ISA 9.0, "Half Precision Floating-Point Instructions".

Results are computed in float64 and rounded once. Operands of f16 have 11 bits and exponents from -24 to 15: a sum of a
product and a third number that float64 cannot hold, 53 bits, has either a product beyond 2**28, which overflows anyway,
or one so far below the third number that the sum rounds to that number anyway: the rounding of float64 has no effect.
bf16 reaches from 2**-133 to 2**128, so there a sum that was rounded to the midpoint of two bf16 is rounded to odd
first.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from gemmery_emulator import exact
from gemmery_emulator.exact import where
from gemmery_emulator.op import Meaning, Op, Values
from gemmery_emulator.ops import floating
from gemmery_emulator.ops.floating import EXTREMES, FTZ, SAT, modified, with_ftz

BF16_NAN = np.uint16(0x7FFF)


def from_bf16(bits: Values) -> Values:
    """Convert the bits of bf16 to float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)[()]


def to_bf16(x: Values, mode: str = "rn") -> Values:
    """Round float32 or float64 to the bits of bf16: to nearest ("rn"), toward zero ("rz"), down ("rm") or up ("rp")."""
    x = np.asarray(x)
    bits = np.asarray(exact.odd_float32(x) if x.dtype == np.float64 else x).view(np.uint32)
    short, rest = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
    if mode == "rn":
        # More than half, or half and odd.
        short = short + ((rest + (short & np.uint32(1))) > 0x8000)
    elif mode != "rz":
        short = short + ((rest > 0) & (np.signbit(x) == (mode == "rm")))
    return where(np.isnan(x), BF16_NAN, short.astype(np.uint16))


def to_f16(x: Values, mode: str = "rn") -> Values:
    """Round float32 or float64 to float16, once."""
    nearest = np.asarray(x).astype(np.float16)[()]
    return nearest if mode == "rn" else exact.step(nearest, x - nearest.astype(np.float64), mode)


def unpacked(bits: Values) -> Values:
    """Split 32 bits into two 16-bit parts along a last axis of 2, the low one first."""
    return np.ascontiguousarray(bits).reshape(*np.shape(bits), 1).view(np.uint16)


def packed(parts: Values) -> Values:
    """Join two 16-bit parts along a last axis of 2 to 32 bits."""
    return np.ascontiguousarray(parts).view(np.uint32)[..., 0][()]


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


def flushed(x: Values) -> Values:
    """Replace subnormal float16 by zeros with their sign."""
    return where(np.abs(x) < np.float16(2.0**-14), np.copysign(np.float16(0), x), x)


def _modified(meaning: Meaning, modifiers: str) -> Meaning:
    """Add .ftz and .sat to a meaning for float16."""
    return modified(meaning, modifiers, flushed)


def _rectified(meaning: Meaning) -> Meaning:
    """.relu: replace negative results by 0; keep NaN."""
    # The addition turns -0 into +0.
    return lambda *operands: np.maximum(meaning(*operands), 0) + 0.0


def _rectified_bits(meaning: Meaning) -> Meaning:
    """The same for bits of bf16, whose NaN has no sign here."""

    def rectified(*operands: Values) -> Values:
        bits = meaning(*operands)
        return where(bits >= 0x8000, np.uint16(0), bits)

    return rectified


def _fused(x: Values, y: Values, z: Values) -> Values:
    return x * y + z


BF16: dict[str, Meaning] = {
    "add": lambda x, y: _sum_to_bf16(_wide(x), _wide(y)),
    "sub": lambda x, y: _sum_to_bf16(_wide(x), -_wide(y)),
    "mul": _of_bf16(np.multiply),
    "fma": lambda x, y, z: _sum_to_bf16(_wide(x) * _wide(y), _wide(z)),
}


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


def _arithmetic() -> dict[str, Op]:
    """add, sub, mul and fma; bf16 has no .ftz and no .sat."""
    meanings: dict[str, tuple[str, int, Meaning]] = {
        "add": ("hadd", 2, np.add),
        "sub": ("hadd", 2, np.subtract),
        "mul": ("hmul", 2, np.multiply),
        "fma": ("hfma", 3, _fused),
    }
    table: dict[str, Op] = {}
    for (name, (kind, count, f16)), modifiers in product(meanings.items(), SAT):
        meaning = _modified(_of_f16(f16), modifiers)
        brain = None if modifiers else BF16[name]
        flops = 2 if name == "fma" else 1
        for rounding in (".rn",) if name == "fma" else ("", ".rn"):
            table |= _forms(f"{name}{rounding}{modifiers}", count, meaning, brain, kind, flops)
    for ftz in FTZ:
        meaning = _modified(_of_f16(_rectified(_fused)), ftz)
        brain = None if ftz else _rectified_bits(BF16["fma"])
        table |= _forms(f"fma.rn{ftz}.relu", 3, meaning, brain, "hfma", 2)
    return table


def _functions() -> dict[str, Op]:
    """neg, abs, ex2, tanh, min, max; ex2 of bf16 is always .ftz."""
    sign = np.uint16(0x8000)
    table = _forms("neg", 1, None, lambda bits: bits ^ sign) | _forms("abs", 1, None, lambda bits: bits & ~sign)
    for ftz in FTZ:
        table |= _forms(f"neg{ftz}", 1, _modified(np.negative, ftz), None)
        table |= _forms(f"abs{ftz}", 1, _modified(np.abs, ftz), None)
    table |= _forms("tanh.approx", 1, _of_f16(np.tanh), _of_bf16(np.tanh), "mufu")
    table |= _forms("ex2.approx", 1, _of_f16(np.exp2), None, "mufu")
    table |= _forms("ex2.approx.ftz", 1, None, _exp2_of_bf16, "mufu")
    for name, ftz in product(EXTREMES, FTZ):
        meaning, brain = _modified(EXTREMES[name], ftz), None if ftz else _of_bf16(EXTREMES[name])
        table |= _forms(with_ftz(name, ftz), 2, meaning, brain)
    return table


def _exp2_of_bf16(bits: Values) -> Values:
    """Replace subnormal operands and results by zero."""
    return to_bf16(floating.flushed(from_bf16(to_bf16(np.exp2(np.float64(1) * floating.flushed(from_bf16(bits)))))))


TABLE: dict[str, Op] = _arithmetic() | _functions()
