"""Comparisons and selections of the emulator against plain Python, entry by entry."""

import math
import operator

import pytest

from conformance import check, columns, family_conforms, number, rows
from gemmery_emulator.instructions import COMPUTED as TABLE

TYPES = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")
FLOATS = ("f16", "bf16", "f32", "f64")

JOIN = {"": lambda t, c: t, ".and": operator.and_, ".or": operator.or_, ".xor": operator.xor}
INTEGER_COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def ordered(name):
    def compare(a, b):
        return not (math.isnan(a) or math.isnan(b)) and INTEGER_COMPARISONS[name](a, b)

    return compare


def unordered(name):
    def compare(a, b):
        return math.isnan(a) or math.isnan(b) or INTEGER_COMPARISONS[name](a, b)

    return compare


def flush(function, kind):
    """`function` of numbers of which subnormal ones are zero."""
    smallest = 2.0 ** (-14 if kind == "f16" else -126)
    return lambda *x: function(*(0.0 if abs(value) < smallest else value for value in x))


def comparisons(kind):
    """What a type can be asked, as (name, ".ftz" or nothing) -> a function of two numbers."""
    if kind[0] in "bus" and kind != "bf16":
        table = {name: INTEGER_COMPARISONS[name] for name in (("eq", "ne") if kind[0] == "b" else INTEGER_COMPARISONS)}
        if kind[0] == "u":
            table |= {new: INTEGER_COMPARISONS[old] for new, old in UNSIGNED_NAMES.items()}
        return {(name, ""): compare for name, compare in table.items()}
    table = {name: ordered(name) for name in INTEGER_COMPARISONS}
    table |= {f"{name}u": unordered(name) for name in INTEGER_COMPARISONS}
    table |= {"num": lambda a, b: not (math.isnan(a) or math.isnan(b)), "nan": lambda a, b: a != a or b != b}
    flushed = {(name, ".ftz"): flush(f, kind) for name, f in table.items()} if kind in ("f16", "f32") else {}
    return {(name, ""): compare for name, compare in table.items()} | flushed


def compared(compare, join, negate=False):
    """p of setp, or q."""
    return lambda a, b, c=False: join(bool(compare(a, b)) != negate, c)


def of_halves(compare, join, kind):
    def both(a, b, c=False):
        return tuple(join(bool(compare(x, y)), c) for x, y in zip(halves(a, kind), halves(b, kind), strict=True))

    return both


def halves(word, kind):
    return [number(word >> at & 0xFFFF, kind) for at in (0, 16)]


def stated(function, result):
    """What set writes."""
    true = 1.0 if result in ("f16", "f32") else 0x3F80 if result == "bf16" else -1
    return lambda *x: true if function(*x) else 0


def stated_pairs(function, result):
    true = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result, 0xFFFF)

    def packed(*x):
        low, high = function(*x)
        return true * low + (true * high << 16)

    return packed


def results_of_set(kind, ftz):
    if kind == "bf16":
        return "bf16", "u16", "s16", "u32", "s32"
    if kind == "f16":
        return ("f16", "u16", "s16", "u32", "s32") + (() if ftz else ("bf16",))
    return ("f16", "f32", "u32", "s32") + (() if ftz else ("bf16",))


def compare_and_set():
    """The oracles of setp and set, and those of q where setp may write p|q."""
    table, complements = {}, {}
    for kind in (*(f"{sign}{size}" for sign in "bus" for size in (16, 32, 64)), *FLOATS):
        for (name, ftz), compare in comparisons(kind).items():
            for boolean, join in JOIN.items():
                spelled = name + boolean + ftz
                table[f"setp.{spelled}.{kind}"] = p = compared(compare, join)
                if kind not in ("f16", "bf16"):
                    complements[f"setp.{spelled}.{kind}"] = compared(compare, join, negate=True)
                for result in results_of_set(kind, ftz):
                    table[f"set.{spelled}.{result}.{kind}"] = stated(p, result)
                if kind in ("f16", "bf16"):
                    table[f"setp.{spelled}.{kind}x2"] = pair = of_halves(compare, join, kind)
                    for result in (f"{kind}x2", "u32", "s32"):
                        table[f"set.{spelled}.{result}.{kind}x2"] = stated_pairs(pair, result)
    return table, complements


def selection():
    table = {}
    for kind in (*BITS, *TYPES, "f32", "f64"):
        table[f"selp.{kind}"] = lambda a, b, p: a if p else b
        table[f"slct.{kind}.s32"] = table[f"slct.{kind}.f32"] = by_sign = lambda a, b, c: a if c >= 0 else b
        table[f"slct.ftz.{kind}.f32"] = lambda a, b, c, by_sign=by_sign: by_sign(a, b, 0.0 if abs(c) < 2**-126 else c)
    return table


COMPARED, COMPLEMENTS = compare_and_set()
ORACLES = {**COMPARED, **selection()}
FAMILIES = sorted({opcode.split(".")[0] for opcode in ORACLES})


@pytest.mark.many
@pytest.mark.parametrize("family", FAMILIES)
def test_each_entry_means_what_the_oracle_says(family):
    family_conforms(ORACLES, family)


def test_the_second_predicate_of_setp_joins_the_opposite():
    assert {opcode for opcode, op in TABLE.items() if op.complement} == COMPLEMENTS.keys()
    for opcode, oracle in COMPLEMENTS.items():
        kinds = TABLE[opcode].operands
        check(TABLE[opcode].complement, oracle, kinds, ("pred",), columns(kinds, 200), rows(kinds, 200))
