"""Comparison and selection: PTX ISA 9.0, "Comparison and Selection Instructions" (setp, set, selp, slct).

`setp` returns p; Op.complement returns q of "p|q". f16 and bf16 have no q; pairs always have one.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from gemmery_emulator.exact import from_bf16
from gemmery_emulator.op import NUMPY, Meaning, Op, Values, pair
from gemmery_emulator.ops.floating import flushed, flushed_f16
from gemmery_emulator.ops.integer import choose

EQUAL: dict[str, Meaning] = {"eq": np.equal, "ne": np.not_equal}
ORDERED: dict[str, Meaning] = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
UNSIGNED: dict[str, Meaning] = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
OPPOSITE: dict[Meaning, Meaning] = {
    np.equal: np.not_equal,
    np.less: np.greater_equal,
    np.less_equal: np.greater,
    np.greater: np.less_equal,
    np.greater_equal: np.less,
    np.not_equal: np.equal,
}
BOOLEAN: dict[str, np.ufunc | None] = {"": None, ".and": np.bitwise_and, ".or": np.bitwise_or, ".xor": np.bitwise_xor}
INTEGERS = tuple(f"{sign}{width}" for sign in "bus" for width in (16, 32, 64))
FLOATS = ("f16", "bf16", "f32", "f64")
PAIRS = ("f16x2", "bf16x2")
FLUSHED: dict[str, Meaning] = {"f16": flushed_f16, "f32": flushed}  # by .ftz
TRUE = {"f16x2": 0x3C00, "bf16": 0x3F80, "bf16x2": 0x3F80}  # 1.0 in the bits of a type, or of half a pair


def negated(meaning: Meaning) -> Meaning:
    """Negate a meaning."""
    return lambda *operands: np.logical_not(meaning(*operands))


def nan(a: Values, b: Values) -> Values:
    """Whether at least one operand is NaN."""
    return np.isnan(a) | np.isnan(b)


def unequal(a: Values, b: Values) -> Values:
    """Whether both operands are numbers and differ."""
    return (a < b) | (a > b)


# For floats, plain comparisons with NaN are false, and those that end with u are true.
FLOAT: dict[str, Meaning] = {
    "eq": np.equal,
    "ne": unequal,
    **ORDERED,
    "equ": negated(unequal),
    "neu": np.not_equal,
    "ltu": negated(np.greater_equal),
    "leu": negated(np.greater),
    "gtu": negated(np.less_equal),
    "geu": negated(np.less),
    "num": negated(nan),
    "nan": nan,
}


def comparisons(kind: str) -> dict[str, Meaning]:
    """The comparisons of a type: bits have only equality."""
    if kind in INTEGERS:
        return EQUAL if kind[0] == "b" else EQUAL | ORDERED | (UNSIGNED if kind[0] == "u" else {})
    return FLOAT


def compared(compare: Meaning, read: Meaning | None, join: np.ufunc | None) -> Meaning:
    """A comparison of what is read of two operands, combined with a third one by a Boolean operator."""
    both = compare if read is None else lambda a, b: compare(read(a), read(b))
    return both if join is None else lambda a, b, c: join(both(a, b), c)


def reads(kind: str, ftz: str) -> tuple[Meaning | None, ...]:
    """How each value in an operand is read: of a packed pair the lower and the upper one."""
    one = kind.removesuffix("x2")
    convert = FLUSHED[one] if ftz else from_bf16 if one == "bf16" else None
    return (convert,) if kind not in PAIRS else tuple(part(at, NUMPY[one], convert) for at in (0, 16))


def part(at: int, dtype: str, convert: Meaning | None) -> Meaning:
    """Read 16 of 32 bits."""

    def read(x: Values) -> Values:
        value = (x >> at).astype(np.uint16).view(dtype)
        return value if convert is None else convert(value)

    return read


def answered(compare: Meaning, kind: str) -> Meaning:
    """Turn a comparison into one with a result of a type: 0 and 1.0 for floats, 0 and all ones for integers."""
    dtype = np.dtype(NUMPY[kind]).type
    true = dtype(TRUE.get(kind, 1)) if kind in FLOATS else np.invert(dtype(0))
    return lambda *operands: choose(compare(*operands), true, dtype(0))


def answered_packed(low: Meaning, high: Meaning, kind: str) -> Meaning:
    """Combine two comparisons, with results in the halves of 32 bits."""
    true, dtype = np.uint32(TRUE.get(kind, 0xFFFF)), NUMPY[kind]

    def meaning(*operands: Values) -> Values:
        lower, upper = (choose(each(*operands), true, np.uint32(0)) for each in (low, high))
        return (upper << 16 | lower).view(dtype)

    return meaning


def set_results(kind: str, ftz: str) -> tuple[str, ...]:
    """The types of results of set for operands of a type."""
    if kind in PAIRS:
        return kind, "u32", "s32"
    if kind == "bf16":
        return "bf16", "u16", "s16", "u32", "s32"
    alternate = () if ftz else ("bf16",)
    return ("f16", *alternate, "u32", "s32", *(("u16", "s16") if kind == "f16" else ("f32",)))


def _comparing() -> dict[str, Op]:
    """setp, with predicates as results (of packed pairs p for the lower values and q for the upper ones), and set.

    Each comparison comes with each Boolean operator: setp.lt.and.ftz.f32.
    """
    table = {}
    for kind in (*INTEGERS, *FLOATS, *PAIRS):
        flushes = ("", ".ftz") if kind.removesuffix("x2") in FLUSHED else ("",)
        for ftz, (name, compare), (boolean, join) in product(flushes, comparisons(kind).items(), BOOLEAN.items()):
            operands = (kind, kind) if join is None else (kind, kind, "pred")
            first, *second = (compared(compare, read, join) for read in reads(kind, ftz))
            setp, set_ = (f"{word}.{name}{boolean}{ftz}" for word in ("setp", "set"))
            if second:
                op = Op(("pred", "pred"), operands, pair(first, *second), kind="setp")
            elif kind in ("f16", "bf16"):
                op = Op(("pred",), operands, first, kind="setp")
            else:
                opposite = OPPOSITE[compare] if kind in INTEGERS else negated(compare)
                complement = compared(opposite, *reads(kind, ftz), join)
                op = Op(("pred",), operands, first, kind="setp", complement=complement)
            table[f"{setp}.{kind}"] = op
            for result in set_results(kind, ftz):
                meaning = answered_packed(first, *second, result) if second else answered(first, result)
                table[f"{set_}.{result}.{kind}"] = Op((result,), operands, meaning, kind="set")
    return table


def selp(a: Values, b: Values, p: Values) -> Values:
    """Return `a` where `p` is true, else `b`."""
    return choose(p, a, b)


def slct(a: Values, b: Values, c: Values) -> Values:
    """Return `a` where `c` is not negative, else `b`; for NaN `b`, for -0.0 `a`."""
    return choose(c >= 0, a, b)


SELECTED = (*INTEGERS, "f32", "f64")

TABLE: dict[str, Op] = {
    **_comparing(),
    **{f"selp.{t}": Op((t,), (t, t, "pred"), selp, kind="selp") for t in SELECTED},
    **{f"slct.{t}.{c}": Op((t,), (t, t, c), slct, kind="slct") for t in SELECTED for c in ("s32", "f32")},
    **{
        f"slct.ftz.{t}.f32": Op((t,), (t, t, "f32"), lambda a, b, c: slct(a, b, flushed(c)), kind="slct")
        for t in SELECTED
    },
}
