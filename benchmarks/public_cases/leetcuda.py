"""Kernels of xlite-dev/LeetCUDA and siboehm/SGEMM_CUDA."""

# ruff: noqa: D103, E501  (a row of the table is a line; references are named after what they compute)

from __future__ import annotations

import math
from typing import Any

import numpy as np

from public_cases import Array, Case, bfloats, floats, from_bits, halves, ints, of, out, zeros
from public_cases.leetgpu import attention, sigmoid, softmax

ROOT = "xlite-dev/LeetCUDA/kernels/"
N = 2000


def cuda(path: str, kernel: str, grid: Any, block: Any, args: tuple[Any, ...], reference: Any, **more: Any) -> Case:
    """A case in ROOT."""
    return Case(f"{ROOT}{path}.cu", kernel, grid, block, args, reference, **more)


def mapped(name: str, kernel: str, width: int, meaning: Any, low: float = -4, high: float = 4, **more: Any) -> Case:
    """An elementwise kernel of x, y, n whose threads take `width` elements each."""
    half = "f16" in kernel
    args = floats(N, low=low, high=high, dtype="f2" if half else "f4"), out(N, dtype="f2" if half else "f4"), N
    more = {"rounds": "f2" if half else "f4"} | more
    return cuda(f"{name}/{name}", kernel, 8, 256 // width, args, lambda x, y, n: {1: meaning(x)}, **more)


def gelu(x: Array) -> Array:
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def hard_swish(x: Array) -> Array:
    return x * np.clip(x + 3, 0, 6) / 6


def normal(x: Array, g: float, b: float) -> Array:
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * g + b


def rms(x: Array, g: float) -> Array:
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * g


def rotated(x: Array) -> Array:
    """Rotary embedding of pairs of neighbors: (tokens, width)."""
    angle = np.outer(np.arange(len(x)), 10000.0 ** (-np.arange(x.shape[1] // 2) / (x.shape[1] // 2)))
    z = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
    return np.stack([z.real, z.imag], 2).reshape(x.shape)


def e4m3(bits: Array) -> Array:
    sign, exponent, fraction = 1.0 - 2 * (bits >> 7), (bits >> 3 & 15).astype(int), bits & 7
    return sign * np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)


def product(
    path: str,
    kernel: str,
    tile: tuple[int, int],
    block: Any,
    shape: tuple[int, int, int],
    kind: str = "f4",
    **more: Any,
) -> Case:
    """C = A B, in tiles of rows and columns; `transposed` for a B whose columns are contiguous."""
    m, n, k = shape
    transposed = more.pop("transposed", False)
    grid = (-(-n // tile[1]), -(-m // tile[0]), *more.pop("deep", ()))
    b = (n, k) if transposed else (k, n)
    args = floats(m, k, dtype=kind), floats(*b, dtype=kind), out(m, n, dtype=kind), m, n, k
    more = {"rounds": kind, "terms": k} | more
    return cuda(path, kernel, grid, block, args, lambda a, b, c, *s: {2: a @ (b.T if transposed else b)}, **more)


def flash(path: str, name: str, tiles: str, rows: int, block: int, shared: int) -> Case:
    """Attention of 2 heads of 128 tokens of 64 numbers; `tiles` are the template's arguments after the first four."""
    parts = (halves(1, 2, 128, 64),) * 3
    return cuda(
        f"flash-attn/mma/{path}",
        f"flash_attn_mma_stages_{name}_kernel<64, 16, 8, 16, {tiles}>",
        (128 // rows, 2),
        block,
        (*parts, out(1, 2, 128, 64, dtype="f2"), 128, 2),
        lambda q, k, v, o, *sizes: {3: attention(q, k, v)},
        rounds="f2",
        terms=64,
        options={"shared": shared},
    )


def sgemm(file: str, kernel: str, grid: Any, block: Any, n: int = 128, **more: Any) -> Case:
    """C = alpha A B + beta C of siboehm/SGEMM_CUDA, with 128 rows and n columns."""
    args = 128, n, 64, 0.5, floats(128, 64), floats(64, n), -1.5, floats(128, n)
    path = f"siboehm/SGEMM_CUDA/src/{file}"
    return Case(
        path,
        kernel,
        grid,
        block,
        args,
        lambda m, n, k, alpha, a, b, beta, c: {7: alpha * (a @ b) + beta * c},
        terms=64,
        **more,
    )


def merged(out_: Any, lse: Any, p: Array, pl: Array, s: Array, sl: Array, *sizes: int) -> dict[int, Array]:
    both = np.logaddexp(pl, sl)
    a, b = (np.exp(each - both).T[:, :, None] for each in (pl, sl))
    return {0: a * p + b * s, 1: both}


def kept(boxes: Array, threshold: float) -> Array:
    keep = np.zeros(len(boxes), "i4")
    for i, (x1, y1, x2, y2) in enumerate(boxes):
        before = boxes[:i][keep[:i] == 1]
        w, h = (
            np.maximum(0, np.minimum(b, before[:, c]) - np.maximum(a, before[:, d]))
            for a, b, c, d in ((x1, x2, 2, 0), (y1, y2, 3, 1))
        )
        area = (before[:, 2] - before[:, 0]) * (before[:, 3] - before[:, 1])
        keep[i] = not (w * h / ((x2 - x1) * (y2 - y1) + area - w * h) > threshold).any()
    return keep


def boxes(count: int) -> Any:
    def fill(random: np.random.Generator) -> Array:
        corner = random.uniform(0, 6, (count, 2))
        return np.concatenate([corner, corner + random.uniform(1, 3, (count, 2))], 1).astype("f4")

    return of(fill)


BINDINGS = "16, 8, 16, 2, 4, 4, 4, 8, 8"
BEYOND = "The last threads read vectors beyond the end of an array before they compare their index with its length."
PARTIALS = "The first warp reads a partial result for each of its lanes, and there are only as many as warps."
# fmt: off
CASES = (
    cuda("elementwise/elementwise", "elementwise_add_f16x8_pack_kernel", 8, 32, (halves(N), halves(N), out(N, dtype="f2"), N), lambda a, b, c, n: {2: a + b}, rounds="f2", fault=BEYOND),
    mapped("relu", "relu_f16x8_pack_kernel", 8, lambda x: np.maximum(x, 0), fault=BEYOND),
    mapped("sigmoid", "sigmoid_f16x2_kernel", 2, sigmoid, fault=BEYOND),
    mapped("swish", "swish_f32x4_kernel", 4, lambda x: x * sigmoid(x)),
    mapped("gelu", "gelu_f32x4_kernel", 4, gelu),
    mapped("gelu", "gelu_f16_kernel", 1, gelu, low=-3, high=3),
    mapped("elu", "elu_f16x8_pack_kernel", 8, lambda x: np.where(x > 0, x, np.expm1(x)), fault=BEYOND),
    mapped("hardswish", "hardswish_f16x8_pack_kernel", 8, hard_swish, fault=BEYOND),
    mapped("hardshrink", "hardshrink_f16x2_kernel", 2, lambda x: np.where(np.abs(x) > 0.5, x, 0)),
    cuda("embedding/embedding", "embedding_f16x8_pack_kernel", 40, 16, (ints(40, high=50), halves(50, 128), out(40, 128, dtype="f2"), 40, 128), lambda i, w, y, *s: {2: w[i]}),
    cuda("histogram/histogram", "histogram_i32x4_kernel", 4, 64, (ints(1000, high=40), zeros(40, dtype="i4"), 1000), lambda a, y, n: {1: np.bincount(a, minlength=40)}),
    cuda("dot-product/dot_product", "dot_prod_f32x4_f32_kernel<64>", 4, 64, (floats(1000), floats(1000), zeros(1), 1000), lambda a, b, y, n: {2: a @ b}, terms=1000),
    cuda("dot-product/dot_product", "dot_prod_f16x8_pack_f32_kernel<32>", 4, 32, (halves(1024), halves(1024), zeros(1), 1024), lambda a, b, y, n: {2: a @ b}, rounds="f2", terms=20, floor=4),
    cuda("reduce/block_all_reduce", "block_all_reduce_sum_f32x4_f32_kernel<64>", 4, 64, (floats(1000), zeros(1), 1000), lambda a, y, n: {1: a.sum()}, terms=20, floor=4, fault=BEYOND),
    cuda("reduce/block_all_reduce", "block_all_reduce_sum_f16x8_pack_f16_kernel<32>", 4, 32, (halves(1024), zeros(1), 1024), lambda a, y, n: {1: a.sum()}, terms=16, rounds="f2", floor=16),
    cuda("reduce/block_all_reduce", "block_all_reduce_sum_bf16x8_pack_bf16_kernel<32>", 4, 32, (bfloats(1024), zeros(1), 1024), lambda a, y, n: {1: from_bits(a).sum()}, terms=16, rounds="bf16", floor=16),
    cuda("reduce/block_all_reduce", "block_all_reduce_sum_fp8_e4m3_f16_kernel<256>", 4, 256, (ints(1024, low=0x28, high=0x40, dtype="u1"), zeros(1), 1024), lambda a, y, n: {1: e4m3(a).sum()}, terms=16, rounds="f2"),
    cuda("reduce/block_all_reduce", "block_all_reduce_sum_i8x16_pack_i32_kernel<64>", 2, 64, (ints(2048, low=-128, high=128, dtype="i1"), zeros(1, dtype="i4"), 2048), lambda a, y, n: {1: a.astype("i4").sum()}),
    cuda("softmax/softmax", "safe_softmax_f32x4_per_token_kernel<64>", 20, 64, (floats(20, 256), out(20, 256), 5120), lambda x, y, n: {1: softmax(x)}, terms=16),
    cuda("softmax/softmax", "safe_softmax_f16x8_pack_f32_per_token_kernel<32>", 20, 32, (halves(20, 256), out(20, 256, dtype="f2"), 5120), lambda x, y, n: {1: softmax(x)}, rounds="f2"),
    cuda("softmax/softmax", "online_safe_softmax_f32_per_token_kernel<256>", 20, 256, (floats(20, 256), out(20, 256), 5120), lambda x, y, n: {1: softmax(x)}, terms=16, fault=PARTIALS),
    cuda("softmax/softmax", "online_safe_softmax_f32x4_pack_per_token_kernel<64>", 20, 64, (floats(20, 256), out(20, 256), 5120), lambda x, y, n: {1: softmax(x)}, terms=16, fault=PARTIALS),
    cuda("layer-norm/layer_norm", "layer_norm_f32x4_kernel<64>", 20, 64, (floats(20, 256), out(20, 256), 1.5, 0.25, 20, 256), lambda x, y, g, b, *s: {1: normal(x, g, b)}, terms=16),
    cuda("layer-norm/layer_norm", "layer_norm_f16x8_pack_f32_kernel<64>", 20, 64, (halves(20, 512), out(20, 512, dtype="f2"), 1.5, 0.25, 20, 512), lambda x, y, g, b, *s: {1: normal(x, g, b)}, rounds="f2"),
    cuda("rms-norm/rms_norm", "rms_norm_f32_kernel<256>", 20, 256, (floats(20, 256), out(20, 256), 1.5, 20, 256), lambda x, y, g, *s: {1: rms(x, g)}, terms=16),
    cuda("rms-norm/rms_norm", "rms_norm_f16x8_pack_f32_kernel<64>", 20, 64, (halves(20, 512), out(20, 512, dtype="f2"), 1.5, 20, 512), lambda x, y, g, *s: {1: rms(x, g)}, rounds="f2"),
    cuda("rope/rope", "rope_f32_kernel", 8, 256, (floats(32, 128), out(32, 128), 32, 64), lambda x, y, *s: {1: rotated(x)}, terms=64),
    cuda("rope/rope", "rope_f32x4_pack_kernel", 4, 256, (floats(32, 128), out(32, 128), 32, 32), lambda x, y, *s: {1: rotated(x)}, terms=64),
    cuda("mat-transpose/mat_transpose", "mat_transpose_f32x4_shared_bcf_merge_write_row2col2d_kernel", (8, 1), (16, 16), (floats(64, 128), out(128, 64), 64, 128), lambda x, y, *s: {1: x.T}),
    cuda("mat-transpose/mat_transpose", "mat_transpose_f32_diagonal2d_kernel", (4, 4), (16, 16), (floats(64, 64), out(64, 64), 64, 64), lambda x, y, *s: {1: x.T}),
    cuda("swizzle/mat_trans_swizzle", "mat_trans_smem_swizzle_kernel", (2, 3), (32, 32), (ints(96, 64), 96, 64, out(64, 96, dtype="i4")), lambda x, m, n, y: {3: x.T}),
    cuda("sgemv/sgemv", "sgemv_k128_f32x4_kernel", 10, (32, 4), (floats(40, 256), floats(256), out(40), 40, 256), lambda a, x, y, *s: {2: a @ x}, terms=16),
    cuda("sgemv/sgemv", "sgemv_k16_f32_kernel<2>", 5, (32, 4), (floats(40, 16), floats(16), out(40), 40, 16), lambda a, x, y, *s: {2: a @ x}),
    cuda("hgemv/hgemv", "hgemv_k128_f16x4_kernel", 10, (32, 4), (halves(40, 256), halves(256), out(40, dtype="f2"), 40, 256), lambda a, x, y, *s: {2: a @ x}, terms=16, rounds="f2"),
    cuda("nms/nms", "nms_kernel", 1, 256, (boxes(40), floats(40), zeros(40, dtype="i4"), 40, 0.3), lambda b, s, k, n, t: {2: kept(b, t)}, fault="Threads read keep[i] of earlier boxes without waiting for the threads that write it."),
    cuda("openai-triton/merge-attn-states/cuda_merge_attn_states", "merge_attn_states_kernel<float, 128>", 4, 128, (out(10, 3, 64), out(3, 10), floats(10, 3, 64), floats(3, 10, low=0, high=5), floats(10, 3, 64), floats(3, 10, low=0, high=5), 10, 3, 64), merged),
    product("sgemm/sgemm", "sgemm_naive_f32_kernel", (32, 32), (32, 32), (40, 70, 50)),
    product("sgemm/sgemm", "sgemm_sliced_k_f32_kernel<32, 32, 32>", (32, 32), (32, 32), (64, 96, 64)),
    product("sgemm/sgemm", "sgemm_t_8x8_sliced_k_f32x4_kernel<128, 128, 8, 8, 8>", (128, 128), (16, 16), (128, 256, 32)),
    product("sgemm/sgemm", "sgemm_t_8x8_sliced_k_f32x4_bcf_dbuf_kernel<128, 128, 8, 8, 8, 4>", (128, 128), (16, 16), (128, 256, 32)),
    product("sgemm/sgemm_async", "sgemm_t_8x4_sliced_k16_f32x4_bcf_dbuf_async_kernel<64, 64, 16, 8, 4>", (64, 64), (16, 8), (128, 64, 64)),
    product("sgemm/sgemm_wmma_tf32_stage", "sgemm_wmma_m16n16k8_mma4x2_warp2x4_stages_kernel<16, 16, 8, 4, 2, 2, 4, 0, 0, 2, false>", (128, 128), 256, (128, 128, 64), rounds="tf32", terms=8),
    product("hgemm/naive/hgemm", "hgemm_t_8x8_sliced_k_f16x8_pack_bcf_dbuf_kernel<128, 128, 8, 8, 8, 8>", (128, 128), (16, 16), (128, 128, 64), "f2"),
    product("hgemm/naive/hgemm_async", "hgemm_t_8x8_sliced_k16_f16x8_pack_dbuf_async_kernel<128, 128, 16, 8, 8, 8>", (128, 128), (16, 16), (128, 128, 64), "f2"),
    product("hgemm/wmma/hgemm_wmma", "hgemm_wmma_m16n16k16_mma4x2_warp2x4_kernel<16, 16, 16, 4, 2, 2, 4>", (128, 128), 256, (128, 128, 64), "f2"),
    product("hgemm/wmma/hgemm_wmma", "hgemm_wmma_m16n16k16_naive_kernel<16, 16, 16>", (16, 16), 32, (48, 32, 64), "f2"),
    product("hgemm/mma/basic/hgemm_mma", "hgemm_mma_m16n8k16_naive_kernel<16, 8, 16>", (16, 8), 32, (48, 40, 64), "f2"),
    product("hgemm/mma/basic/hgemm_mma", f"hgemm_mma_m16n8k16_mma2x4_warp4x4_kernel<{BINDINGS}>", (128, 128), 256, (128, 128, 64), "f2"),
    product("hgemm/mma/basic/hgemm_mma_stage", f"hgemm_mma_m16n8k16_mma2x4_warp4x4_stages_kernel<{BINDINGS}, 3, false>", (128, 128), 256, (128, 128, 96), "f2"),
    product("swizzle/hgemm_mma_swizzle", "hgemm_mma_m16n8k16_naive_smem_swizzle_kernel<16, 8, 16>", (16, 8), 32, (48, 40, 64), "f2"),
    flash("basic/flash_attn_mma_split_q", "split_q", "4, 1, 4, 1, 1, 8, 1, 8, 2, 8", 64, 128, 36864),
    flash("basic/flash_attn_mma_split_kv", "split_kv", "2, 4, 2, 4, 2, 2, 2, 2, 2, 8", 64, 256, 46080),
    flash("basic/flash_attn_mma_share_kv", "split_q_shared_kv", "8, 1, 8, 1, 1, 8, 1, 8, 1, 2, 8, 8, 8", 128, 256, 36864),
    flash("basic/flash_attn_mma_tiling_qk", "split_q_tiling_qk", "4, 1, 4, 1, 1, 8, 1, 8, 1, 2, 8, 8, 8", 64, 128, 12288),
    flash("basic/flash_attn_mma_tiling_qkv_F32F16F16F32", "split_q_tiling_qkv_acc_f32", "4, 1, 4, 1, 1, 8, 1, 8, 1, 2, 8, 8, 8", 64, 128, 12288),
    flash("others/flash_attn_mma_share_kv_F32F16F16F32_rr", "split_q_shared_kv_acc_f32_rr", "8, 1, 8, 1, 1, 8, 1, 8, 1, 2, 8, 8, 8", 128, 256, 36864),
    flash("swizzle/flash_attn_mma_share_kv_swizzle_qk", "split_q_shared_kv_swizzle_qk", "8, 1, 8, 1, 1, 8, 1, 8, 1, 2, 0, 0, 8", 128, 256, 34816),
    flash("swizzle/flash_attn_mma_tiling_qk_swizzle_q", "split_q_tiling_qk_swizzle_q", "4, 1, 4, 1, 1, 8, 1, 8, 1, 2, 0, 8, 8", 64, 128, 10240),
    flash("swizzle/flash_attn_mma_tiling_qkv_swizzle_qkv", "split_q_tiling_qkv_swizzle_qkv", "4, 1, 4, 1, 1, 8, 1, 8, 1, 2, 0, 0, 0", 64, 128, 8192),
    sgemm("kernels/1_naive.cuh", "sgemm_naive", (4, 4), (32, 32)),
    sgemm("kernels/3_kernel_shared_mem_blocking.cuh", "sgemm_shared_mem_block<32>", (4, 4), 1024),
    sgemm("kernels/5_kernel_2D_blocktiling.cuh", "sgemm2DBlocktiling<128, 128, 8, 8, 8>", (1, 1), 256),
    sgemm("kernels/6_kernel_vectorize.cuh", "sgemmVectorize<128, 128, 8, 8, 8>", (1, 1), 256),
    sgemm("kernels/10_kernel_warptiling.cuh", "sgemmWarptiling<128, 128, 16, 64, 64, 4, 8, 4, 128>", (1, 1), 128),
    sgemm("runner.cu", "sgemmDoubleBuffering<128, 256, 16, 128, 32, 1, 8, 8, 256>", (1, 1), 256, 256, fault="The two halves of a block wait at different __syncthreads()."),
)
