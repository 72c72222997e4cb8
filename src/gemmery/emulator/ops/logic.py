"""Logic, shifts and byte permutes: PTX ISA 9.0, "Logic and Shift Instructions", and prmt."""

from __future__ import annotations

import numpy as np

from gemmery.emulator.op import NUMPY, Meaning, Op, Values, same
from gemmery.emulator.ops.integer import choose

WIDTHS = ("b16", "b32", "b64")

# The bytes, lowest first, that the modes of prmt take for each value of the lower two bits of c.
PERMUTES = {
    "f4e": ("0123", "1234", "2345", "3456"),
    "b4e": ("0765", "1076", "2107", "3210"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("0123", "1123", "2223", "3333"),
    "ecr": ("0000", "0111", "0122", "0123"),
    "rc16": ("0101", "2323", "0101", "2323"),
}


def cnot(a: Values) -> Values:
    """Return one for zero, else zero."""
    return (a == 0).astype(a.dtype)


def lop3(a: Values, b: Values, c: Values, table: Values) -> Values:
    """Return any function of three bits; bit 4a + 2b + c of the immediate `table` is its value."""
    lut = int(table) & 255
    negated = lut.bit_count() > 4  # then fewer terms describe where it is 0
    lut ^= 255 * negated
    a, b, c = (~a, a), (~b, b), (~c, c)
    terms = [a[i >> 2] & b[i >> 1 & 1] & c[i & 1] for i in range(8) if lut >> i & 1]
    result = terms[0] if terms else a[0] & a[1] & b[0] & c[0]
    for term in terms[1:]:
        result = result | term
    return ~result if negated else result


def lop3_with(join: Meaning) -> Meaning:
    """lop3 with a predicate: whether any bit is set, combined with a predicate operand."""

    def meaning(a: Values, b: Values, c: Values, table: Values, q: Values) -> tuple[Values, Values]:
        result = lop3(a, b, c, table)
        return result, join(result != 0, q)

    return meaning


def shift(ufunc: np.ufunc, kind: str) -> Meaning:
    """Shift a value by 32-bit counts. NumPy's shifts also treat counts beyond the width as the width."""
    dtype = np.dtype(NUMPY[kind])
    if kind in ("b16", "u16", "s16"):
        return lambda a, count: ufunc(a, count).astype(dtype)
    if kind == "s32":  # NumPy would convert int32 and uint32 to int64; a negative count is also beyond the width
        return lambda a, count: ufunc(a, count.view(dtype))
    return ufunc


def funnel(direction: str, mode: str) -> Meaning:
    """Return the upper ("l") or lower ("r") 32 bits of b:a after a shift."""

    def meaning(a: Values, b: Values, count: Values) -> Values:
        both = b.astype(np.uint64) << 32 | a
        count = np.minimum(count, 32) if mode == "clamp" else count & 31
        return (both << count >> 32 if direction == "l" else both >> count).astype(np.uint32)

    return meaning


def prmt(a: Values, b: Values, selector: Values) -> Values:
    """Select four of eight bytes; the fourth bit of a selector replaces the byte by copies of its sign."""
    uniform = np.ndim(selector) == 0  # almost always, and then ten times as fast
    result = np.uint32(0)
    for place in (0, 4, 8, 12):
        which = selector >> place & 15
        word = (b if which & 4 else a) if uniform else np.where(which & 4, b, a)
        byte = word >> ((which & 3) << 3) & 255
        if not uniform or which & 8:
            byte = choose(which & 8, (byte >> 7) * 255, byte)
        result = result | byte << 2 * place
    return result


def prmt_mode(mode: str) -> Meaning:
    """prmt with one of the four selectors of the mode."""
    selectors = np.array([int(places[::-1], 16) for places in PERMUTES[mode]], np.uint32)
    return lambda a, b, c: prmt(a, b, selectors[c & 3])


TABLE: dict[str, Op] = {
    **same("and", ("pred", *WIDTHS), 2, np.bitwise_and, "logic"),
    **same("or", ("pred", *WIDTHS), 2, np.bitwise_or, "logic"),
    **same("xor", ("pred", *WIDTHS), 2, np.bitwise_xor, "logic"),
    **same("not", ("pred", *WIDTHS), 1, np.invert, "logic"),
    **same("cnot", WIDTHS, 1, cnot, "logic"),
    "lop3.b32": Op(("b32",), ("b32", "b32", "b32", "u32"), lop3, kind="logic"),
    **{
        f"lop3.{name}.b32": Op(("b32", "pred"), ("b32", "b32", "b32", "u32", "pred"), lop3_with(join), kind="logic")
        for name, join in (("and", np.logical_and), ("or", np.logical_or))
    },
    **{f"shl.{t}": Op((t,), (t, "u32"), shift(np.left_shift, t), kind="shift") for t in WIDTHS},
    **{
        f"shr.{t}": Op((t,), (t, "u32"), shift(np.right_shift, t), kind="shift")
        for t in (*WIDTHS, "u16", "u32", "u64", "s16", "s32", "s64")
    },
    **{
        f"shf.{direction}.{mode}.b32": Op(("b32",), ("b32", "b32", "u32"), funnel(direction, mode), kind="shift")
        for direction in "lr"
        for mode in ("clamp", "wrap")
    },
    "prmt.b32": Op(("b32",), ("b32", "b32", "b32"), prmt, kind="prmt"),
    **{f"prmt.b32.{mode}": Op(("b32",), ("b32", "b32", "b32"), prmt_mode(mode), kind="prmt") for mode in PERMUTES},
}
