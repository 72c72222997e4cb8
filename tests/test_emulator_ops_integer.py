"""Integer arithmetic, logic, shifts and comparisons of the emulator against plain Python, entry by entry."""

import importlib
import math
import operator
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gemmery.emulator.op import NUMPY, Op
from gemmery.emulator.ops import TABLE, merged

WORDS = ("u32", "u64", "s32", "s64")
SIGNED = ("s16", "s32", "s64")
TYPES = ("u16", "u32", "u64", *SIGNED)
BITS = ("b16", "b32", "b64")
FLOATS = ("f16", "bf16", "f32", "f64")
WIDE = ("u16", "s16", "u32", "s32")
M32 = 0xFFFFFFFF


def width(kind):
    return 16 if kind == "bf16" else 32 if kind.endswith("x2") else int(kind[1:])


def within(value, kind):
    """The Python integer that a type keeps of `value`."""
    value &= 2 ** width(kind) - 1
    return value - 2 ** width(kind) if kind[0] == "s" and value >> (width(kind) - 1) else value


def saturated(value):
    return max(-(2**31), min(2**31 - 1, value))


# ---- arithmetic


def quotient(a, b):
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a, b):
    return -1 if b == 0 else a - b * quotient(a, b)


def multiplied(kind, part):
    """mul's oracle: bits 0 up, or bits `width` up."""
    return (lambda a, b: a * b >> width(kind)) if part == "hi" else operator.mul


def multiplied24(kind, part):
    return lambda a, b: within(a << 8, kind) // 256 * (within(b << 8, kind) // 256) >> (16 if part == "hi" else 0)


def plus(product):
    return lambda a, b, c: product(a, b) + c


def in_halves(function, kind):
    def packed(a, b):
        low, high = (function(within(a >> at, kind), within(b >> at, kind)) & 0xFFFF for at in (0, 16))
        return high << 16 | low

    return packed


def dotted(a_kind, b_kind, fields, size):
    def dot(a, b, c):
        for at, other in fields:
            x, y = a >> at & (2**size - 1), b >> other & 255
            x -= 2**size if a_kind == "s32" and x >> (size - 1) else 0
            y -= 256 if b_kind == "s32" and y >> 7 else 0
            c += x * y
        return c

    return dot


def arithmetic():
    table = {}
    for kind in TYPES:
        table |= {f"add.{kind}": operator.add, f"sub.{kind}": operator.sub, f"min.{kind}": min, f"max.{kind}": max}
        table |= {f"div.{kind}": quotient, f"rem.{kind}": remainder, f"sad.{kind}": lambda a, b, c: c + abs(a - b)}
        for part in ("lo", "hi", "wide") if kind in WIDE else ("lo", "hi"):
            table[f"mul.{part}.{kind}"] = multiplied(kind, part)
            table[f"mad.{part}.{kind}"] = plus(multiplied(kind, part))
    for kind in SIGNED:
        table |= {f"neg.{kind}": operator.neg, f"abs.{kind}": abs}
    for kind in ("u32", "s32"):
        for part in ("lo", "hi"):
            table[f"mul24.{part}.{kind}"] = multiplied24(kind, part)
            table[f"mad24.{part}.{kind}"] = plus(multiplied24(kind, part))
    for kind in ("u16x2", "s16x2"):
        for name, function in (("add", operator.add), ("min", min), ("max", max)):
            table[f"{name}.{kind}"] = in_halves(function, kind[:3])
    for name, function in (("min", min), ("max", max)):
        table[f"{name}.relu.s32"] = relu = lambda a, b, function=function: max(0, function(a, b))
        table |= {f"{name}.s32.relu": relu, f"{name}.relu.s16x2": in_halves(relu, "s16")}
        table[f"{name}.s16x2.relu"] = table[f"{name}.relu.s16x2"]
    for a in ("u32", "s32"):
        for b in ("u32", "s32"):
            table[f"dp4a.{a}.{b}"] = dotted(a, b, [(0, 0), (8, 8), (16, 16), (24, 24)], 8)
            table[f"dp2a.lo.{a}.{b}"] = dotted(a, b, [(0, 0), (16, 8)], 16)
            table[f"dp2a.hi.{a}.{b}"] = dotted(a, b, [(0, 16), (16, 24)], 16)
    return table | {
        "add.sat.s32": lambda a, b: saturated(a + b),
        "sub.sat.s32": lambda a, b: saturated(a - b),
        "mad.hi.sat.s32": lambda a, b, c: saturated((a * b >> 32) + c),
        "mad24.hi.sat.s32": lambda a, b, c: saturated(multiplied24("s32", "hi")(a, b) + c),
    }


def carried():
    """Of each the sum as it is without an end, of which the flag is the bit beyond the type."""
    table = {}

    def flagged(total, kind, carry):
        if carry == "out":
            return lambda *x: (total(*x, 0), total(*x, 0) >> width(kind) & 1)
        return (lambda *x: (total(*x), total(*x) >> width(kind) & 1)) if carry == "in out" else total

    def added(kind):
        return lambda a, b, c: a % 2 ** width(kind) + b % 2 ** width(kind) + c

    def subtracted(kind):
        return lambda a, b, c: a % 2 ** width(kind) - b % 2 ** width(kind) - c

    def multiplied_added(kind, part):
        return lambda a, b, c, carry: added(kind)(multiplied(kind, part)(a, b), c, carry)

    for kind in WORDS:
        for suffix, carry in ((".cc", "out"), ("c", "in"), ("c.cc", "in out")):
            table[f"add{suffix}.{kind}"] = flagged(added(kind), kind, carry)
            table[f"sub{suffix}.{kind}"] = flagged(subtracted(kind), kind, carry)
            for part in ("lo", "hi"):
                opcode = {".cc": f"mad.{part}.cc", "c": f"madc.{part}", "c.cc": f"madc.{part}.cc"}[suffix]
                table[f"{opcode}.{kind}"] = flagged(multiplied_added(kind, part), kind, carry)
    return table


# ---- single bits


def text(a, size):
    """The bits of an integer, highest first."""
    return format(a & (2**size - 1), f"0{size}b")


def highest(kind):
    def place(a):
        return (a if a >= 0 else ~a).bit_length() - 1

    return place


def shift_amount(kind):
    return lambda a: -1 if highest(kind)(a) < 0 else width(kind) - 1 - highest(kind)(a)


def nth_set(mask, base, offset):
    if base > 31:
        return -1
    if offset == 0:
        return base if mask >> base & 1 else -1
    places = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [place for place in places if mask >> place & 1]
    return found[abs(offset) - 1] if len(found) >= abs(offset) else -1


def field_of(start, length, kind):
    """Of 32-bit forms a byte each; of 64-bit ones everything, as measured on an H200."""
    return (start & 255, length & 255) if width(kind) == 32 else (start, min(length, 64))


def extracted(kind):
    """Bit by bit, as the ISA tells it."""

    def field(a, start, length):
        start, length, last = *field_of(start, length, kind), width(kind) - 1
        sign = a >> min(start + length - 1, last) & 1 if kind[0] == "s" and length else 0
        taken = (a >> start + i & 1 if i < length and start + i <= last else sign for i in range(last + 1))
        return sum(bit << i for i, bit in enumerate(taken))

    return field


def inserted(kind):
    def field(a, b, start, length):
        start, length = field_of(start, length, kind)
        places = [i for i in range(length) if start + i < width(kind)]
        for i in places:
            b = b & ~(1 << start + i) | (a >> i & 1) << start + i
        return b

    return field


def held(count, mode):
    return min(count, 32) if mode == "clamp" else count % 32


def sign_extended(kind, mode):
    def extended(a, count):
        count = held(count, mode)
        low = a % 2**count
        return low - 2**count if kind == "s32" and count and low >> (count - 1) else low

    return extended


def masked(mode):
    return lambda start, count: sum(1 << i for i in range(32) if 0 <= i - held(start, mode) < held(count, mode))


def single_bits():
    table = {"fns.b32": nth_set}
    for kind in ("b32", "b64"):
        size = width(kind)
        table[f"popc.{kind}"] = lambda a: bin(a).count("1")
        table[f"clz.{kind}"] = lambda a, size=size: (text(a, size) + "1").index("1")
        table[f"brev.{kind}"] = lambda a, size=size: int(text(a, size)[::-1], 2)
        table[f"bfi.{kind}"] = inserted(kind)
    for kind in WORDS:
        table |= {f"bfind.{kind}": highest(kind), f"bfind.shiftamt.{kind}": shift_amount(kind)}
        table[f"bfe.{kind}"] = extracted(kind)
    for mode in ("clamp", "wrap"):
        table |= {f"szext.{mode}.{kind}": sign_extended(kind, mode) for kind in ("u32", "s32")}
        table[f"bmsk.{mode}.b32"] = masked(mode)
    return table


# ---- logic and shifts


def looked_up(a, b, c, table):
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def looked_up_and(join):
    def both(a, b, c, table, q):
        result = looked_up(a, b, c, table)
        return result, join(result != 0, q)

    return both


def funnel(direction, mode):
    def shifted(a, b, count):
        both, count = b << 32 | a, held(count, mode)
        return both << count >> 32 if direction == "l" else both >> count

    return shifted


def permuted(a, b, selector):
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    result = []
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source[nibble & 7]
        result.append(byte if nibble < 8 else 255 * (byte > 127))
    return int.from_bytes(bytes(result), "little")


# The ISA's tables: which byte lands in b3, b2, b1, b0, for c = 0 to 3.
MODES = {
    "f4e": [(3, 2, 1, 0), (4, 3, 2, 1), (5, 4, 3, 2), (6, 5, 4, 3)],
    "b4e": [(5, 6, 7, 0), (6, 7, 0, 1), (7, 0, 1, 2), (0, 1, 2, 3)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(3, 2, 1, 0), (3, 2, 1, 1), (3, 2, 2, 2), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)],
    "rc16": [(1, 0, 1, 0), (3, 2, 3, 2), (1, 0, 1, 0), (3, 2, 3, 2)],
}


def permuted_by(mode):
    def take(a, b, c):
        source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        return int.from_bytes(bytes(source[i] for i in MODES[mode][c % 4]), "big")

    return take


def logic():
    table = {"lop3.b32": looked_up, "prmt.b32": permuted}
    table |= {"lop3.and.b32": looked_up_and(operator.and_), "lop3.or.b32": looked_up_and(operator.or_)}
    table |= {f"prmt.b32.{mode}": permuted_by(mode) for mode in MODES}
    for kind in ("pred", *BITS):
        table |= {f"and.{kind}": operator.and_, f"or.{kind}": operator.or_, f"xor.{kind}": operator.xor}
        table[f"not.{kind}"] = operator.not_ if kind == "pred" else operator.invert
    for kind in BITS:
        table |= {f"cnot.{kind}": lambda a: int(a == 0), f"shl.{kind}": lambda a, n: a << min(n, 64)}
    table |= {f"shr.{kind}": lambda a, n: a >> min(n, 64) for kind in (*BITS, *TYPES)}
    return table | {f"shf.{d}.{mode}.b32": funnel(d, mode) for d in "lr" for mode in ("clamp", "wrap")}


# ---- comparison and selection


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


def number(bits, kind):
    """The float that 16 bits are."""
    return float(np.uint32(bits << 16).view(np.float32) if kind == "bf16" else np.uint16(bits).view(np.float16))


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
ORACLES = {**arithmetic(), **carried(), **single_bits(), **logic(), **COMPARED, **selection()}


# ---- the check


COUNTS = (0, 1, 2, 7, 8, 15, 16, 17, 23, 24, 31, 32, 33, 47, 48, 63, 64, 65, 255, 256, 257)
FLOAT_EDGES = (0.0, -0.0, 1.0, -1.0, 1.5, math.inf, -math.inf, math.nan, 2.0**-126, 2.0**-127, -(2.0**-149))


def half_bits(kind):
    """Edges of a 16-bit float as bits: zeros, ones, subnormal, smallest normal, infinite and not a number."""
    one, infinite, normal = (0x3C00, 0x7C00, 0x0400) if kind == "f16" else (0x3F80, 0x7F80, 0x0080)
    positive = (0, 1, normal - 1, normal, one, one + 1, infinite - 1, infinite, infinite + 1)
    return [bits | sign for bits in positive for sign in (0, 0x8000)]


def edges(kind):
    """Values at which a type's operations turn."""
    if kind in ("f32", "f64"):
        return FLOAT_EDGES
    if kind in ("f16", "bf16"):
        values = half_bits(kind)
        return [number(bits, kind) for bits in values] if kind == "f16" else values
    if kind in ("f16x2", "bf16x2"):
        values = half_bits(kind[:-2])
        return [low | high << 16 for low in values for high in values]
    top = 1 << (width(kind) - 1)
    return [within(value, kind) for value in (*COUNTS, -1, -2, top - 1, top, top + 1, top | 1 << 8, 0x8000, 0x80007FFF)]


def drawn(kind, generator):
    """An edge, or any value."""
    if kind == "pred":
        return generator.random() < 0.5
    if generator.random() < 0.6:
        return generator.choice(edges(kind))
    if kind in ("f16", "f32", "f64"):
        return float(np.float16(generator.gauss(0, 1)))
    return within(generator.getrandbits(64) >> generator.choice((0, 0, 8, 24)), kind)


@cache
def rows(kinds, count):
    """So many tuples of operands, some of two equal ones."""
    generator = random.Random(str(kinds))
    result = []
    for _ in range(count):
        row = [drawn(kind, generator) for kind in kinds]
        if len(row) > 1 and kinds[0] == kinds[1] and generator.random() < 0.1:
            row[1] = row[0]
        result.append(tuple(row))
    return result


@cache
def columns(kinds, count):
    """The rows as NumPy arrays in the types of the operands."""
    return tuple(array(values, kind) for values, kind in zip(zip(*rows(kinds, count), strict=True), kinds, strict=True))


def array(values, kind):
    return np.array(values, NUMPY[kind])


def operand_types(op):
    return op.operands + (("pred",) if "in" in op.carry.split() else ())


def result_types(op):
    return op.results + (("pred",) if "out" in op.carry.split() else ())


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def expected(result, kind):
    """What the oracle says, as the type keeps it."""
    if kind == "pred":
        return bool(result)
    return result if kind in ("f16", "f32", "f64") else within(result, kind)


def check(meaning, oracle, kinds, results, arrays, operands):
    """Arrays in, arrays out; scalars in, scalars out; one scalar among arrays; all equal to the oracle."""
    numbers = [
        [number(x, kind) if kind == "bf16" else x for x, kind in zip(row, kinds, strict=True)] for row in operands
    ]
    said = [[expected(r, kind) for r, kind in zip(as_tuple(oracle(*row)), results, strict=True)] for row in numbers]
    wanted = [array(column, kind) for column, kind in zip(zip(*said, strict=True), results, strict=True)]
    some = range(0, len(operands), 20)
    with np.errstate(all="ignore"):
        found = as_tuple(meaning(*arrays))
        scalars = [as_tuple(meaning(*(a[i] for a in arrays))) for i in some]
        places = range(len(arrays)) if len(arrays) > 1 else ()
        mixed = [as_tuple(meaning(*(a[0] if i == place else a[:3] for i, a in enumerate(arrays)))) for place in places]
        alone = [
            as_tuple(meaning(*(a[:1].repeat(3) if i == place else a[:3] for i, a in enumerate(arrays))))
            for place in places
        ]
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours, theirs)
    for ours, theirs in zip(zip(*scalars, strict=True), wanted, strict=True):
        assert all(isinstance(one, np.generic) for one in ours)
        same(np.array(ours), theirs[some])
    for ours, theirs in zip(mixed, alone, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            same(np.broadcast_to(one, 3), other)


def same(ours, theirs):
    """Equal in type and, not-a-number aside, in value."""
    assert ours.dtype == theirs.dtype
    if ours.tobytes() != theirs.tobytes():
        np.testing.assert_array_equal(ours, theirs)


def conforms(op: Op, oracle) -> None:
    kinds, count = operand_types(op), {"set": 80, "setp": 200}.get(op.kind, 500)  # of set there are 3,264
    check(op.meaning, oracle, kinds, result_types(op), columns(kinds, count), rows(kinds, count))


FAMILIES = sorted({opcode.split(".")[0] for opcode in ORACLES} - {"lop3"})


@pytest.mark.parametrize("family", FAMILIES)
def test_each_entry_means_what_the_oracle_says(family):
    for opcode, oracle in ORACLES.items():
        if opcode.split(".")[0] == family:
            try:
                conforms(TABLE[opcode], oracle)
            except Exception as error:
                raise AssertionError(opcode) from error


@pytest.mark.parametrize("opcode", [opcode for opcode in ORACLES if opcode.startswith("lop3")])
def test_lop3_knows_all_256_functions(opcode):
    op = TABLE[opcode]
    for lut in range(256):
        operands = [(*row[:3], lut, *row[4:]) for row in rows(op.operands, 21)]
        arrays = [array(values, kind) for values, kind in zip(zip(*operands, strict=True), op.operands, strict=True)]
        arrays[3] = np.uint32(lut)  # an immediate
        found = as_tuple(op.meaning(*arrays))
        for i, row in enumerate(operands):
            assert [int(column[i]) for column in found] == [int(x) for x in as_tuple(ORACLES[opcode](*row))], lut


def test_the_second_predicate_of_setp_joins_the_opposite():
    assert {opcode for opcode, op in TABLE.items() if op.complement} == COMPLEMENTS.keys()
    for opcode, oracle in COMPLEMENTS.items():
        kinds = TABLE[opcode].operands
        check(TABLE[opcode].complement, oracle, kinds, ("pred",), columns(kinds, 200), rows(kinds, 200))


def test_common_entries_are_single_numpy_operations():
    for opcode in ("add.s32", "sub.s64", "mul.lo.s32", "and.b32", "shl.b32", "shl.b64", "setp.lt.s32", "min.u32"):
        assert isinstance(TABLE[opcode].meaning, np.ufunc), opcode


def test_two_parts_may_not_define_one_opcode():
    op = TABLE["add.s32"]
    assert merged({"a": op}, {"b": op}) == {"a": op, "b": op}
    with pytest.raises(ValueError, match=r"add\.s32.*defined twice"):
        merged({"add.s32": op}, {"add.s32": op})


def test_every_entry_of_the_table_has_one_oracle():
    names = [path.stem for path in sorted(Path(__file__).parent.glob("test_emulator_ops_*.py"))]
    opcodes = [opcode for name in names for opcode in importlib.import_module(name).ORACLES]
    assert set(opcodes) == set(TABLE)
    assert len(opcodes) == len(TABLE)  # and none has two
