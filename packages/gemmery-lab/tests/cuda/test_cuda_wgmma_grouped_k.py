"""Groups along k in one launch: results on the emulator, groups of any length, offsets of all kinds, instances."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from gemmery.errors import RefusedError
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from mutant import edited

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

RUNG = find(CUDA, "wgmma_grouped_k")
SMALL = {"bn": 64, "stages": 3}
GUARD = 8  # elements around each row of C
OUTS = {"f16": np.float16, "f32": np.float32}


def repeated(matrix, groups):
    """A matrix for each group without a copy, as the launch describes A and B."""
    return as_strided(matrix, (groups, *matrix.shape), (0, *matrix.strides))


def operands(m, n, k, layouts=("col", "row"), dtype=np.float16):
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((m, k), (k, n)))
    a = np.ascontiguousarray(a.T).T if layouts[0] == "col" else a
    return a, np.ascontiguousarray(b.T).T if layouts[1] == "col" else b


def launched(a, b, ends, *, out="f32", seed=None, config=None, texts=None, dtype="f16", epilogue="", **others):
    """The result of the rung, and the findings of its launches; nothing around C is written."""
    groups, m, n = len(ends), len(a), b.shape[1]
    around = np.full((groups, m + 2, n + 2 * GUARD), 999, OUTS[out])
    c = around[:, 1:-1, GUARD:-GUARD]
    x, y = (z if z.dtype.isbuiltin else z.view(np.uint8) for z in (a, b))
    gemm = Gemm(repeated(x, groups), repeated(y, groups), c, offsets=np.array(ends, np.int32), **others)
    problem = problem_of(gemm, dtype, out, "h200", epilogue=epilogue, scaled="alpha" in others)
    problem = problem._replace(batch=1, k_groups=groups, scales="blocks" if "a_scale" in others else "")
    runs = run_rung(
        RUNG, problem, {**RUNG.default, **SMALL, **(config or {})}, gemm, EmulationOptions(seed=seed, texts=texts)
    )
    result = c.copy()
    c[...] = 999
    assert np.all(around == 999)
    return result, [finding for run in runs for finding in run.findings]


def expected(a, b, ends):
    """The products of the groups; ends as kernels use them."""
    ends = np.minimum(np.maximum.accumulate([0, *ends]), a.shape[1])
    with np.errstate(invalid="ignore"):
        return np.stack([a[:, i:j].astype("f4") @ b[i:j].astype("f4") for i, j in pairwise(ends)])


@pytest.mark.many(4)
@pytest.mark.parametrize("layouts", [("col", "row"), ("row", "col"), ("row", "row"), ("col", "col")])
@pytest.mark.parametrize(
    ("ends", "m", "n", "config"),
    [
        ([64, 128, 192], 128, 72, {}),
        ([1, 1, 70, 203], 136, 72, {"blocks": 2}),
        ([0, 0, 0], 64, 64, {}),
        ([300, 301, 333, 333, 560], 72, 136, {"blocks": 3, "band": 1}),
        ([130], 200, 264, {"bn": 256, "blocks": 1}),
        ([17, 30, 100, 999], 8, 8, {"bn": 128}),
    ],
)
def test_each_group_has_a_matrix_of_its_own(ends, m, n, config, layouts):
    k = min(ends[-1] + 40, 600) // 8 * 8 + 8
    a, b = operands(m, n, k, layouts)
    result, findings = launched(a, b, ends, config=config, seed=len(ends))
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.many(3)
@pytest.mark.parametrize("layouts", [("col", "row"), ("row", "row"), ("row", "col")])
@pytest.mark.parametrize(("m", "k", "ends"), [(72, 41, [1, 2, 3, 4]), (71, 77, [0, 70, 71, 77])])
def test_operands_that_are_packed_first(layouts, m, k, ends):
    """Where k is adjacent, what lies beyond its end begins at a multiple of 16 bytes too."""
    a, b = operands(m, 64, k, layouts)
    result, findings = launched(a, b, ends, out="f16", config={"bn": 128, "stages": 2})
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.many(3)
@pytest.mark.parametrize("layouts", [("col", "row"), ("row", "col")])
def test_what_is_not_finite_stays_in_its_group(layouts):
    a, b = operands(72, 64, 208, layouts)
    ends = [70, 70, 131, 150]
    a[:, 70:131], b[131:150], a[:, 150:] = np.nan, np.inf, np.nan
    result, findings = launched(a, b, ends)
    assert findings == []
    want = expected(a, b, ends)
    assert np.isfinite(want[[0, 1]]).all()
    assert np.array_equal(result, want, equal_nan=True)


def test_offsets_that_are_wrong_touch_nothing_outside():
    """Each is used as if it were at least the one before, and at most k."""
    a, b = operands(64, 64, 136)
    ends = [40, -5, 900, 20]
    result, findings = launched(a, b, ends)
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.many(3)
@pytest.mark.parametrize(("name", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("int8", np.int8)])
def test_types_of_8_bits(name, dtype):
    a, b = operands(72, 80, 304, ("row", "col"), dtype)
    ends = [5, 133, 133, 300]
    result, findings = launched(a, b, ends, dtype=name)
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.many(3)
@pytest.mark.parametrize("ends", [[128, 128, 896, 1024], [5, 133, 900, 1000], [0, 600, 2560, 2688]])
def test_factors_of_128_of_k(ends):
    """Powers of two, for every 128 of k, wherever groups begin."""
    m, n, k = 72, 136, ends[-1] // 128 * 128 + 256
    a, b = operands(m, n, k, ("row", "col"), ml_dtypes.float8_e4m3fn)
    rng = np.random.default_rng(0)
    rows, blocks = (np.exp2(rng.integers(-2, 3, shape)).astype("f4") for shape in ((m, k // 128), (k // 128, 2)))
    result, findings = launched(a, b, ends, dtype="e4m3", a_scale=rows, b_scale=blocks)
    assert findings == []
    wide = (
        a.astype("f4") * np.repeat(rows, 128, 1),
        b.astype("f4") * np.repeat(np.repeat(blocks, 128, 0), 128, 1)[:, :n],
    )
    assert np.array_equal(result, expected(*wide, ends))


def test_alpha_and_an_activation_in_halves():
    a, b = operands(64, 72, 136)
    result, findings = launched(a, b, [100, 136], out="f16", epilogue="relu", alpha=0.5)
    assert findings == []
    assert np.array_equal(result, np.maximum(0.5 * expected(a, b, [100, 136]), 0).astype("f2"))


def test_long_groups_come_first():
    """Seven short groups and a long one on two blocks: the long one's block takes none of the others."""
    a, b = operands(64, 64, 1072)
    ends = [8, 16, 24, 32, 40, 48, 56, 1072]
    result, findings = launched(a, b, ends, config={"blocks": 2})
    assert findings == []
    assert np.array_equal(result, expected(a, b, ends))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("ragged.cuh", "if (k < low || k >= high)", "if (k < low)"),
        ("ragged.cuh", "    clear_outside<Tiles, Tiles::B_K_MAJOR", "    if (0) clear_outside<Tiles, Tiles::B_K_MAJOR"),
        ("ragged.cuh", "    ptx::bar_sync(1, Tiles::WARPGROUPS * 128);", ""),
        ("ragged.cuh", "    ptx::fence_proxy_async();", ""),
        ("wgmma_grouped_k.cu", "turns[turn] = group", "turns[group] = 0"),
        ("wgmma_grouped_k.cu", "end = max(end, turns[i])", "end = turns[i]"),
        ("wgmma_grouped_k.cu", "(p.product.k / Tiles::BK + 2) * Tiles::BK;", "0;"),
    ],
)
def test_a_kernel_that_is_wrong_is_told(file, old, new):
    a, b = operands(72, 64, 208)
    ends = [70, 60, 131, 150]
    b[131:133], a[:, 133:150] = np.inf, np.nan
    want = expected(a, b, ends)
    for texts, right in (({}, True), (edited(file, old, new), False)):
        result, findings = launched(a, b, ends, texts=texts, seed=3)
        assert (findings == [] and np.array_equal(result, want, equal_nan=True)) is right


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("change", "words"),
    [({"k_groups": 257}, "the ends of 256"), ({"epilogue": "bias"}, "no bias"), ({"scales": "outer"}, "no bias")],
)
def test_refusals(change, words):
    assert words in RUNG.refusal(Problem(64, 64, 64, "e4m3", "f32", device="h200", k_groups=2)._replace(**change))
    with pytest.raises(RefusedError, match="2 to 8 stages"):
        RUNG.geometry(
            Problem(64, 64, 64, "f16", "f32", device="h200", k_groups=2), {**RUNG.default, "bn": 64, "stages": 9}
        )
