"""Kernels that Triton compiles for sm_100, which needs no device: values against NumPy, and no findings."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery_emulator.hopper.tensormap import tensor_map
from gemmery_emulator.kernels.kernel import emulate

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language")
compiler = pytest.importorskip("triton.compiler")
targets = pytest.importorskip("triton.backends.compiler")
SEEDS = (None, 1)


@triton.jit
def product(a, b, c, n, k, rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr):
    i, j = tl.program_id(0) * rows + tl.arange(0, rows), tl.program_id(1) * columns + tl.arange(0, columns)
    step = tl.arange(0, depth)
    sums = tl.zeros((rows, columns), tl.float32)
    for start in range(0, k, depth):
        x = tl.load(a + i[:, None] * k + (start + step)[None, :])
        y = tl.load(b + (start + step)[:, None] * n + j[None, :])
        sums = tl.dot(x, y, sums)
    tl.store(c + i[:, None] * n + j[None, :], sums)


@triton.jit
def attention(q, k, v, out, length, scale, rows: tl.constexpr, columns: tl.constexpr, width: tl.constexpr,
              specialize: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * rows
    queries = q.load([first, 0])
    largest, total = tl.full((rows,), -1e30, tl.float32), tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, width), tl.float32)
    for start in tl.range(0, length, columns, warp_specialize=specialize):
        scores = tl.dot(queries, k.load([start, 0]).T) * scale
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(tl.float16), v.load([start, 0]), sums * shrink[:, None])
        largest = larger
    places = (first + tl.arange(0, rows))[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(out + places, sums / total[:, None])


def compiled(function, signature, **constants):
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] in "*i"}
    source = compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(
        source, target=targets.GPUTarget("cuda", 100, 32), options={"num_warps": 4, "enable_fp_fusion": True}
    )


def run(kernel, grid, args, threads, seed):
    shared = kernel.metadata.shared
    return emulate(kernel.asm["ptx"], "", grid, threads, [*args, None, None], shared, "sm_100a", seed=seed)


def described(x, rows):
    """The values that stand for a tensor descriptor in Triton's PTX."""
    shape, stride = map(np.int32, x.shape), np.int64(x.shape[1])
    return [tensor_map(x, (rows, x.shape[1]), swizzle=128), *shape, stride, np.int64(1)]


@pytest.mark.many(2)
@pytest.mark.parametrize("rows", [64, 128])
def test_a_product(rows):
    signature = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "n": "i32", "k": "i32"}
    kernel = compiled(product, signature, rows=rows, columns=64, depth=64)
    a, b = (np.random.default_rng(rows).standard_normal((2, 128, 128))).astype(np.float16)
    for seed in SEEDS:
        c = np.zeros((128, 128), np.float32)
        assert run(kernel, (128 // rows, 2), [a, b, c, 128, 128], 128, seed).findings == ()
        exact, sizes = a.astype("f8") @ b.astype("f8"), abs(a).astype("f8") @ abs(b).astype("f8")
        assert (abs(c - exact) <= 2.0**-18 * sizes).all()


@pytest.mark.many(2)
@pytest.mark.parametrize(("specialize", "threads"), [(True, 384), (False, 128)])
def test_attention_with_tensor_descriptors(specialize, threads):
    tensors = dict(zip("qkv", (f"tensordesc<fp16[{rows},64]>" for rows in (128, 64, 64)), strict=True))
    signature = {**tensors, "out": "*fp32", "length": "i32", "scale": "fp32"}
    kernel = compiled(attention, signature, rows=128, columns=64, width=64, specialize=specialize)
    assert f".reqntid {threads}" in kernel.asm["ptx"]
    q, k, v = np.random.default_rng(0).standard_normal((3, 256, 64)).astype(np.float16)
    scores = q.astype("f8") @ k.astype("f8").T * 0.125
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    exact = weights @ v.astype("f8") / weights.sum(axis=1, keepdims=True)
    for seed in SEEDS:
        out = np.zeros((256, 64), np.float32)
        args = [*described(q, 128), *described(k, 64), *described(v, 64), out, 256, np.float32(0.125)]
        assert run(kernel, 2, args, threads, seed).findings == ()
        assert (abs(out - exact) <= 2.0**-10 * abs(v).max()).all()  # the weights are rounded to f16
