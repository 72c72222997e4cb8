"""Products of float32 on tensor cores in parts, multiplied by a rung on the emulator."""

from __future__ import annotations

import numpy as np

from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_lab.emulated_product import EmulationOptions, Gemm, problem_of, run_rung
from layouts import laid

NAMES = ("split_fp16x3", "split_bf16x6", "split_paired")
RUNGS = {name: find(CUDA, name) for name in NAMES}


def operands(m, n, k, seed=0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal((m, k)).astype(np.float32), draw.standard_normal((k, n)).astype(np.float32)


def multiplied(rung, a, b, layouts=("row", "row", "row"), config=None, texts=None, **options):
    """A B by a rung on the emulator, whose tensor cores round as an H200's do."""
    a, b = (x if x.ndim == 3 else x[None] for x in (a, b))
    batch = max(a.shape[0], b.shape[0])
    images = []
    for x, layout in zip((a, b), layouts, strict=False):
        shared = x.shape[0] < batch
        images.append(laid(np.broadcast_to(x, (batch, *x.shape[1:])), layout, shared)[1])
    c = laid(np.full((batch, a.shape[1], b.shape[2]), np.nan, np.float32), layouts[2])[1]
    gemm = Gemm(*images, c, **{key: options.pop(key) for key in ("bias", "alpha", "beta") if key in options})
    case = problem_of(gemm, "f32", "f32", "h200", **options)
    runs = run_rung(rung, case, config or {"blocks": 3}, gemm, EmulationOptions(texts=texts))
    assert [str(each) for run in runs for each in run.findings] == []
    return c[0] if batch == 1 else c


def same(c, wanted):
    """The same bits, where a NaN is as good as another."""
    return np.array_equal(c, wanted, equal_nan=True)
