"""Entries of the emulator's table against plain Python: operands at the edges of their types, arrays and scalars."""

import math
import random
from functools import cache

import numpy as np

from gemmery_emulator.instructions import COMPUTED as TABLE
from gemmery_emulator.op import NUMPY, Op


def width(kind):
    return 16 if kind == "bf16" else 32 if kind.endswith("x2") else int(kind[1:])


def within(value, kind):
    """The Python integer that a type keeps of `value`."""
    value &= 2 ** width(kind) - 1
    return value - 2 ** width(kind) if kind[0] == "s" and value >> (width(kind) - 1) else value


def number(bits, kind):
    """The float that 16 bits are."""
    return float(np.uint32(bits << 16).view(np.float32) if kind == "bf16" else np.uint16(bits).view(np.float16))


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


def family_conforms(oracles, family):
    """Every entry of one first word against its oracle; an error names the entry."""
    for opcode, oracle in oracles.items():
        if opcode.split(".")[0] == family:
            try:
                conforms(TABLE[opcode], oracle)
            except Exception as error:
                raise AssertionError(opcode) from error
