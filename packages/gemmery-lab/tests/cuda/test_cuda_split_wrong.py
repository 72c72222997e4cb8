"""Wrong versions of the kernels of float32 in parts: products show each of them; no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.ladder import float32_pre_pass
from mutant import edited
from split_products import RUNGS, multiplied, operands, same
from split_rules import expected

pytestmark = pytest.mark.sampled(7)

pytest.importorskip("cuda.bindings")

PARTS, TWO, THREE, PAIRED = "split_parts.cu", "split_fp16x3.cu", "split_bf16x6.cu", "split_paired.cu"
COMMON = "parts.cuh"


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        ("split_fp16x3", TWO, "begins ? high[i] : this->sums[0][i] + high[i]", "high[i]"),  # the last part only
        ("split_fp16x3", TWO, "(high, 0, 0, 0, false)", "(high, 0, 0, 0, !begins)"),  # sums kept in the core
        ("split_fp16x3", TWO, "(corrections, 0, 1, 0, !begins)", "(corrections, 1, 1, 0, !begins)"),
        ("split_fp16x3", TWO, "0x1p-11f", "0x1p-12f"),
        ("split_fp16x3", COMMON, "exponent_of(largest[min(column,", "exponent_of(largest[min(column + 1,"),
        ("split_bf16x6", THREE, "(part, 0, 2, unit", "(part, 2, 2, unit"),
        ("split_bf16x6", THREE, "(part, 0, 0, unit * COUNT, true)", "(part, 0, 0, unit * COUNT, false)"),
        ("split_bf16x6", PARTS, "(s - s / 2)", "(s / 2)"),
        ("split_bf16x6", PARTS, "side + s] = most[s]", "side + s] = most[0]"),
        (
            "split_fp16x3",
            COMMON,
            "e >= -126 && e <= 127 ?",
            "e < 10000 ?",
        ),  # results that are too small for a power of two
        ("split_paired", PAIRED, "low[i] = __fadd_rn(low[i], error);", "low[i] = error;"),
        ("split_paired", PAIRED, "double(sums[i]) + double(low[i])", "double(sums[i])"),
    ],
)
def test_a_wrong_kernel_shows(name, file, old, new):
    texts = edited(file, old, new)
    a, b = operands(24, 40, 136)
    a, b = np.abs(a), np.abs(b)
    a[4], b[:, ::3] = np.ldexp(a[4], -140), 8 * b[:, ::3]
    c = multiplied(RUNGS[name], a, b, texts=texts)
    assert not same(c, expected(name, a, b))


@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "b < BLOCKS; ++b) {\n#pragma unroll\n      for (int s = 0; s < 4; ++s) most",
            "b < 1; ++b) {\n#pragma unroll\n      for (int s = 0; s < 4; ++s) most",
        ),
        ("ptx::mapa(there, to)", "ptx::mapa(there, rank)"),
    ],
)
def test_a_wrong_exchange_shows(old, new, monkeypatch):
    """Where a block does not know the largest elements of the others."""
    monkeypatch.setattr(float32_pre_pass, "SLABS", (float32_pre_pass.Slab(10_000, 2, 4, 2),))
    a, b = operands(24, 40, 600)
    b *= np.ldexp(1, np.random.default_rng(1).integers(0, 12, b.shape)).astype(np.float32)
    texts = edited(PARTS, old, new)
    try:
        c = multiplied(RUNGS["split_bf16x6"], a, b, texts=texts)
    except AssertionError:  # memory that nothing has written
        return
    assert not same(c, expected("split_bf16x6", a, b))


@pytest.mark.many
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("most[s] = max(most[s], __shfl_xor_sync(~0u, most[s], 16));", ""),
        ("w < SPLIT_THREADS / 32; ++w", "w < 7; ++w"),
        ("int index = ASKED_FOR ? int(blockIdx.x / 2)", "int index = true ? int(blockIdx.x / 2)"),
        ("*>(work.measured + strip) < unsigned(deep)", "*>(work.measured + strip) < 0u"),  # a block does not wait
        ("turned[place(within + e, four)]", "turned[place(within + e, four ^ 4)]"),
        ("threadIdx.x % 16)] = v[i];\n    __syncthreads();", "threadIdx.x % 16)] = v[i];"),
        ("    __threadfence();\n    __syncwarp();", "    __syncwarp();"),
    ],
)
def test_wrong_strips_show(old, new, monkeypatch):
    monkeypatch.setattr(float32_pre_pass, "_SLABS_TO", 0)
    a, b = operands(24, 40, 272)
    if "ASKED_FOR" in old:
        a[3, 5] = 1e-30  # three parts are taken
    b[15] *= 2.0**14  # the last warp has it
    texts = edited("split_strips.cu", old, new)
    try:
        c = multiplied(RUNGS["split_fp16x3"], a, b, texts=texts)
    except AssertionError:  # memory that nothing has written
        return
    assert not same(c, expected("split_fp16x3", a, b))
