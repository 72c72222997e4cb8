"""Codes of 8 bits by weights of 4 as the same type: values on the emulator, every level, wrong kernels, refusals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gemmery.cuda import weights
from gemmery.cuda.weights import Format
from gemmery.errors import ArgumentError
from gemmery.ladder.cuda import BY_WEIGHTS
from gemmery.ladder.rung import find
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, run_rung
from mutant import edited

pytestmark = pytest.mark.sampled(7)

RUNG = find(BY_WEIGHTS, "wgmma_codes")
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "int8": np.int8}
OUTS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}
GUARD = 8  # elements around each row of C


def multiplied(dtype, m, n, k, *, out="bf16", group=128, epilogue="", config=None, factors=True, **options):
    """The result, the exact one, the largest sum of magnitudes of each element, and the findings."""
    rng = np.random.default_rng(m + n + k)
    form = Format(n, k, "int4", group, dtype)
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = np.exp2(rng.uniform(-6, 0, (n, k // group))).astype(np.float32)
    w = (codes.astype(float) - 8) * np.repeat(scales.astype(float), group, 1)
    x = rng.integers(-128, 128, (m, k)).astype(np.int8) if dtype == "int8" else rng.normal(0, 30, (m, k))
    x = x.astype(TYPES[dtype])
    of_tokens = np.exp2(rng.uniform(-4, 4, (m, 1))).astype(np.float32) if factors else None
    bias = np.linspace(-3, 3, n, dtype=np.float32) if "bias" in epilogue else None
    bits = np.uint32 if out == "f32" else np.uint16
    around = np.full((m + 2, n + 2 * GUARD), 0x7FFF, bits)
    c = around[1:-1, GUARD:-GUARD][None]
    fields = {"bits": 4, "group": 128, "levels": "int4", "epilogue": epilogue, "scales": "outer" if factors else ""}
    case = Problem(m, n, k, dtype, out, b_layout="col", device="h200", **fields)
    gemm = Gemm(
        x.view(np.uint8)[None], weights.arrange_levels(form, codes, scales)[None, None], c, bias, a_scale=of_tokens
    )
    runs = run_rung(RUNG, case, config or {}, gemm, EmulationOptions(**options))
    values = x.astype(float) * (of_tokens if factors else 1)
    exact, size = values @ w.T, np.abs(values) @ np.abs(w).T
    if bias is not None:
        exact, size = np.maximum(exact + bias, 0), size + np.abs(bias)
    inside = c[0].copy().view(OUTS[out]).astype(float)
    c[...] = 0x7FFF
    assert np.all(around == 0x7FFF)
    return inside, exact, size, [str(each) for run in runs for each in run.findings]


def is_right(dtype, m, n, k, **options):
    result, exact, size, findings = multiplied(dtype, m, n, k, **options)
    u = ROUNDOFF[options.get("out", "bf16")]
    bound = RUNG.bound_of(dtype)(k) * 2.0**-24 * size * 1.01 + u * np.abs(exact)
    return findings == [] and bool(np.all(np.abs(result - exact) <= bound))


@pytest.mark.many(3)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("m", "n", "k", "options"),
    [
        (3, 131, 256, {"epilogue": "bias+relu"}),
        (200, 136, 512, {"out": "f16", "config": {"blocks": 1, "stages": 3}, "factors": False}),
        (129, 300, 128, {"config": {"blocks": 7, "band": 1}, "factors": False}),
        (128, 64, 1024, {"group": 256}),
        (130, 132, 256, {"out": "f32", "epilogue": "bias+relu", "config": {"blocks": 2}}),
        (9, 67, 128, {"out": "f32"}),
    ],
)
def test_values_are_within_the_bound_between_guards(dtype, m, n, k, options):
    assert is_right(dtype, m, n, k, **options)


def test_the_same_bits_in_every_order():
    results = [multiplied("e4m3", 40, 140, 384, seed=seed)[0] for seed in (None, 1)]
    assert np.array_equal(*results)


@pytest.mark.many(3)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_level_is_exact(dtype):
    form = Format(16, 128, "int4", 128, dtype)
    codes = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 128, 1)
    x, c = np.eye(1, 128, 5).astype(TYPES[dtype]), np.zeros((1, 1, 16), np.uint16)
    arranged = weights.arrange_levels(form, codes, np.ones((16, 1), np.float32))
    case = Problem(1, 16, 128, dtype, "bf16", b_layout="col", device="h200", bits=4, group=128, levels="int4")
    run_rung(RUNG, case, {}, Gemm(x.view(np.uint8)[None], arranged[None, None], c))
    assert np.array_equal(c[0, 0].view(ml_dtypes.bfloat16).astype(float), np.arange(16.0) - 8)


@pytest.mark.parametrize(
    ("dtype", "old", "new"),
    [
        ("e4m3", "sign * 129 + size", "sign * 128 + size"),
        ("int8", "(half ? word : word << 4)", "(half ? word : word)"),
        ("int8", "12582912.0f", "12582913.0f"),
        ("e4m3", "of_rows[i / 2 % 2]", "of_rows[0]"),
        ("e4m3", "(first + within % height)", "within % height"),
        ("e4m3", "      if (lane == 0) ptx::mbarrier_arrive(empty + 8 * before);\n", ""),
        ("e4m3", "      ptx::wgmma_wait_group<0>();\n", ""),
    ],
)
def test_a_kernel_that_is_wrong_is_told(dtype, old, new):
    options = {"config": {"blocks": 1, "band": 1, "stages": 3}, "seed": 2}
    assert is_right(dtype, 140, 72, 256, **options)
    assert not is_right(dtype, 140, 72, 256, texts=edited("wgmma_codes.cu", old, new), **options)


def test_refusals():
    case = Problem(8, 64, 256, "e4m3", "bf16", b_layout="col", device="h200", bits=4, group=128, levels="int4")
    assert RUNG.refusal(case) == ""
    for change, words in (
        ({"out": "f64"}, "not f64"),
        ({"levels": "int8"}, "arrange_levels"),
        ({"k": 272}, "k is a multiple of 128"),
        ({"group": 64}, "in groups of 128"),
        ({"scaled": True}, "without alpha"),
    ):
        assert words in RUNG.refusal(case._replace(**change))
    with pytest.raises(ArgumentError, match="see `arrange`"):
        weights.arrange_levels(Format(8, 128, "int4", 128, "bf16"), np.zeros((8, 128), np.uint8), np.ones((8, 1), "f4"))
