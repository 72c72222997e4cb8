"""Factors of rows and columns of the rung that serves products on Hopper, on the emulator.

Operands are small whole numbers and factors powers of two, so that sums are exact.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gemmery import dispatch
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung

pytest.importorskip("cuda.bindings")

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "int8": np.int8, "f16": np.float16}
SMALL = {"bm": 64, "bn": 32, "stages": 2, "cm": 1, "cn": 1, "band": 1, "blocks": 2}


def factors(count, seed):
    return np.exp2(np.random.default_rng(seed).integers(-2, 3, count)).astype(np.float32)


@pytest.mark.many(5)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("which", ["a", "b", "ab", "one"])
def test_factors_are_applied_to_finished_sums(name, turned, which):
    m, n, k = 70, 40, 64
    rng = np.random.default_rng(0)
    a = rng.integers(-3, 4, (1, m, k)).astype(TYPES[name])
    b = rng.integers(-3, 4, (1, n, k)).astype(TYPES[name]).swapaxes(1, 2)
    c = np.full((1, n, m) if turned else (1, m, n), np.nan, np.float32)
    c = c.swapaxes(1, 2) if turned else c
    rows = factors((1, 1) if which == "one" else (m, 1), 1) if which != "b" else None
    columns = factors((1, 1) if which == "one" else (1, n), 2) if which != "a" else None
    bias, alpha = np.arange(n, dtype=np.float32), 0.5
    gemm = Gemm(a, b, c, bias, alpha, a_scale=rows, b_scale=columns)
    case = problem_of(gemm, name, "f32", "h200", epilogue="bias+relu", scaled=True)._replace(scales="outer")
    rung = dispatch.choice(case).rung
    assert rung.name == "wgmma_epilogue"
    runs = run_rung(rung, case, SMALL, gemm, EmulationOptions())
    expected = alpha * (a[0].astype(np.float64) @ b[0].astype(np.float64))
    expected = expected * (1 if rows is None else rows) * (1 if columns is None else columns) + bias
    np.testing.assert_array_equal(c[0], np.maximum(expected, 0))
    assert [str(finding) for run in runs for finding in run.findings] == []
