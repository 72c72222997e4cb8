"""Floating-point arithmetic and conversions of the emulator against Python's fractions, entry by entry."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from floating_oracle import NAN, is_nan, mul, oracle
from gemmery_emulator import exact
from gemmery_emulator.op import NUMPY
from gemmery_emulator.ops.convert import TABLE as CONVERT
from gemmery_emulator.ops.floating import TABLE as FLOATING
from rounding import FORMATS, decoded, encoded

OURS = FLOATING | CONVERT
ROWS = 40
ORACLES = {opcode: oracle(opcode) for opcode in OURS}


EDGES = ["0", "-0", "1", "-1", "1.5", "2.5", "-2.5", "0.5", "inf", "-inf", "nan", "3", "448", "464", "480", "-57344"]
EDGES += ["61440", "65504", "65519", "65520", "255.5", "-128.5", "2147483648", "4294967295.5", "9223372036854775808"]
EDGES += [
    "1.8446744073709552e19",
    "-1e-7",
    "6e-8",
    "1e-40",
    "-1e-40",
    "3.4e38",
    "-3.39e38",
    "5e-324",
    "1.7e308",
    "1e-5",
]


def pattern(type_, source):
    """The bits of a random value of a type: an edge, a small number with few bits, any size, any bits."""
    name = type_.removesuffix("x2")
    if type_ != name:
        size = FORMATS[name].bits
        return pattern(name, source) << size | pattern(name, source)
    bits = 8 * np.dtype(NUMPY[type_]).itemsize if name not in FORMATS else FORMATS[name].bits
    way = source.randrange(4)
    if name not in FORMATS:
        return source.choice((0, 1, 2 ** (bits - 1), 2**bits - 1, source.getrandbits(bits) >> source.randrange(bits)))
    if way == 0:
        x = float(source.choice(EDGES))
    elif way == 1:
        x = source.randrange(-4000, 4000) / 2 ** source.randrange(12)
    elif way == 2:
        x = source.gauss(0, 1) * 10.0 ** source.randrange(-4, 5)
    else:
        return source.getrandbits(bits)
    return encoded(Fraction(x) if math.isfinite(x) and x else x, FORMATS[name])


def rows(opcode):
    types = OURS[opcode].operands
    types = ("f32x2",) * len(types) if "f32x2" in opcode and opcode[:3] != "cvt" else types
    source = random.Random(opcode)
    found = [tuple(pattern(type_, source) for type_ in types) for _ in range(ROWS)]
    # A third operand that takes away the product of the others leaves the bits that only one rounding keeps.
    if opcode.startswith(("fma", "mad")) and types[0] in FORMATS:
        form = FORMATS[types[0]]
        for i in range(0, ROWS, 4):
            x, y = (decoded(b, form) for b in found[i][:2])
            with np.errstate(invalid="ignore"):
                found[i] = (*found[i][:2], encoded(-mul(x, y), FORMATS[types[2]]))
    every = list(itertools.product(*map(critical, types)))
    return found + source.sample(every, min(len(every), 16))


def critical(type_):
    """Bits of both zeros, of the smallest number that is normal, and of NaN."""
    name = type_.removesuffix("x2")
    if name not in FORMATS:
        return [0]
    form = FORMATS[name]
    numbers = (0.0, -0.0, Fraction(2) ** (1 - form.bias), NAN)
    patterns = [encoded(x, form) for x in numbers]
    return patterns if type_ == name else [patterns[0] << form.bits | x for x in patterns]


def array(bits, type_):
    kind = np.dtype(NUMPY[type_])
    return np.array(bits, f"u{kind.itemsize}").view(kind)


def parts(values, opcode, type_):
    """Results as integers, a pair as two; every NaN as the format's own."""
    kind = "f32x2" if "f32x2" in opcode and opcode[:3] != "cvt" else type_
    name = kind.removesuffix("x2")
    size = 8 * np.dtype(NUMPY[type_]).itemsize
    for value in values:
        count = FORMATS[name].bits if name in FORMATS else size
        for at in range(0, size, count):
            part = int(value) >> at & 2**count - 1
            yield FORMATS[name].nan if name in FORMATS and is_nan(decoded(part, FORMATS[name])) else part


def ordered(bits, form):
    size = bits % 2 ** (form.bits - 1)
    return -size if bits != size else size


def check(opcode):
    op = OURS[opcode]
    table = rows(opcode)
    (result,) = op.results
    with np.errstate(all="ignore"):
        expected = list(parts([ORACLES[opcode](*row) for row in table], opcode, result))
        columns = [array(column, type_) for column, type_ in zip(zip(*table, strict=True), op.operands, strict=True)]
        got = op.meaning(*columns)
        assert got.dtype == NUMPY[result]
        assert got.shape == (len(table),)
        spread = [np.repeat(column, 2)[::2] for column in columns]
        np.testing.assert_array_equal(op.meaning(*spread), got)
        for i in range(8):
            one = op.meaning(*(column[i] for column in columns))
            assert isinstance(one, np.generic)
            assert one.dtype == got.dtype
            np.testing.assert_array_equal(one, got[i])
        if len(columns) > 1:
            mixed = op.meaning(columns[0][0], *(column[:1].repeat(3) for column in columns[1:]))
            np.testing.assert_array_equal(mixed, got[:1].repeat(3))
    found = list(parts(got.view(f"u{got.dtype.itemsize}"), opcode, result))
    per_row = len(found) // len(table)
    slack = 1 if "approx" in opcode else 0  # the ISA allows more; what is rounded twice may differ by one
    form = FORMATS.get(result.removesuffix("x2"))
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        close = slack and ours != form.nan != theirs and abs(ordered(ours, form) - ordered(theirs, form)) <= slack
        assert ours == theirs or close, f"{[hex(x) for x in table[i // per_row]]}: {ours:#x}, not {theirs:#x}"


FAMILIES = sorted({".".join((opcode.split(".")[0], OURS[opcode].results[0])) for opcode in ORACLES})


@pytest.mark.many
@pytest.mark.parametrize("family", FAMILIES)
def test_each_entry_means_what_the_oracle_says(family):
    name, result = family.split(".")
    for opcode in ORACLES:
        if opcode.split(".")[0] == name and OURS[opcode].results == (result,):
            try:
                check(opcode)
            except Exception as error:
                raise AssertionError(opcode) from error


def test_hot_entries_are_one_numpy_operation_and_share_one_fma():
    for type_ in ("f32", "f64"):
        for name in ("add", "add.rn", "sub", "sub.rn", "mul", "mul.rn"):
            assert isinstance(FLOATING[f"{name}.{type_}"].meaning, np.ufunc)
        assert FLOATING[f"fma.rn.{type_}"].meaning is FLOATING[f"mad.rn.{type_}"].meaning is exact.fma


def test_products_in_the_middle_are_decided_by_a_tiny_third_operand():
    """7 * 37 lies between 258 and 260 in bf16, 3 * 683 between 2048 and 2050 in f16."""
    bf16 = {x: np.uint16(encoded(Fraction(x), FORMATS["bf16"])) for x in (7, 37, 258, 260, 2.0**-100, -(2.0**-100))}
    f16 = {x: np.float16(x) for x in (3, 683, 2048, 2050, 2.0**-24, -(2.0**-24))}
    for name, values, (x, y, low, high, up, down) in (("bf16", bf16, bf16), ("f16", f16, f16)):
        fma = FLOATING[f"fma.rn.{name}"].meaning
        assert fma(values[x], values[y], values[up]) == values[high]
        assert fma(values[x], values[y], values[down]) == values[low]


def test_flops_of_an_instruction():
    flops = {"add.f32": 1, "mul.rz.f64": 1, "fma.rn.f64": 2, "mad.rn.f32": 2, "fma.rn.f32x2": 4, "add.f16": 1}
    flops |= {"fma.rn.bf16": 2, "fma.rn.f16x2": 4, "mul.bf16x2": 2, "cvt.rn.f16.f32": 0, "neg.f32": 0}
    assert {opcode: OURS[opcode].flops for opcode in flops} == flops


def test_bf16_and_8_bit_conversions_agree_with_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(7)
    x = (rng.standard_normal(20_000) * 10.0 ** rng.integers(-6, 3, 20_000)).astype(np.float32)
    x[:2000] = rng.integers(-480, 480, 2000) / 2
    ours = CONVERT["cvt.rn.bf16.f32"].meaning(x)
    np.testing.assert_array_equal(ours, x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(CONVERT["cvt.f32.bf16"].meaning(ours), ours.view(ml_dtypes.bfloat16).astype("f4"))
    codes = np.arange(256, dtype=np.uint16)
    for name, kind, largest in (("e4m3", ml_dtypes.float8_e4m3fn, 448), ("e5m2", ml_dtypes.float8_e5m2, 57344)):
        inside = np.clip(x, -largest, largest)
        got = CONVERT[f"cvt.rn.satfinite.{name}x2.f32"].meaning(inside, np.float32(0)) >> np.uint16(8)
        np.testing.assert_array_equal(got, inside.astype(kind).view(np.uint8))
        wide = CONVERT[f"cvt.rn.f16x2.{name}x2"].meaning(codes) & np.uint32(0xFFFF)
        values = codes.astype(np.uint8).view(kind).astype(np.float16)
        np.testing.assert_array_equal(wide.astype(np.uint16).view(np.float16), values)
