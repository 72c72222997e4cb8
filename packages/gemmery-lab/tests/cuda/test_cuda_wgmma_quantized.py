"""Any rows times weights of few bits by wgmma: values on the emulator, variants, refusals, the arrangement of weights."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from emulated_card import installed
from gemmery.cuda import weights
from gemmery.cuda.launch import Ready
from gemmery.cuda.weights import Format
from gemmery.errors import ArgumentError, RefusedError, ShapeError
from gemmery.ladder import quantized
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery.ladder.wgmma import aligned_sums
from gemmery.problem import Problem
from gemmery_lab.emulated_product import EmulationOptions, Gemm, launch_of, run_rung

RUNG = find(CUDA, "wgmma_quantized")
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11}
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GUARD = 5  # elements around each row of C
SMALL = {"tokens": 8, "warpgroups": 4, "blocks": 1, "ways": 2, "stages": 4, "resident": 1, "runs": 0}


def logical(form, seed=0):
    """Codes, factors and zero points of every value; and the weight they stand for, in float64, each rounded once."""
    rng, (n, k) = np.random.default_rng(seed), (form.n, form.k)
    codes = rng.integers(0, 256 if weights.KINDS[form.kind] == 8 else 16, (n, k)).astype(np.uint8)
    scales = zeros = rows = None
    if form.kind == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        levels = codes.view(ml_dtypes.float8_e4m3fn).astype(float)
    elif form.kind == "e2m1":
        levels = FLOAT4[codes & 7] * np.where(codes & 8, -1, 1)
    else:
        levels = codes.view(np.int8).astype(float) if form.kind == "int8" else codes.astype(float)
    if form.group:
        scales = np.exp2(rng.uniform(-6, 2, (n, k // form.group))).astype(TYPES[form.dtype])
        spread = np.repeat(scales.astype(float), form.group, 1)
        if form.kind == "int4_zeros":
            zeros = rng.integers(0, 17, scales.shape).astype(np.uint8)
            levels -= np.repeat(zeros, form.group, 1)
        elif form.kind == "int4":
            levels -= 8
        exact = (levels * spread).astype(TYPES[form.dtype]).astype(float)
        scales = scales.view(np.uint16)
    else:
        rows = np.exp2(rng.uniform(-6, 2, n)).astype(np.float32)
        exact = levels * rows[:, None]
    return codes, scales, zeros, rows, exact


def emulated(form, m, *, config=None, epilogue="", seed=0, order=None, texts=None):
    """The product by the rung, its exact value and size, the faults of the run, and the bits of C with its guards."""
    *parts, w = logical(form, seed)
    rng = np.random.default_rng(seed + 1)
    x = rng.standard_normal((m, form.k)).astype(TYPES[form.dtype])
    bias = np.linspace(-3, 3, form.n, dtype=np.float32) if "bias" in epilogue else None
    around = np.full((m + 2, form.n + 2 * GUARD), 0x7FFF, np.uint16)
    c = around[1:-1, GUARD:-GUARD][None]
    problem = Problem(
        *(m, form.n, form.k, form.dtype, form.dtype), b_layout="col", device="h200", epilogue=epilogue,
        bits=weights.KINDS[form.kind], group=form.group, levels=form.kind,
    )
    arranged = weights.arrange(form, *parts)
    counters = np.zeros(max(4, launch_of(RUNG, problem, config or {}).counters) // 4, np.int32)
    gemm = Gemm(x.view(np.uint16)[None], arranged[None, None], c, bias, offsets=counters)
    runs = run_rung(RUNG, problem, config or {}, gemm, EmulationOptions(seed=order, texts=texts))
    exact, size = x.astype(float) @ w.T, np.abs(x.astype(float)) @ np.abs(w).T
    if bias is not None:
        exact, size = exact + bias, size + np.abs(bias)
    if "relu" in epilogue:
        exact = np.maximum(exact, 0)
    assert not counters.any()
    inside = c[0].copy()
    around[1:-1, GUARD:-GUARD] = 0x7FFF
    assert np.all(around == 0x7FFF)
    return inside.view(TYPES[form.dtype]).astype(float), exact, size, [str(f) for run in runs for f in run.findings]


def check(form, m, **options):
    """The result is within the bound, and nothing was found."""
    result, exact, size, findings = emulated(form, m, **options)
    assert findings == []
    rounding = ROUNDOFF[form.dtype] * np.abs(exact)
    assert np.all(np.abs(result - exact) <= aligned_sums(form.k) * 2.0**-24 * size * 1.01 + rounding)
    return result


@pytest.mark.parametrize(
    ("m", "form", "config"),
    [
        (3, Format(131, 384, "int4", 128, "bf16"), {}),
        (17, Format(96, 520, "int8", 0, "f16"), {}),
        (9, Format(70, 192, "int4_zeros", 64, "bf16"), {}),
        (5, Format(64, 96, "int4_zeros", 32, "f16"), {}),
        (1, Format(257, 256, "e4m3", 0, "bf16"), {}),
        (2, Format(65, 200, "e4m3", 0, "f16"), {}),
        (8, Format(64, 160, "e2m1", 32, "bf16"), {}),
        (8, Format(63, 144, "e2m1", 16, "f16"), {}),
        (4, Format(64, 512, "int4", 256, "f16"), {}),
        (4, Format(64, 256, "int8", 128, "bf16"), {}),
        (33, Format(128, 768, "int4", 32, "bf16"), {"tokens": 16, "warpgroups": 4, "ways": 2, "stages": 4, "splits": 2}),
        (70, Format(300, 640, "int4", 128, "bf16"), {"tokens": 64, "warpgroups": 4, "ways": 1, "runs": 7, "stages": 5}),
        (130, Format(140, 384, "int4", 64, "f16"), {"tokens": 128, "warpgroups": 2, "blocks": 2, "ways": 1, "stages": 3}),
    ],
)
def test_values_are_within_the_bound_between_guards(m, form, config):
    check(form, m, config=config, epilogue="bias+relu" if form.n % 2 else "")


@pytest.mark.parametrize("splits", [1, 2])
def test_the_launch_that_is_prepared(splits, monkeypatch):
    """Through the driver's arguments, twice by the same counters."""
    card = installed(monkeypatch)
    form = Format(70, 1024, "int4", 128, "bf16")
    *parts, w = logical(form)
    x = np.random.default_rng(5).integers(-2, 3, (3, form.k))
    a, b, c = card.put(x, "bf16"), card.put(weights.arrange(form, *parts), "uint8"), card.empty((3, form.n), "bf16")
    monkeypatch.setattr(quantized, "chosen", lambda *_: SMALL | {"splits": splits})
    views = (z.memory._replace(pointer=z.memory.pointer & 15, owner=None) for z in (a, c))
    run = weights.prepare(next(views), form, next(views))
    assert isinstance(run, Ready)
    counters, scratch = card.put(np.zeros(64), "uint8"), card.empty((max(1, run.workspace),), "uint8")
    exact = x @ w.T
    for _ in range(2):
        extra = (0, 0, counters.memory.pointer) if run.counters else ()
        run(a.memory.pointer, b.memory.pointer, c.memory.pointer, 0, 0, scratch.memory.pointer, None, extra)
        assert np.all(np.abs(c.numbers - exact) <= 2.0**-8 * np.abs(exact) + 2.0**-14 * (np.abs(x) @ np.abs(w).T))
    assert card.launched == ["wgmma_quantized"] * 2
    assert (run.counters > 0) == (splits == 2)
    assert card.findings == []
