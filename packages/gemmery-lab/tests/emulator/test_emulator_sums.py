"""Sums of tensor cores: the rule in fractions, what an H200 added, and the bounds of the ladder."""

from __future__ import annotations

from fractions import Fraction
from math import floor, inf, isfinite

import numpy as np
import pytest

import tensor_sums
from gemmery.cpu import fused as compiled
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_emulator import exact
from gemmery_emulator.kernels.kernel import emulate
from gemmery_emulator.ops.warp import DECODED
from gemmery_lab import measurements
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung
from gemmery_lab.measure.work import Work, operands

FUNCTIONS = {"numpy": exact.added, "compiled": compiled.added()}
RULES = {
    "f16": ("f16", "f16", 16, 25, 23),
    "f16 in halves": ("f16", "f16", 16, 25, 23),
    "bf16": ("bf16", "bf16", 16, 25, 23),
    "tf32": ("tf32", "tf32", 8, 25, 23),
    "tf32, 4": ("tf32", "tf32", 4, 25, 23),
    "e4m3": ("e4m3", "e4m3", 32, 13, 13),
    "e5m2": ("e5m2", "e5m2", 32, 13, 13),
    "e4m3 e5m2": ("e4m3", "e5m2", 32, 13, 13),
    "e5m2 e4m3 in halves": ("e5m2", "e4m3", 32, 13, 23),
}
LEAST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}
WORDS = {"f16": "u2", "bf16": "u2", "tf32": "u4", "e4m3": "u1", "e5m2": "u1"}


def exponent(number, normal):
    """Of a fraction; that of the least normal number below it."""
    size = abs(number)
    e = size.numerator.bit_length() - size.denominator.bit_length()
    return max(e - (size < Fraction(2) ** e), normal)


def cut(number, e, bits):
    """Toward zero, to so many bits below 2^e."""
    unit = Fraction(2) ** (e - bits)
    return floor(abs(number) / unit) * unit * (1 if number >= 0 else -1)


def by_the_rule(before, row, column, kinds, aligned, result, halves):
    """One sum after one addition, in whole numbers and fractions."""
    pairs = list(zip(row.tolist(), column.tolist(), strict=True))
    before = float(before)
    if not all(map(isfinite, (before, *row.tolist(), *column.tolist()))):
        total = np.float64(before)
        with np.errstate(invalid="ignore"):
            for x, y in pairs:
                total += np.float64(x) * np.float64(y)
        return np.float32(total)
    pairs = [(Fraction(x), Fraction(y)) for x, y in pairs]
    largest = [exponent(x, LEAST[kinds[0]]) + exponent(y, LEAST[kinds[1]]) for x, y in pairs if x * y]
    largest += [exponent(Fraction(before), -126)] if before else []
    e = max([*largest, -133])
    total = sum((cut(x * y, e, aligned) for x, y in pairs), cut(Fraction(before), e, aligned))
    if halves:  # to nearest even: Fraction rounds so
        unit = Fraction(2) ** (max(exponent(total, -14), -14) - 10) if total else Fraction(1)
        nearest = round(total / unit) * unit
        return np.float32(nearest if abs(nearest) < 65520 else inf if nearest > 0 else -inf)
    kept = cut(total, exponent(total, -126), result) if total else total
    return np.float32(float(kept) if abs(kept) < 2**128 else inf if kept > 0 else -inf)


def drawn(kind, shape, seed, some):
    """Elements of a type from random bits: of all sizes, or of those near 1; sometimes with infinities and NaN."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2 ** (8 * np.dtype(WORDS[kind]).itemsize), shape, dtype=WORDS[kind])
    numbers = DECODED[kind](bits.view("u4" if kind == "tf32" else bits.dtype)).reshape(shape)
    if some != "special":
        numbers = np.where(np.isfinite(numbers), numbers, np.float32(0))
    if some == "near":
        fraction, e = np.frexp(numbers)
        numbers = np.ldexp(fraction, e % 8 - 4)
    if some == "tiny":
        numbers = np.where(np.abs(numbers) < np.ldexp(1.0, LEAST[kind] + 4), numbers, np.float32(0))
    return numbers.astype(np.float32)


@pytest.mark.many(5)
@pytest.mark.parametrize("some", ["all", "near", "tiny", "special"])
@pytest.mark.parametrize("name", RULES)
def test_sums_follow_the_rule(name, some):
    """Every element, in fractions; two additions one after the other, the sums before of all sizes."""
    first, second, depth, aligned, result = RULES[name]
    halves = "halves" in name
    rule = exact.SumRule(depth, LEAST[first], LEAST[second], aligned, result, halves)
    a, b = drawn(first, (2, 4, 2 * depth), 1, some), drawn(second, (2, 8, 2 * depth), 2, some)
    start = drawn("f16" if halves else "tf32", (2, 4, 8), 3, some)
    start[:, :, ::2] *= some != "tiny"
    expected = start.copy()
    for place in np.ndindex(2, 4, 8):
        for k in (0, depth):
            row, column = a[place[0], place[1], k : k + depth], b[place[0], place[2], k : k + depth]
            expected[place] = by_the_rule(expected[place], row, column, (first, second), aligned, result, halves)
    for function in FUNCTIONS.values():
        with np.errstate(all="ignore"):
            ours = exact.chained(function, start, a, b, rule)
        np.testing.assert_array_equal(ours, expected)
        assert not (np.signbit(ours) & (ours == 0)).any()
        assert (ours.view(np.uint32)[np.isnan(ours)] == 0x7FFFFFFF).all()


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_nothing_is_aligned_below_2_to_the_minus_133(function):
    """1023 / 2^159 loses its last bit, so that 1 / 2^159 more does not make it the least number of f32."""
    a, b = np.zeros((2, 1, 8, 16), np.float32)
    a[0, :, 0], b[0, :, 0], a[0, :, 1], b[0, :, 1] = 33 * 2.0**-80, 31 * 2.0**-79, 2.0**-80, 2.0**-79
    zeros = np.zeros((1, 8, 8), np.float32)
    for sign in (1, -1):  # the sum is a positive zero in both cases
        assert not function(zeros, sign * a, b, exact.SumRule(16, -126, -126)).view(np.uint32).any()
    assert (function(zeros, a, b * 2, exact.SumRule(16, -126, -126)) == 2.0**-148).all()


@pytest.mark.many(5)
@pytest.mark.parametrize("opcode", tensor_sums.opcodes())
def test_an_instruction_adds_as_an_h200(opcode):
    """Bit for bit."""
    pytest.importorskip("cuda.bindings")
    one = tensor_sums.case(opcode)
    run = emulate(one.source, one.kernel, one.grid, one.block, one.args, one.shared, "sm_90a")
    assert run.findings == ()
    assert np.array_equal(tensor_sums.rows(one.written), tensor_sums.recorded()[opcode])


@pytest.mark.many(2)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "e4m3", "e5m2"])
def test_the_bounds_of_the_ladder_hold(dtype):
    """Of numbers of one sign, whose errors have one sign, too."""
    pytest.importorskip("cuda.bindings")
    work = Work(64, 64, 512, dtype, "f32", b_layout="col")
    a, b, c = (x[None] for x in operands(work))
    rung, gemm = find(CUDA, "wgmma_epilogue"), Gemm(abs(a), abs(b), c)
    run_rung(rung, problem_of(gemm, dtype, "f32", "h200"), rung.default, gemm)
    assert measurements.error(gemm.c, gemm.a, gemm.b, rung.bound_of(dtype)) <= 1
