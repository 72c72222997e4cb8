"""Comparison and selection: PTX ISA 9.0, "Comparison and Selection Instructions" (setp, set, selp, slct).

`setp` returns p; Op.complement returns q of "p|q". f16 and bf16 have no q; pairs always have one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gemmery_emulator.op import NUMPY, Meaning, Op, Values, pair
from gemmery_emulator.ops import floating, half
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
FLUSHED: dict[str, Meaning] = {"f16": half.flushed, "f32": floating.flushed}  # by .ftz


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


def read_as(convert: Meaning | None, meaning: Meaning) -> Meaning:
    """Apply a meaning to converted operands."""
    return meaning if convert is None else lambda a, b: meaning(convert(a), convert(b))


def part(which: int, kind: str) -> Meaning:
    """Return the lower or upper value of a packed pair."""
    return lambda x: (x >> 16 * which).astype(np.uint16).view(NUMPY[kind])


def joined(compare: Meaning, join: np.ufunc | None) -> Meaning:
    """Combine a comparison with a third operand by a Boolean operator."""
    return compare if join is None else lambda a, b, c: join(compare(a, b), c)


def scalar_comparisons(kind: str) -> Iterator[tuple[str, Meaning, Meaning]]:
    """Yield for one type "lt.ftz" without Boolean operator, its comparison and the opposite one."""
    for ftz in ("", ".ftz") if kind in FLUSHED else ("",):
        convert = FLUSHED[kind] if ftz else half.from_bf16 if kind == "bf16" else None
        for name, compare in comparisons(kind).items():
            opposite = OPPOSITE[compare] if kind in INTEGERS else negated(compare)
            yield name + ftz, read_as(convert, compare), read_as(convert, opposite)


def spelled(compare: str, boolean: str) -> str:
    """Insert the Boolean operator before .ftz."""
    name, _, ftz = compare.partition(".")
    return name + boolean + ("." + ftz if ftz else "")


def packed_comparisons(kind: str) -> Iterator[tuple[str, Meaning, Meaning]]:
    """Yield for f16x2 or bf16x2 a comparison of the lower and one of the upper values."""
    for name, compare, _ in scalar_comparisons(kind[:-2]):
        yield name, read_as(part(0, kind[:-2]), compare), read_as(part(1, kind[:-2]), compare)


def combinations(kind: str) -> Iterator[tuple[str, tuple[str, ...], Meaning, Meaning]]:
    """Yield each comparison of a type with each Boolean operator: "lt.and.ftz", the operands' types, and two functions.

    The second function is the opposite comparison, or for packed pairs that of the upper values.
    """
    for name, first, second in (packed_comparisons if kind in PAIRS else scalar_comparisons)(kind):
        for boolean, join in BOOLEAN.items():
            operands = (kind, kind) if join is None else (kind, kind, "pred")
            yield spelled(name, boolean), operands, joined(first, join), joined(second, join)


def setp() -> dict[str, Op]:
    """Comparisons into predicates; of packed pairs, p for the lower values and q for the upper ones."""
    table = {}
    for kind in (*INTEGERS, *FLOATS, *PAIRS):
        for name, operands, first, second in combinations(kind):
            if kind in PAIRS:
                op = Op(("pred", "pred"), operands, pair(first, second), kind="setp")
            else:
                complement = None if kind in ("f16", "bf16") else second
                op = Op(("pred",), operands, first, kind="setp", complement=complement)
            table[f"setp.{name}.{kind}"] = op
    return table


def answers(kind: str) -> tuple[Values, Values]:
    """The results of set for false and true: 0 and 1.0 for floats, 0 and all ones for integers."""
    dtype = np.dtype(NUMPY[kind]).type
    if kind == "bf16":
        return dtype(0), dtype(0x3F80)
    return dtype(0), dtype(1) if kind in FLOATS else np.invert(dtype(0))


def answered(compare: Meaning, kind: str) -> Meaning:
    """Turn a comparison into one with a result of a type."""
    false, true = answers(kind)
    return lambda *operands: choose(compare(*operands), true, false)


def answered_packed(low: Meaning, high: Meaning, kind: str) -> Meaning:
    """Combine two comparisons, with results in the halves of 32 bits."""
    true = np.uint32({"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(kind, 0xFFFF))
    dtype = NUMPY[kind]

    def meaning(*operands: Values) -> Values:
        lower = choose(low(*operands), true, np.uint32(0))
        upper = choose(high(*operands), true, np.uint32(0))
        return (upper << 16 | lower).view(dtype)

    return meaning


def set_results(kind: str, ftz: bool) -> tuple[str, ...]:
    """The types of results of set for operands of a type."""
    if kind in PAIRS:
        return kind, "u32", "s32"
    if kind == "bf16":
        return "bf16", "u16", "s16", "u32", "s32"
    alternate = () if ftz else ("bf16",)
    return ("f16", *alternate, "u32", "s32", *(("u16", "s16") if kind == "f16" else ("f32",)))


def set_() -> dict[str, Op]:
    """Comparisons with numbers as results."""
    table = {}
    for kind in (*INTEGERS, *FLOATS, *PAIRS):
        for name, operands, low, high in combinations(kind):
            for result in set_results(kind, ".ftz" in name):
                meaning = answered_packed(low, high, result) if kind in PAIRS else answered(low, result)
                table[f"set.{name}.{result}.{kind}"] = Op((result,), operands, meaning, kind="set")
    return table


def selp(a: Values, b: Values, p: Values) -> Values:
    """Return `a` where `p` is true, else `b`."""
    return choose(p, a, b)


def slct(a: Values, b: Values, c: Values) -> Values:
    """Return `a` where `c` is not negative, else `b`; for NaN `b`, for -0.0 `a`."""
    return choose(c >= 0, a, b)


SELECTED = (*INTEGERS, "f32", "f64")

TABLE: dict[str, Op] = {
    **setp(),
    **set_(),
    **{f"selp.{t}": Op((t,), (t, t, "pred"), selp, kind="selp") for t in SELECTED},
    **{f"slct.{t}.{c}": Op((t,), (t, t, c), slct, kind="slct") for t in SELECTED for c in ("s32", "f32")},
    **{
        f"slct.ftz.{t}.f32": Op((t,), (t, t, "f32"), lambda a, b, c: slct(a, b, floating.flushed(c)), kind="slct")
        for t in SELECTED
    },
}
