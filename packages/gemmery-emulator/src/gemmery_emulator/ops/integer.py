"""Integer arithmetic: PTX ISA 9.0, "Integer Arithmetic Instructions", and those of extended precision."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np

from gemmery_emulator.op import NUMPY, Meaning, Op, Values, same

SIGNED = ("s16", "s32", "s64")
TYPES = ("u16", "u32", "u64", *SIGNED)
WORDS = ("u32", "u64", "s32", "s64")
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}  # the type that holds the full product


def unsigned(x: Values) -> Values:
    """Return the bits of `x` as an unsigned integer."""
    return x.view(f"u{x.itemsize}")


def bits(kind: str) -> int:
    """Return the width of an integer type: 32 for "s32"."""
    return int(kind[1:])


def choose(condition: Values, a: Values, b: Values) -> Values:
    """Return `a` where the condition holds, else `b`; the operand itself if all threads agree."""
    if condition.ndim == 0:
        return a if condition else b
    return np.where(condition, a, b)


def clamped(wide: Values) -> Values:
    """Clamp an int64 to int32, as .sat does."""
    return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)


def halves(kind: str, meaning: Meaning, *operands: Values) -> Values:
    """Apply a meaning for 16-bit integers to both halves of 32 bits."""
    low = unsigned(meaning(*(x.astype(np.uint16).view(kind) for x in operands)))
    high = unsigned(meaning(*((x >> 16).astype(np.uint16).view(kind) for x in operands)))
    return high.astype(np.uint32) << 16 | low


def magnitude(x: Values) -> Values:
    """Return |x| as an unsigned integer, which the smallest signed integer needs."""
    return unsigned(np.abs(x)) if x.dtype.kind == "i" else x


def divided(operation: np.ufunc, sign: Meaning, a: Values, b: Values) -> Values:
    """Divide, rounding toward zero, with the sign of what `sign` gives; all ones where `b` is zero, which the ISA
    leaves open.
    """
    result = operation(magnitude(a), np.maximum(magnitude(b), 1)).view(a.dtype)
    if a.dtype.kind == "i":
        result = choose(sign(a, b) < 0, np.negative(result), result)
    return choose(b == 0, np.invert(a.dtype.type(0)), result)


def sad(a: Values, b: Values, c: Values) -> Values:
    """Return c + |a - b| without overflow of the difference."""
    return c + (np.maximum(a, b) - np.minimum(a, b))


def mul_hi_u64(a: Values, b: Values) -> Values:
    """Return the upper 64 of 128 bits, from products of 32-bit halves."""
    low = 0xFFFFFFFF
    a0, a1, b0, b1 = a & low, a >> 32, b & low, b >> 32
    middle = a1 * b0 + (a0 * b0 >> 32)
    other = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> 32) + (other >> 32)


def mul_hi_s64(a: Values, b: Values) -> Values:
    """Correct the unsigned product: a negative factor is 2**64 too large, which adds the other to the upper half."""
    high = mul_hi_u64(unsigned(a), unsigned(b)).view(np.int64)
    return high - (a >> 63 & b) - (b >> 63 & a)


def product24(kind: str, part: str) -> Meaning:
    """Return bits 31..0 ("lo") or 47..16 ("hi") of the product of the lower 24 bits."""
    narrow, wide, shift = NUMPY[kind], NUMPY[WIDE[kind]], 16 if part == "hi" else 0
    return lambda a, b: (np.multiply(a << 8 >> 8, b << 8 >> 8, dtype=wide) >> shift).astype(narrow)


def mul(kind: str, part: str) -> Meaning:
    """Return the lower half ("lo"), the upper half ("hi") or all ("wide") of a product."""
    if part == "lo":
        return np.multiply
    if kind not in WIDE:
        return mul_hi_u64 if kind == "u64" else mul_hi_s64
    narrow, wide, width = NUMPY[kind], NUMPY[WIDE[kind]], bits(kind)
    if part == "wide":
        return partial(np.multiply, dtype=wide)
    return lambda a, b: (np.multiply(a, b, dtype=wide) >> width).astype(narrow)


def then_add(product: Meaning) -> Meaning:
    """Return a product plus a third operand."""
    return lambda a, b, c: np.add(product(a, b), c)


def then_add_clamped(product: Meaning) -> Meaning:
    """Return a product plus a third operand, saturated to int32."""
    return lambda a, b, c: clamped(np.add(product(a, b), c, dtype=np.int64))


def relu(meaning: Meaning) -> Meaning:
    """Replace negative results of a meaning by zero."""
    return lambda a, b: np.maximum(meaning(a, b), a.dtype.type(0))


def dot(kind: str, fields: tuple[tuple[int, int], ...], width: int, a: Values, b: Values, c: Values) -> Values:
    """Return c plus the products of fields: of `width` bits in a and of 8 in b, at the bits in `fields`."""
    for at, other in fields:  # the second shift is arithmetic where x is signed
        of_a, of_b = a << (32 - width - at) >> (32 - width), b << (24 - other) >> 24
        c = c + of_a.astype(NUMPY[kind]) * of_b.astype(NUMPY[kind])
    return c


def dots() -> dict[str, Op]:
    """dp4a and dp2a: signed unless both factors are unsigned."""
    table = {}
    bytes_, low, high = tuple((at, at) for at in (0, 8, 16, 24)), ((0, 0), (16, 8)), ((0, 16), (16, 24))
    for a, b in product(("u32", "s32"), repeat=2):
        c = "u32" if a == b == "u32" else "s32"
        for name, fields, width in (("dp4a", bytes_, 8), ("dp2a.lo", low, 16), ("dp2a.hi", high, 16)):
            table[f"{name}.{a}.{b}"] = Op((c,), (a, b, c), partial(dot, c, fields, width), kind="dp")
    return table


def add_carry(a: Values, b: Values, carry: Values) -> tuple[Values, Values]:
    """Return the sum and whether it overflows."""
    first = np.add(unsigned(a), unsigned(b))
    total = np.add(first, carry.astype(first.dtype))
    return total.view(a.dtype), (first < unsigned(b)) | (total < first)


def sub_borrow(a: Values, b: Values, carry: Values) -> tuple[Values, Values]:
    """Return the difference a + ~b + carry, and its carry: a flag that is set means no borrow.

    So CUDA's division of 128-bit integers reads it, by an addc after a subc.cc.
    """
    return add_carry(a, np.invert(b), carry)


def flagged(meaning: Meaning, carry: str) -> Meaning:
    """Turn a meaning (operands, flag) -> (result, flag) into an op that uses the flag as `carry` says."""
    if carry == "out":
        return lambda *operands: meaning(*operands, np.bool_(meaning is sub_borrow))
    return meaning if carry == "in out" else lambda *operands: meaning(*operands)[0]


def with_carry() -> dict[str, Op]:
    """The extended-precision instructions: addc and others read the flag, those with .cc write it."""
    table = {}
    forms = (("{}{}.cc", "out"), ("{}c{}", "in"), ("{}c{}.cc", "in out"))
    for kind, (form, carry) in product(WORDS, forms):
        sums = (("add", "", add_carry), ("sub", "", sub_borrow))
        products = (("mad", f".{part}", product_carry(mul(kind, part))) for part in ("lo", "hi"))
        for base, part, meaning in (*sums, *products):
            operands, unit = ((kind,) * 3, "imad") if part else ((kind,) * 2, "int")
            opcode = f"{form.format(base, part)}.{kind}"
            table[opcode] = Op((kind,), operands, flagged(meaning, carry), kind=unit, carry=carry)
    return table


def product_carry(product: Meaning) -> Meaning:
    """Return a product plus a third operand plus the flag."""
    return lambda a, b, c, carry: add_carry(product(a, b), c, carry)


def arithmetic() -> dict[str, Op]:
    """Sums, differences, minima, maxima, quotients."""
    table = {
        **same("add", TYPES, 2, np.add, "int"),
        **same("sub", TYPES, 2, np.subtract, "int"),
        **same("min", TYPES, 2, np.minimum, "int"),
        **same("max", TYPES, 2, np.maximum, "int"),
        **same("div", TYPES, 2, partial(divided, np.floor_divide, np.bitwise_xor), "int"),
        **same("rem", TYPES, 2, partial(divided, np.remainder, lambda a, b: a), "int"),
        **same("sad", TYPES, 3, sad, "int"),
        **same("neg", SIGNED, 1, np.negative, "int"),
        **same("abs", SIGNED, 1, np.abs, "int"),
        **same("add.sat", ("s32",), 2, lambda a, b: clamped(np.add(a, b, dtype=np.int64)), "int"),
        **same("sub.sat", ("s32",), 2, lambda a, b: clamped(np.subtract(a, b, dtype=np.int64)), "int"),
    }
    extremes: tuple[tuple[str, Meaning], ...] = (("min", np.minimum), ("max", np.maximum))
    for name, meaning in extremes:
        for spelled in ("relu.{}", "{}.relu"):  # as in the ISA, and as in CUDA's headers
            opcode = f"{name}.{spelled}"
            table[opcode.format("s32")] = Op(("s32",), ("s32",) * 2, relu(meaning), kind="int")
            table[opcode.format("s16x2")] = Op(("b32",), ("b32",) * 2, partial(halves, "i2", relu(meaning)), kind="int")
    for kind in ("u16x2", "s16x2"):
        pairs: tuple[tuple[str, Meaning], ...] = (("add", np.add), *extremes)
        for name, meaning in pairs:
            table[f"{name}.{kind}"] = Op(("b32",), ("b32",) * 2, partial(halves, NUMPY[kind[:3]], meaning), kind="int")
    return table


def products() -> dict[str, Op]:
    """mul, mad and their 24-bit forms."""
    table = {}
    for kind, part in product(TYPES, ("lo", "hi", "wide")):
        if part != "wide" or kind in WIDE:
            result, whole = WIDE[kind] if part == "wide" else kind, mul(kind, part)
            table[f"mul.{part}.{kind}"] = Op((result,), (kind, kind), whole, kind="imad")
            table[f"mad.{part}.{kind}"] = Op((result,), (kind, kind, result), then_add(whole), kind="imad")
    for kind, part in product(("u32", "s32"), ("lo", "hi")):
        whole = product24(kind, part)
        table |= same(f"mul24.{part}", (kind,), 2, whole, "imad")
        table |= same(f"mad24.{part}", (kind,), 3, then_add(whole), "imad")
    table |= same("mad.hi.sat", ("s32",), 3, then_add_clamped(mul("s32", "hi")), "imad")
    table |= same("mad24.hi.sat", ("s32",), 3, then_add_clamped(product24("s32", "hi")), "imad")
    return table


TABLE: dict[str, Op] = {**arithmetic(), **products(), **dots(), **with_carry()}
