"""Comparison and selection, logic, shifts, byte permutes and bit fields.

PTX ISA 9.0, "Comparison and Selection Instructions" (setp, set, selp, slct), "Logic and Shift Instructions", prmt,
popc, bfe and others. `setp` returns p; Op.complement returns q of "p|q". f16 and bf16 have no q; pairs always have one.
Counts beyond the width need no special case: NumPy's shifts then give zeros, or the sign.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from gemmery_emulator.exact import from_bf16
from gemmery_emulator.op import NUMPY, Meaning, Op, Values, pair, same
from gemmery_emulator.ops.floating import flushed, flushed_f16
from gemmery_emulator.ops.integer import WORDS, bits, choose, unsigned

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
    both: Meaning = compare if read is None else lambda a, b: compare(read(a), read(b))
    return both if join is None else lambda a, b, c: join(both(a, b), c)


def reads(kind: str, ftz: str) -> tuple[Meaning | None, ...]:
    """How each value in an operand is read: of a packed pair the lower and the upper one."""
    scalar = kind.removesuffix("x2")
    convert = FLUSHED[scalar] if ftz else from_bf16 if scalar == "bf16" else None
    return (convert,) if kind not in PAIRS else tuple(partial(part, at, NUMPY[scalar], convert) for at in (0, 16))


def part(at: int, dtype: str, convert: Meaning | None, x: Values) -> Values:
    """Read 16 of 32 bits."""
    value = (x >> at).astype(np.uint16).view(dtype)
    return value if convert is None else convert(value)


def answered(compare: Meaning, kind: str) -> Meaning:
    """Turn a comparison into one with a result of a type: 0 and 1.0 for floats, 0 and all ones for integers."""
    dtype = np.dtype(NUMPY[kind]).type
    true = dtype(TRUE.get(kind, 1)) if kind in FLOATS else np.invert(dtype(0))
    return lambda *operands: choose(compare(*operands), true, dtype(0))


def answered_packed(low: Meaning, high: Meaning, kind: str, *operands: Values) -> Values:
    """Combine two comparisons, with results in the halves of 32 bits."""
    true = np.uint32(TRUE.get(kind, 0xFFFF))
    lower, upper = (choose(each(*operands), true, np.uint32(0)) for each in (low, high))
    return (upper << 16 | lower).view(NUMPY[kind])


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
                op = Op(("pred", "pred"), operands, pair(first, second[0]), kind="setp")
            elif kind in ("f16", "bf16"):
                op = Op(("pred",), operands, first, kind="setp")
            else:
                opposite = OPPOSITE[compare] if kind in INTEGERS else negated(compare)
                complement = compared(opposite, reads(kind, ftz)[0], join)
                op = Op(("pred",), operands, first, kind="setp", complement=complement)
            table[f"{setp}.{kind}"] = op
            for result in set_results(kind, ftz):
                meaning = partial(answered_packed, first, second[0], result) if second else answered(first, result)
                table[f"{set_}.{result}.{kind}"] = Op((result,), operands, meaning, kind="set")
    return table


def selp(a: Values, b: Values, p: Values) -> Values:
    """Return `a` where `p` is true, else `b`."""
    return choose(p, a, b)


def slct(a: Values, b: Values, c: Values) -> Values:
    """Return `a` where `c` is not negative, else `b`; for NaN `b`, for -0.0 `a`."""
    return choose(c >= 0, a, b)


SELECTED = (*INTEGERS, "f32", "f64")

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


def lop3_with(join: Meaning, a: Values, b: Values, c: Values, table: Values, q: Values) -> tuple[Values, Values]:
    """lop3 with a predicate: whether any bit is set, combined with a predicate operand."""
    result = lop3(a, b, c, table)
    return result, join(result != 0, q)


def shift(ufunc: np.ufunc, kind: str) -> Meaning:
    """Shift a value by 32-bit counts. NumPy's shifts also treat counts beyond the width as the width."""
    dtype = np.dtype(NUMPY[kind])
    if kind in ("b16", "u16", "s16"):
        return lambda a, count: ufunc(a, count).astype(dtype)
    if kind == "s32":  # NumPy would convert int32 and uint32 to int64; a negative count is also beyond the width
        return lambda a, count: ufunc(a, count.view(dtype))
    return ufunc


def funnel(direction: str, mode: str, a: Values, b: Values, count: Values) -> Values:
    """Return the upper ("l") or lower ("r") 32 bits of b:a after a shift."""
    both, count = b.astype(np.uint64) << 32 | a, limited(count, mode)
    return (both << count >> 32 if direction == "l" else both >> count).astype(np.uint32)


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


NONE = np.uint32(0xFFFFFFFF)  # the result of bfind and fns if there is no such bit


def popc(a: Values) -> Values:
    """Count the set bits."""
    return np.bitwise_count(a).astype(np.uint32)


def filled(a: Values) -> Values:
    """Return a mask of the highest set bit and all bits below it."""
    for shift in (1, 2, 4, 8, 16, 32)[: 5 if a.itemsize == 4 else 6]:
        a = a | a >> shift
    return a


def clz(a: Values) -> Values:
    """Count the zeros above the highest set bit."""
    return 8 * a.itemsize - popc(filled(a))


def bfind(a: Values) -> Values:
    """Return the position of the highest bit that is not a sign bit."""
    return popc(filled(unsigned(a ^ (a >> 8 * a.itemsize - 1) if a.dtype.kind == "i" else a))) - np.uint32(1)


def bfind_shiftamt(a: Values) -> Values:
    """Return the left shift that makes the highest bit that is not a sign bit the first."""
    place = bfind(a)
    return choose(place == NONE, NONE, 8 * a.itemsize - 1 - place)


def brev(a: Values) -> Values:
    """Reverse the bits: swap neighbors, then neighboring pairs, and so on."""
    width = 8 * a.itemsize
    for shift in (1, 2, 4, 8, 16, 32)[: 5 if width == 32 else 6]:
        mask = (2**width - 1) // (2**shift + 1)
        a = (a >> shift & mask) | (a & mask) << shift
    return a


def ones(kind: type[np.unsignedinteger[Any]], count: Values) -> Values:
    """Return a mask of the lowest `count` bits; all bits for counts beyond the width."""
    return ~(kind(np.iinfo(kind).max) << count.astype(kind))


def fns(mask: Values, base: Values, offset: Values) -> Values:
    """Return the position of the |offset|-th set bit from bit `base`, downwards if negative; for 0, `base` itself."""
    place = np.arange(32, dtype=np.uint32)
    mask, base, offset = (np.asarray(x)[..., None] for x in (mask, base, offset))
    up = offset >= 0
    candidates = (mask >> place & 1).astype(bool) & np.where(up, place >= base, place <= base) & (base < 32)
    candidates &= (offset != 0) | (place == base)
    rising = np.cumsum(candidates, axis=-1)
    rank = np.where(up, rising, rising[..., -1:] - rising + candidates)
    hit = candidates & (rank == np.maximum(np.abs(offset.astype(np.int64)), 1))
    return choose(hit.any(axis=-1), hit.argmax(axis=-1).astype(np.uint32), NONE)


def byte_of(x: Values, width: int) -> Values:
    """Return a start or length as a byte. The ISA leaves larger values open; an H200 uses them in 64-bit forms."""
    return x & 255 if width == 32 else x


def bfe(kind: str, a: Values, start: Values, length: Values) -> Values:
    """Return `length` bits from `start`; the bits above are zeros, or the sign, which is the last bit of the field."""
    width = bits(kind)
    word = np.dtype(NUMPY[f"u{width}"]).type
    start, length = byte_of(start, width), byte_of(length, width)
    field, inside = unsigned(a >> start.astype(a.dtype)), ones(word, length)
    if kind[0] == "u":
        return field & inside
    last = (np.minimum(start, width) + length - 1).astype(a.dtype)
    sign = choose(length == 0, word(0), unsigned(-(a >> last & 1)))
    return (field & inside | sign & ~inside).view(a.dtype)


def bfi(kind: str, a: Values, b: Values, start: Values, length: Values) -> Values:
    """Insert the lower `length` bits of a into b at bit `start`."""
    width, word = bits(kind), np.dtype(NUMPY[kind]).type
    start = byte_of(start, width).astype(word)
    field = ones(word, byte_of(length, width)) << start
    return (a << start & field) | (b & ~field)


def limited(count: Values, mode: str) -> Values:
    """Limit a count to 0 to 32 ("clamp") or 0 to 31 ("wrap")."""
    return np.minimum(count, 32) if mode == "clamp" else count & 31


def szext(mode: str, a: Values, count: Values) -> Values:
    """Return the lower `count` bits, with zeros or the sign above."""
    unused = (32 - limited(count, mode)).astype(a.dtype)
    return a << unused >> unused


def bmsk(mode: str) -> Meaning:
    """Return `count` ones from bit `start`."""
    return lambda start, count: ones(np.uint32, limited(count, mode)) << limited(start, mode)


def op(result: str, operands: tuple[str, ...], meaning: Meaning) -> Op:
    """An entry of this file."""
    return Op((result,), operands, meaning, kind="bits")


TABLE: dict[str, Op] = {
    **_comparing(),
    **{f"selp.{t}": Op((t,), (t, t, "pred"), selp, kind="selp") for t in SELECTED},
    **{f"slct.{t}.{c}": Op((t,), (t, t, c), slct, kind="slct") for t in SELECTED for c in ("s32", "f32")},
    **{
        f"slct.ftz.{t}.f32": Op((t,), (t, t, "f32"), lambda a, b, c: slct(a, b, flushed(c)), kind="slct")
        for t in SELECTED
    },
    **same("and", ("pred", *WIDTHS), 2, np.bitwise_and, "logic"),
    **same("or", ("pred", *WIDTHS), 2, np.bitwise_or, "logic"),
    **same("xor", ("pred", *WIDTHS), 2, np.bitwise_xor, "logic"),
    **same("not", ("pred", *WIDTHS), 1, np.invert, "logic"),
    **same("cnot", WIDTHS, 1, cnot, "logic"),
    "lop3.b32": Op(("b32",), ("b32", "b32", "b32", "u32"), lop3, kind="logic"),
    **{
        f"lop3.{name}.b32": Op(
            ("b32", "pred"), ("b32", "b32", "b32", "u32", "pred"), partial(lop3_with, join), kind="logic"
        )
        for name, join in (("and", np.logical_and), ("or", np.logical_or))
    },
    **{f"shl.{t}": Op((t,), (t, "u32"), shift(np.left_shift, t), kind="shift") for t in WIDTHS},
    **{
        f"shr.{t}": Op((t,), (t, "u32"), shift(np.right_shift, t), kind="shift")
        for t in (*WIDTHS, "u16", "u32", "u64", "s16", "s32", "s64")
    },
    **{
        f"shf.{direction}.{mode}.b32": Op(
            ("b32",), ("b32", "b32", "u32"), partial(funnel, direction, mode), kind="shift"
        )
        for direction in "lr"
        for mode in ("clamp", "wrap")
    },
    "prmt.b32": Op(("b32",), ("b32", "b32", "b32"), prmt, kind="prmt"),
    **{f"prmt.b32.{mode}": Op(("b32",), ("b32", "b32", "b32"), prmt_mode(mode), kind="prmt") for mode in PERMUTES},
    **{f"popc.{t}": op("u32", (t,), popc) for t in ("b32", "b64")},
    **{f"clz.{t}": op("u32", (t,), clz) for t in ("b32", "b64")},
    **{f"bfind.{t}": op("u32", (t,), bfind) for t in WORDS},
    **{f"bfind.shiftamt.{t}": op("u32", (t,), bfind_shiftamt) for t in WORDS},
    **{f"brev.{t}": op(t, (t,), brev) for t in ("b32", "b64")},
    "fns.b32": op("b32", ("b32", "b32", "s32"), fns),
    **{f"bfe.{t}": op(t, (t, "u32", "u32"), partial(bfe, t)) for t in WORDS},
    **{f"bfi.{t}": op(t, (t, t, "u32", "u32"), partial(bfi, t)) for t in ("b32", "b64")},
    **{
        f"szext.{mode}.{t}": op(t, (t, "u32"), partial(szext, mode))
        for mode in ("clamp", "wrap")
        for t in ("u32", "s32")
    },
    **{f"bmsk.{mode}.b32": op("b32", ("u32", "u32"), bmsk(mode)) for mode in ("clamp", "wrap")},
}
