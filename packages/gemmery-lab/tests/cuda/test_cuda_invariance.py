"""Rows of an invariant product have the same bits for any number of rows, on the emulator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gemmery import dispatch
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung

pytestmark = pytest.mark.sampled(5)

pytest.importorskip("cuda.bindings")

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "f16": np.float16, "tf32": np.float32, "f32": np.float32}


@pytest.mark.many
@pytest.mark.parametrize(("name", "where"), [*((name, "h200") for name in TYPES), ("f16", "a100")])
@pytest.mark.parametrize("k", [144, 201])  # rows of A of 201 elements are packed, and a single one is not
def test_a_row_has_the_same_bits_in_every_product(name, where, k):
    rng, n = np.random.default_rng(0), 40
    a = rng.standard_normal((1, 130, k)).astype(TYPES[name])
    b = rng.standard_normal((1, n, k)).astype(TYPES[name]).swapaxes(1, 2)
    results = []
    for m in (1, 7, 130):
        c = np.full((1, m, n), np.nan, np.float32)
        gemm = Gemm(a[:, :m], b, c)
        dtype, precision = ("f32", "tf32") if name == "tf32" else (name, "")
        case = problem_of(gemm, dtype, "f32", where, precision=precision)._replace(invariant=True)
        chosen = dispatch.choice(case)
        run_rung(chosen.rung, case, chosen.config, gemm, EmulationOptions(check=False))
        results.append(c[0])
    single, few, many = results
    assert np.array_equal(few, many[:7])
    assert np.array_equal(single, many[:1])
    assert np.isfinite(many).all()


@pytest.mark.many
@pytest.mark.parametrize("b_layout", ["col", "row"])
def test_few_rows_are_brought_without_those_beyond_the_edge(b_layout):
    """Rows of A that a tile has and the matrix has not are neither brought nor garbage, and change no bit."""
    rng, n, k = np.random.default_rng(1), 72, 200
    a = rng.standard_normal((1, 200, k)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((1, k, n)).astype(ml_dtypes.bfloat16)
    b = b if b_layout == "row" else b.swapaxes(1, 2).copy().swapaxes(1, 2)
    rows = {}
    for m in (200, 1, 2, 7, 64):
        gemm = Gemm(a[:, :m], b, np.full((1, m, n), np.nan, ml_dtypes.bfloat16))
        case = problem_of(gemm, "bf16", "bf16", "h200")._replace(invariant=True)
        rung, config, _ = dispatch.choice(case)
        launch = rung.geometry(case, config)
        assert (rung.name, launch.maps[0].box) == ("wgmma_epilogue", (64, min(m, launch.tile[0])))
        (run,) = run_rung(rung, case, config, gemm)
        assert not run.findings
        rows[m] = gemm.c[0].view(np.uint16)
    assert all(np.array_equal(rows[m], rows[200][:m]) for m in rows)
    exact = a[0].astype(np.float64) @ b[0].astype(np.float64)
    assert (abs(rows[200].view(ml_dtypes.bfloat16) - exact) <= abs(exact) * 2**-8 + 1e-4).all()


@pytest.mark.many
@pytest.mark.parametrize("bn", [32, 64, 96, 112])
def test_tiles_of_8_rows_have_the_bits_of_others(bn):
    rng, (m, n, k) = np.random.default_rng(2), (6, 118, 400)
    a, b = (rng.standard_normal((1, side, k)).astype(ml_dtypes.bfloat16) for side in (m, n))
    rung, bits = find(CUDA, "wgmma_epilogue"), []
    for tile in ({"bm": 8, "bn": bn}, {"bm": 64, "bn": 64}):
        gemm = Gemm(a, b.swapaxes(1, 2), np.full((1, m, n), np.nan, ml_dtypes.bfloat16))
        case = problem_of(gemm, "bf16", "bf16", "h200")._replace(invariant=True)
        (run,) = run_rung(rung, case, rung.default | tile | {"stages": 3, "cm": 1, "cn": 1}, gemm)
        assert not run.findings
        bits.append(gemm.c[0].view(np.uint16).copy())
    assert np.array_equal(*bits)
    assert np.isfinite(bits[0].view(ml_dtypes.bfloat16).astype(np.float32)).all()
