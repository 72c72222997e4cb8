"""Kernels of karpathy/llm.c."""

# ruff: noqa: D103, E501  (a row of the table is a line; references are named after what they compute)

from __future__ import annotations

import math
from typing import Any

import numpy as np

from public_cases import Array, Case, bfloats, floats, from_bits, ints, of, out, zeros
from public_cases.leetgpu import softmax

ROOT = "karpathy/llm.c/dev/cuda/"
LOW = {"rounds": "bf16"}
BATCH, TOKENS, WIDTH, HEADS = 2, 32, 64, 4


def llm(name: str, kernel: str, grid: Any, block: Any, args: tuple[Any, ...], reference: Any, **more: Any) -> Case:
    """A case in ROOT."""
    return Case(f"{ROOT}{name}.cu", kernel, grid, block, args, reference, **more)


def gelu(x: Array) -> Array:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def gelu_slope(x: Array) -> Array:
    t = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x / 2 * (1 - t**2) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def normal(x: Array, w: Array, b: Array) -> dict[int, Array]:
    """Layer norm: the result, the mean, and one over the standard deviation."""
    mean, scale = x.mean(1), 1 / np.sqrt(x.var(1) + 1e-5)
    return {0: (x - mean[:, None]) * scale[:, None] * w + b, 1: mean, 2: scale}


def stepped(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    n: int,
    rate: float,
    b1: float,
    b2: float,
    c1: float,
    c2: float,
    e: float,
    decay: float,
) -> dict[int, Array]:
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return {0: p - rate * (m / c1 / (np.sqrt(v / c2) + e) + decay * p), 2: m, 3: v}


def heads(x: Array) -> Array:
    """(batch, tokens, 3, heads, width) as 3 arrays (batch, heads, tokens, width)."""
    return x.transpose(2, 0, 3, 1, 4)


def causal(x: Array) -> Array:
    return np.where(np.tril(np.ones(x.shape[-2:], bool)), x, -np.inf)


def residual(first: Array, second: Array, w: Array, b: Array) -> dict[int, Array]:
    x = from_bits(first) + from_bits(second)
    parts = normal(x, from_bits(w), from_bits(b))
    return {0: x, 1: parts[0], 2: parts[1], 3: parts[2]}


def classified(logits: Array, losses: Array, targets: Array, v: int) -> dict[int, Array]:
    p = softmax(logits[:, :v])
    hit = np.arange(v) == targets[:, None]
    wide = np.full(logits.shape, np.nan)
    wide[:, :v] = (p - hit) * losses[:, None]
    return {0: wide, 1: -np.log(p[hit])}


QKV = floats(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS)
SPLIT = (BATCH, HEADS, TOKENS, WIDTH // HEADS)
MOMENTS = (floats(1000), floats(1000), floats(1000), floats(1000, low=0))
ADAM = (1000, 1e-3, 0.9, 0.999, 0.1, 0.001, 1e-8, 0.01)
NORM = (out(20, 128), out(20), out(20), floats(20, 128), floats(128), floats(128), 20, 128)
LOW_NORM = (
    out(20, 256, dtype="u2"),
    out(20, 256, dtype="u2"),
    out(20, dtype="u2"),
    out(20, dtype="u2"),
    bfloats(20, 256),
    bfloats(20, 256),
    bfloats(256),
    bfloats(256),
    20,
    256,
)
ROWS = (out(20, 200), floats(20, 200, low=-5, high=5), 20, 200)
TABLES = (ints(2, 32, high=50), bfloats(50, 64), bfloats(32, 64), 2, 32, 64)
# fmt: off
CASES = (
    llm("adamw", "adamw_kernel1", 4, 256, (*MOMENTS, *ADAM), stepped, terms=8),
    llm("adamw", "adamw_kernel2", 4, 256, (*MOMENTS, *ADAM), stepped, terms=8),
    llm("encoder_forward", "encoder_forward_kernel3", 2, 256, (out(2, 32, 64, dtype="u2"), *TABLES), lambda y, i, t, p, *s: {0: from_bits(t)[i] + from_bits(p)}, **LOW),
    llm("encoder_backward", "encoder_backward_kernel1", 16, 256, (zeros(50, 64), zeros(32, 64), floats(2, 32, 64), ints(2, 32, high=50), 2, 32, 64), lambda w, p, d, i, *s: {0: np.stack([d[i == t].sum(0) for t in range(50)]), 1: d.sum(0)}, terms=8),
    llm("gelu_forward", "gelu_forward_kernel2", 1, 128, (out(1000, dtype="u2"), bfloats(1000), 1000), lambda y, x, n: {0: gelu(from_bits(x))}, **LOW),
    llm("gelu_backward", "gelu_backward1", 8, 128, (out(1000, dtype="u2"), bfloats(1000), bfloats(1000), 1000), lambda y, x, d, n: {0: gelu_slope(from_bits(x)) * from_bits(d)}, **LOW),
    llm("residual_forward", "residual_forward_kernel2", 1, 128, (out(1000, dtype="u2"), bfloats(1000), bfloats(1000), 1000), lambda y, a, b, n: {0: from_bits(a) + from_bits(b)}, **LOW),
    llm("crossentropy_forward", "crossentropy_forward_kernel1", 1, 64, (out(60), floats(60, 20, low=0.1), ints(60, high=20), 2, 30, 20), lambda y, p, t, *s: {0: -np.log(p[np.arange(60), t])}, terms=8),
    llm("crossentropy_softmax_backward", "crossentropy_softmax_backward_kernel1", 5, 256, (zeros(60, 20), floats(60), floats(60, 20), ints(60, high=20), 2, 30, 20), lambda y, d, p, t, *s: {0: (p - (np.arange(20) == t[:, None])) * d[:, None]}),
    llm("classifier_fused", "fused_classifier_kernel3", 20, 128, (out(20, 256), out(20), None, floats(20, 256, low=-5, high=5), floats(20), ints(20, high=250), 4, 5, 250, 256), lambda dl, y, p, x, d, t, b, n, v, w: classified(x, d, t, v), terms=32),
    llm("layernorm_forward", "layernorm_forward_kernel1", 1, 32, NORM, lambda y, m, r, x, w, b, *s: normal(x, w, b), terms=128),
    llm("layernorm_forward", "layernorm_forward_kernel3", 5, 128, NORM, lambda y, m, r, x, w, b, *s: normal(x, w, b), terms=16),
    llm("layernorm_forward", "layernorm_forward_kernel5", 20, 128, NORM, lambda y, m, r, x, w, b, *s: normal(x, w, b), terms=32),
    llm("fused_residual_forward", "fused_residual_forward_kernel4", 5, (32, 4), LOW_NORM, lambda x, y, m, r, a, b, w, c, *s: residual(a, b, w, c), **LOW),
    llm("softmax_forward", "softmax_forward_kernel1", 1, 32, ROWS, lambda y, x, *s: {0: softmax(x)}, terms=200),
    llm("softmax_forward", "softmax_forward_kernel4", 20, 128, ROWS, lambda y, x, *s: {0: softmax(x)}, terms=16, options={"shared": 16}, fault="Warp 0 writes its sum to the first word while others may still read the maximum there."),
    llm("softmax_forward", "softmax_forward_online_kernel2", 5, 128, ROWS, lambda y, x, *s: {0: softmax(x)}, terms=32),
    llm("attention_forward", "attention_query_key_kernel1", 32, 256, (out(BATCH, HEADS, TOKENS, TOKENS), QKV, BATCH, TOKENS, WIDTH, HEADS), lambda y, x, b, t, c, h: {0: causal(heads(x)[0] @ heads(x)[1].swapaxes(2, 3) / math.sqrt(c // h))}, terms=16),
    llm("attention_forward", "softmax_forward_kernel5", 64, 128, (zeros(8, 32, 32), 0.25, floats(8, 32, 32), 8, 32), lambda y, f, x, *s: {0: softmax(causal(f * x))}, terms=32),
    llm("attention_forward", "permute_kernel", 16, 256, (out(*SPLIT), out(*SPLIT), out(*SPLIT), QKV, BATCH, TOKENS, HEADS, WIDTH // HEADS), lambda q, k, v, x, *s: dict(enumerate(heads(x)))),
    llm("attention_forward", "attention_forward_kernel2", (BATCH, HEADS), 32, (floats(2, 4, 64, 16), floats(2, 4, 64, 16), floats(2, 4, 64, 16), 64, 16, 2, 2, 32, 32, 0.25, zeros(2, 4, 64), of(lambda r: np.full((2, 4, 64), -1e4, "f4")), zeros(2, 4, 64, 16)), lambda q, k, v, *s: {12: softmax(causal(q @ k.swapaxes(2, 3) / 4)) @ v}, terms=64, options={"shared": 10240}, scratch=(10, 11)),
    llm("global_norm", "norm_kernel2<float>", 2, 128, (zeros(1), floats(1000), np.uint64(1000)), lambda y, x, n: {0: (x * x).sum()}, terms=20),
    llm("matmul_backward_bias", "matmul_backward_bias_kernel4", 2, 128, (bfloats(64), bfloats(60, 64), 2, 30, 64), lambda y, x, *s: {0: from_bits(y) + from_bits(x).sum(0)}, options={"shared": 512}, **LOW),
    llm("matmul_forward", "matmul_forward_kernel4", (1, 1), (16, 16), (out(128, 128), floats(128, 64), floats(128, 64), floats(128), 64, 128), lambda y, x, w, b, *s: {0: x @ w.T + b}, terms=64),
    llm("permute", "permute_kernel", 2, 256, (floats(4, 5, 6, 3), out(3, 6, 4, 5), 4, 5, 6, 3), lambda x, y, *s: {1: x.transpose(3, 2, 0, 1)}),
)
