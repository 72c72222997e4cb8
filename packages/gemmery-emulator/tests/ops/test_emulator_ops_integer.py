"""Integer arithmetic, logic and shifts of the emulator against plain Python, entry by entry."""

import importlib
import operator
from pathlib import Path

import numpy as np
import pytest

from conformance import array, as_tuple, family_conforms, rows, width, within
from gemmery_emulator.instructions import COMPUTED as TABLE
from gemmery_emulator.instructions import merged

WORDS = ("u32", "u64", "s32", "s64")
SIGNED = ("s16", "s32", "s64")
TYPES = ("u16", "u32", "u64", *SIGNED)
BITS = ("b16", "b32", "b64")
WIDE = ("u16", "s16", "u32", "s32")


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
    """Of each the sum as it is without an end, of which the flag is the bit beyond the type.

    A difference is a sum, too, with the complement of its second operand, and one more where no flag comes in.
    """
    table = {}

    def flagged(total, kind, carry, first=0):
        if carry == "out":
            return lambda *x: (total(*x, first), total(*x, first) >> width(kind) & 1)
        return (lambda *x: (total(*x), total(*x) >> width(kind) & 1)) if carry == "in out" else total

    def added(kind):
        return lambda a, b, c: a % 2 ** width(kind) + b % 2 ** width(kind) + c

    def subtracted(kind):
        return lambda a, b, c: a % 2 ** width(kind) + ~b % 2 ** width(kind) + c

    def multiplied_added(kind, part):
        return lambda a, b, c, carry: added(kind)(multiplied(kind, part)(a, b), c, carry)

    for kind in WORDS:
        for suffix, carry in ((".cc", "out"), ("c", "in"), ("c.cc", "in out")):
            table[f"add{suffix}.{kind}"] = flagged(added(kind), kind, carry)
            table[f"sub{suffix}.{kind}"] = flagged(subtracted(kind), kind, carry, 1)
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


ORACLES = {**arithmetic(), **carried(), **single_bits(), **logic()}
FAMILIES = sorted({opcode.split(".")[0] for opcode in ORACLES} - {"lop3"})


@pytest.mark.parametrize("family", FAMILIES)
def test_each_entry_means_what_the_oracle_says(family):
    family_conforms(ORACLES, family)


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
