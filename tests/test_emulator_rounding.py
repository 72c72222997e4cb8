"""Sums of wgmma rounded as on a device: the rule in fractions, one instruction, and the bounds of the ladder."""

from __future__ import annotations

from fractions import Fraction
from math import floor, inf, isnan, nan

import numpy as np
import pytest

import hopper
from gemmery.bench.work import Work, operands
from gemmery.emulator.hopper import rounding
from gemmery.lab import measurements
from gemmery.lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from gemmery.lab.kernel import emulate
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find

pytest.importorskip("cuda.bindings")
KEPT = {"f16": (25, 23), "bf16": (25, 23), "tf32": (25, 23), "e4m3": (13, 13), "e5m2": (13, 13)}


def exponent(number, normal):
    """Of a number as a fraction; that of the least normal number below it."""
    e = 0
    while abs(number) >= 2:
        number, e = number / 2, e + 1
    while abs(number) < 1:
        number, e = number * 2, e - 1
    return max(e, normal)


def cut(number, e, bits):
    """Toward zero, to so many bits below 2^e."""
    unit = Fraction(2) ** (e - bits)
    return floor(abs(number) / unit) * unit * (1 if number >= 0 else -1)


def by_the_rule(before, row, column, kind):
    """One element after one instruction."""
    aligned, result = KEPT[kind]
    normal = rounding.NORMAL[kind]
    pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(row, column, strict=True)]
    exponents = [exponent(x, normal) + exponent(y, normal) for x, y in pairs if x * y]
    exponents += [exponent(Fraction(float(before)), -126)] if before else []
    largest = max([*exponents, -133])
    total = sum((cut(x * y, largest, aligned) for x, y in pairs), cut(Fraction(float(before)), largest, aligned))
    return float(cut(total, exponent(total, -126), result)) if total else 0.0


def drawn(kind, shape, seed):
    """Numbers of a type, some zero, some below the least normal one of f16."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(shape) * np.exp2(random.integers(-20, 6, shape)) * (random.random(shape) < 0.9)
    bits = {"f16": 10, "bf16": 7, "tf32": 10, "e4m3": 3, "e5m2": 2}[kind]
    e = np.maximum(np.frexp(numbers)[1] - 1, max(rounding.NORMAL[kind], -40))
    unit = np.ldexp(1.0, e - bits)
    return (np.rint(numbers / unit) * unit).astype(np.float32)


@pytest.mark.parametrize("kind", KEPT)
def test_sums_follow_the_rule(kind):
    """Every element, in fractions; three instructions one after the other."""
    depth = 32 // hopper.SIZES[kind]
    sums = np.random.default_rng(1).standard_normal((2, 5, 7)).astype(np.float32)
    for step in range(3):
        a, b = drawn(kind, (2, 5, depth), step), drawn(kind, (2, 7, depth), 10 + step)
        found = rounding.added(sums, a, b, kind, kind)
        for group, row, column in np.ndindex(2, 5, 7):
            expected = by_the_rule(sums[group, row, column], a[group, row], b[group, column], kind)
            assert found[group, row, column] == expected
        sums = found


def test_infinities_and_nan_are_summed_as_usual():
    a, b = np.ones((1, 3, 16), np.float32), np.ones((1, 1, 16), np.float32)
    a[0, 0, 3], a[0, 1, 3], a[0, 1, 4], a[0, 2, 5] = inf, inf, -inf, nan
    with np.errstate(invalid="ignore"):
        found = rounding.added(np.zeros((1, 3, 1), np.float32), a, b, "f16", "f16")[0, :, 0].tolist()
    assert found[0] == inf
    assert isnan(found[1])
    assert isnan(found[2])


@pytest.mark.parametrize("kind", hopper.ROUNDED)
def test_an_instruction_rounds_so_where_it_is_asked_to(kind):
    """The sums begin as whole numbers that differ by register and thread."""
    case = hopper.rounded(kind)
    other, plain = case.again(), case.again()
    for one, device_sums in ((other, True), (plain, False)):
        run = emulate(one.source, one.kernel, 1, 128, one.args, one.shared, "sm_90a", device_sums=device_sums)
        assert run.findings == ()
    found, exact = other.written, plain.written
    near = np.abs(found - exact) <= 2.0 ** (-9 if kind in ("e4m3", "e5m2") else -18) * np.abs(exact).max()
    assert near.all()
    assert (found != exact).any()
    keep = KEPT[kind][1]
    assert not (found.view(np.uint32) & np.uint32((1 << 23 - keep) - 1)).any()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "e4m3", "e5m2"])
def test_the_bounds_of_the_ladder_hold_for_sums_of_a_device(dtype):
    """Of numbers of one sign, whose errors have one sign, too."""
    work = Work(64, 64, 512, dtype, "f32", b_layout="col")
    a, b, c = (x[None] for x in operands(work))
    rung, gemm = find(CUDA, "wgmma_epilogue"), Gemm(abs(a), abs(b), c)
    problem = problem_of(gemm, dtype, "f32", "h200")
    errors = []
    for device_sums in (False, True):
        run_rung(rung, problem, rung.default, gemm, EmulationOptions(device_sums=device_sums, check=False))
        errors.append(measurements.error(gemm.c, gemm.a, gemm.b, rung.bound_of(dtype)))
    assert errors[1] <= 1
    assert errors[0] < errors[1]
