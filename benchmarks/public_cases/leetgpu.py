"""Kernels of lzyrapx/LeetGPU and hzchenxiaobin/leetgpu."""

# ruff: noqa: D103, E501  (a row of the table is a line; references are named after what they compute)

from __future__ import annotations

import math
from typing import Any

import numpy as np

from public_cases import Array, Case, floats, halves, ints, of, out, zeros

CUDA = "lzyrapx/LeetGPU/cuda/"
PREFIX = "hzchenxiaobin/leetgpu/"


def leet(name: str, kernel: str, grid: Any, block: Any, args: tuple[Any, ...], reference: Any, **more: Any) -> Case:
    """A case in CUDA/NAME/NAME.cu."""
    path = name if "/" in name else f"{name}/{name}"
    return Case(f"{CUDA}{path}.cu", kernel, grid, block, args, reference, **more)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q: Array, k: Array, v: Array, *sizes: Any) -> Array:
    return softmax(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])) @ v


def windows(x: Array, *size: int) -> Array:
    return np.lib.stride_tricks.sliding_window_view(x, size)


def correlated(x: Array, k: Array) -> Array:
    return np.tensordot(windows(x, *k.shape), k, k.ndim)


def blurred(x: Array, k: Array) -> Array:
    return correlated(np.pad(x, [(n // 2, n // 2) for n in k.shape]), k)


def pooled(x: Array, size: int, stride: int, padding: int) -> Array:
    wide = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)], constant_values=-np.inf)
    return windows(wide, 1, 1, size, size)[:, :, ::stride, ::stride].max(axis=(4, 5, 6, 7))


def jacobi(x: Array) -> Array:
    y = x.copy()
    y[1:-1, 1:-1] = (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 4
    return y


def relaxed(d: Array, k: int) -> Array:
    return np.minimum(d, d[:, k : k + 1] + d[k : k + 1])


def erf(x: Array) -> Array:
    return np.vectorize(math.erf)(x)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def half_down(x: Array) -> Array:
    """Round half away from zero."""
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def quantized(a: Array, b: Array, sa: float, sb: float, sc: float, za: int, zb: int, zc: int) -> Array:
    total = (a.astype("i4") - za) @ (b.astype("i4") - zb)
    scale = np.float32(np.float32(np.float32(sa) * np.float32(sb)) / np.float32(sc))
    return np.clip(half_down(total.astype("f4") * scale) + zc, -128, 127).astype("i1")


def hashed(text: bytes, rounds: int) -> int:
    for _ in range(rounds):
        value = 2166136261
        for byte in text:
            value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
        text = value.to_bytes(4, "little")
    return value


def folded(x: Array, width: int) -> Array:
    """Sums of `width` elements each."""
    return np.pad(x, (0, -len(x) % width)).reshape(-1, width).sum(axis=1)


def kmeans(x: Array, y: Array, cx: Array, cy: Array) -> dict[int, Any]:
    nearest = ((x[:, None] - cx) ** 2 + (y[:, None] - cy) ** 2).argmin(axis=1).astype("i4")
    sums = [np.bincount(nearest, each, len(cx)) for each in (x, y)]
    return {2: nearest, 5: sums[0], 6: sums[1], 7: np.bincount(nearest, minlength=len(cx)).astype("i4")}


def flocked(a: Array) -> Array:
    near = ((a[:, None, :2] - a[None, :, :2]) ** 2).sum(axis=2) < 25
    near &= ~np.eye(len(a), dtype=bool)
    count = near.sum(axis=1, keepdims=True)
    mean = np.where(count > 0, near @ a[:, 2:] / np.maximum(count, 1), a[:, 2:])
    v = a[:, 2:] + 0.05 * (mean - a[:, 2:])
    return np.concatenate([a[:, :2] + v, v], axis=1)


def nearest(p: Array) -> Array:
    d = ((p[:, None] - p) ** 2).sum(axis=2)
    np.fill_diagonal(d, np.inf)
    return d.argmin(axis=1).astype("i4")


def recurrence(a: Array, x: Array) -> Array:
    h = x.copy()
    for i in range(1, x.shape[1]):
        h[:, i] = a[:, i] * h[:, i - 1] + x[:, i]
    return h


def butterflies(x: Array, step: int) -> Array:
    z = (x[:, 0] + 1j * x[:, 1]).reshape(-1, 2, step)
    w = z[:, 1] * np.exp(-1j * np.pi * np.arange(step) / step)
    y = np.stack([z[:, 0] + w, z[:, 0] - w], axis=1).reshape(-1)
    return np.stack([y.real, y.imag], axis=1)


def windowed(q: Array, k: Array, v: Array, size: int) -> Array:
    scores = q @ k.T / math.sqrt(q.shape[1])
    far = np.abs(np.subtract.outer(np.arange(len(q)), np.arange(len(q)))) > size
    return softmax(np.where(far, -np.inf, scores)) @ v


def ascending(n: int) -> Any:
    return of(lambda random: np.sort(random.uniform(-1, 1, n)).astype("f4"))


def visited(
    grid: Array, distances: Array, rows: int, columns: int, frontier: Array, n: int, *rest: Any
) -> dict[int, Any]:
    """One step of a search: new distances, the next frontier in any order, its length."""
    d, level = distances.copy(), rest[-1]
    for node in frontier:
        row, column = divmod(int(node), columns)
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if 0 <= r < rows and 0 <= c < columns and grid[r, c] == 0 and d[r, c] == -1:
                d[r, c] = level + 1
    return {1: d, 7: (d != distances).sum()}


HEADS = (32, 32, 4, 8)  # tokens, width, heads, width of one
# fmt: off
CASES = (
    leet("Vector Addition", "vector_add", 4, 256, (floats(1000), floats(1000), out(1000), 1000), lambda a, b, c, n: {2: a + b}),
    leet("ReLU", "relu_kernel", 4, 256, (floats(1000), out(1000), 1000), lambda x, y, n: {1: np.maximum(x, 0)}),
    leet("Leaky ReLU", "leaky_relu_kernel", 4, 256, (floats(1000), out(1000), 1000), lambda x, y, n: {1: np.where(x > 0, x, x * np.float32(0.01))}),
    leet("Sigmoid Activation", "sigmoid_kernel", 4, 256, (floats(1000, low=-8, high=8), out(1000), 1000), lambda x, y, n: {1: sigmoid(x)}),
    leet("Sigmoid Linear Unit", "sigmoid_kernel", 4, 256, (floats(1000, low=-8, high=8), out(1000), 1000), lambda x, y, n: {1: x * sigmoid(x)}),
    leet("Swish-Gated Linear Unit", "swiglu_kernel", 2, 256, (floats(1000), out(500), 500), lambda x, y, n: {1: x[:n] * sigmoid(x[:n]) * x[n:]}),
    leet("Gaussian Error Gated Linear Unit", "geglu_kernel", 2, 256, (floats(1000, low=-3, high=3), out(500), 500), lambda x, y, n: {1: x[:n] * x[n:] * (1 + erf(x[n:] / math.sqrt(2))) / 2}, terms=8),
    leet("Value Clipping", "clip_kernel", 4, 256, (floats(1000), out(1000), -0.25, 0.5, 1000), lambda x, y, low, high, n: {1: np.clip(x, low, high)}),
    leet("Interleave Arrays/Interleave Arrays (PTX)", "interleave_kernel", 2, 256, (floats(501), floats(501), out(1002), 501), lambda a, b, y, n: {2: np.stack([a, b], 1).reshape(-1)}),
    leet("Reverse Array", "reverse_array", 2, 256, (floats(1001), 1001), lambda x, n: {0: x[::-1]}),
    leet("Color Inversion", "invert_kernel", 4, 256, (ints(20, 40, 4, high=256, dtype="u1"), 40, 20), lambda x, w, h: {0: np.where(np.arange(4) < 3, 255 - x, x)}),
    leet("RGB to Grayscale", "rgb_to_grayscale_kernel", 4, 256, (floats(800, 3, low=0), out(800), 40, 20), lambda x, y, w, h: {1: x @ np.array([0.299, 0.587, 0.114])}),
    leet("Matrix Transpose", "matrix_transpose_kernel", (3, 5), (16, 16), (floats(70, 40), out(40, 70), 70, 40), lambda x, y, r, c: {1: x.T}),
    leet("Matrix Multiplication", "matrix_multiplication_kernel", (3, 3), (16, 16), (floats(40, 50), floats(50, 45), out(40, 45), 40, 50, 45), lambda a, b, c, m, n, k: {2: a @ b}, terms=50),
    leet("Batched Matrix Multiplication", "batched_matmul_kernel", 8, 256, (floats(3, 20, 30), floats(3, 30, 25), out(3, 20, 25), 3, 20, 25, 30), lambda a, b, c, *s: {2: a @ b}, terms=30),
    leet("FP16 Batched Matrix Multiplication", "batched_mat_mul_kernel", (2, 2, 3), (16, 16), (halves(3, 20, 30), halves(3, 30, 25), out(3, 20, 25, dtype="f2"), 3, 20, 25, 30), lambda a, b, c, *s: {2: a @ b}, rounds="f2"),
    leet("General Matrix Multiplication (GEMM)", "gemm_kernel", (2, 3), (16, 16), (halves(40, 64), halves(64, 32), halves(40, 32), 40, 32, 64, 0.5, -2.0), lambda a, b, c, m, n, k, alpha, beta: {2: alpha * (a @ b) + beta * c}, rounds="f2"),
    leet("INT8 Quantized MatMul", "quantized_matmul_kernel", (2, 3), (16, 16), (ints(40, 64, low=-128, high=128, dtype="i1"), ints(64, 32, low=-128, high=128, dtype="i1"), zeros(40, 32, dtype="i1"), 40, 32, 64, 0.02, 0.01, 0.7, 3, -5, 7), lambda a, b, c, m, n, k, *scales: {2: quantized(a, b, *scales)}),
    leet("Weight Dequantization", "dequantize_kernel", (2, 2), (32, 32), (50, 60, 16, floats(50, 60), floats(4, 4), out(50, 60)), lambda m, n, t, x, s, y: {5: x * np.repeat(np.repeat(s, t, 0), t, 1)[:m, :n]}),
    leet("1D Convolution", "convolution_1d_kernel", 4, 256, (floats(1000), floats(9), out(992), 1000, 9), lambda x, k, y, *s: {2: correlated(x, k)}, terms=9),
    leet("2D Convolution", "convolution_kernel", (3, 3), (16, 16), (floats(40, 50), floats(3, 5), out(38, 46), 40, 50, 3, 5, 38, 46), lambda x, k, y, *s: {2: correlated(x, k)}, terms=15),
    leet("3D Convolution/3DConvolution", "conv3d_kernel", (2, 2, 3), (8, 8, 4), (floats(12, 14, 16), floats(3, 3, 3), out(10, 12, 14), 12, 14, 16, 3, 3, 3, 10, 12, 14), lambda x, k, y, *s: {2: correlated(x, k)}, terms=27),
    leet("Gaussian Blur", "gaussian_blur_kernel", (3, 2), (16, 16), (floats(30, 40), floats(5, 3, low=0), out(30, 40), 30, 40, 5, 3), lambda x, k, y, *s: {2: blurred(x, k)}, terms=15),
    leet("2D Max Pooling", "max_pooling_2d", (1, 1, 6), (16, 16), (floats(2, 3, 14, 15), out(2, 3, 7, 8), 2, 3, 14, 15, 3, 2, 1), lambda x, y, n, c, h, w, *s: {1: pooled(x, *s)}),
    leet("2D Jacobi Stencil", "two_dim_jacobi_kernel", (3, 2), (16, 16), (floats(30, 40), out(30, 40), 30, 40), lambda x, y, *s: {1: jacobi(x)}),
    leet("All-Pairs Shortest Paths", "floyd_warshall_kernel", (2, 2), (16, 16), (floats(25, 25, low=0), 25, 7), lambda d, n, k: {0: relaxed(d, k)}),
    leet("BFS Shortest Path", "bfs_kernel", 1, 256, (of(lambda r: (r.random((12, 14)) < 0.2).astype("i4")), of(lambda r: np.where(np.arange(168).reshape(12, 14) % 3 == 1, 4, -1).astype("i4")), 12, 14, of(lambda r: np.arange(1, 168, 3).astype("i4")), 56, zeros(168, dtype="i4"), zeros(1, dtype="i4"), 4), visited, scratch=(6,)),
    leet("Histogramming", "histogram_kernel", 2, 256, (ints(3000, high=50), zeros(50, dtype="i4"), 3000, 50), lambda x, h, *s: {1: np.bincount(x, minlength=50)}, options={"shared": 200}),
    leet("Histogramming/Histogramming (naive)", "histogram_kernel", 4, 256, (ints(1000, high=50), zeros(50, dtype="i4"), 1000), lambda x, h, *s: {1: np.bincount(x, minlength=50)}),
    leet("Count Array Element", "count_equal_kernel", 2, 256, (ints(1000, high=5), zeros(1, dtype="i4"), 1000, 3), lambda x, y, n, k: {1: (x == k).sum()}, options={"shared": 1024}),
    leet("Count 3D Array Element", "count_3d_equal_kernel", (2, 2, 2), (8, 8, 8), (ints(10, 11, 12, high=5), zeros(1, dtype="i4"), 10, 11, 12, 3), lambda x, y, n, m, k, p: {1: (x == p).sum()}),
    leet("Subarray Sum", "subarray_sum_kernel", 3, 256, (ints(1000, low=-50), zeros(1, dtype="i4"), 1000, 100, 800), lambda x, y, n, s, e: {1: x[s : e + 1].sum()}),
    leet("2D Subarray Sum", "row_sum_kernel", 21, 256, (ints(30, 500), out(21, dtype="i4"), 30, 500, 5, 25, 17, 411), lambda x, y, n, m, r, e, c, f: {1: x[r : e + 1, c : f + 1].sum(1)}, options={"shared": 1024}),
    leet("Max Subarray Sum", "sliding_window_kernel", 1, 1, (ints(300, low=-50), out(1, dtype="i4"), 300, 17), lambda x, y, n, w: {1: windows(x, w).sum(1).max()}),
    leet("Dot Product", "dot_product_kernel", 4, 256, (floats(1000), floats(1000), out(4), 1000), lambda a, b, y, n: {2: folded(a * b, 256)}, terms=9, options={"shared": 1024}),
    leet("FP16 Dot Product", "partial_dot_kernel", 2, 1024, (halves(1500), halves(1500), out(2), 1500), lambda a, b, y, n: {2: folded(a * b, 1024)}, terms=11, options={"shared": 4096}),
    leet("Reduction", "reduction_kernel", 2, 1024, (floats(3000), zeros(1), 3000), lambda x, y, n: {1: x.sum()}, terms=13, options={"shared": 4096}),
    leet("Mean Squared Error/Mean Squared Error (optimized)", "mean_squared_error", 3, 128, (floats(1300), floats(1300), zeros(1), 1300), lambda p, t, y, n: {2: ((p - t) ** 2).mean()}, terms=14),
    leet("Prefix Sum/PrefixSum", "prefixSum_UniqueBlock", 1, 256, (floats(256), 256, out(256)), lambda x, n, y: {2: np.cumsum(x)}, terms=16, options={"shared": 1024}),
    leet("Prefix Sum/PrefixSum", "prefixSum_multiBlocks", 4, 256, (floats(1024), 1024, out(1024), out(4)), lambda x, n, y, t: {2: np.cumsum(x.reshape(4, -1), 1).reshape(-1), 3: x.reshape(4, -1).sum(1)}, terms=16, options={"shared": 1024}),
    Case(PREFIX + "medium/16_prefix_sum/prefix_sum_inclusive.cu", "add_offset_kernel", 4, 256, (floats(1000), floats(4), 1000), lambda y, o, n: {0: y + np.repeat(o, 256)[:n]}),
    leet("RMS Normalization", "partial_sum_kernel", 2, 256, (floats(1000), 1000, out(2)), lambda x, n, y: {2: folded(x * x, 256).reshape(2, 2).sum(0)}, terms=10, options={"shared": 1024}),
    leet("RMS Normalization", "normalize_kernel", 4, 256, (floats(1000), 1.5, 0.25, 0.7, out(1000), 1000), lambda x, g, b, rms, y, n: {4: g * x / rms + b}),
    leet("Batch Normalization", "compute_means_vars", 6, 256, (floats(700, 6), out(6), out(6), 700, 6), lambda x, m, v, *s: {1: x.mean(0), 2: x.var(0)}, terms=12, options={"shared": 1024}, fault="Thread 0 writes sdata[0] again while others may still read the mean there."),
    leet("Batch Normalization", "batch_normalize", 17, 256, (floats(700, 6), floats(6), floats(6), out(700, 6), floats(6), floats(6, low=0.2), 700, 6, 1e-5), lambda x, g, b, y, m, v, n, c, e: {3: g * (x - m) / np.sqrt(v + e) + b}),
    leet("Softmax", "softmax_kernel", 1, 256, (floats(1003), out(1003), 1003), lambda x, y, n: {1: softmax(x)}, terms=16, fault="Warp 0 writes its sum to shared_mem[0] while others may still read the maximum there."),
    leet("Softmax Attention/Softmax Attention (naive)", "softmax_kernel", 20, 256, (floats(20, 300), out(20, 300), 20, 300), lambda s, p, *n: {1: softmax(s)}, terms=12, options={"shared": 2048}),
    leet("Multi-Head Attention", "compute_A", 16, 256, (out(4, 32, 32), floats(32, 32), floats(32, 32), *HEADS), lambda a, q, k, n, w, h, d: {0: q.reshape(n, h, d).transpose(1, 0, 2) @ k.reshape(n, h, d).transpose(1, 2, 0) / math.sqrt(d)}, terms=8),
    leet("Multi-Head Attention", "compute_softmax", 1, 256, (out(4, 32, 32), floats(4, 32, 32), 32, 4), lambda s, a, *n: {0: softmax(a)}, terms=32),
    leet("Sliding Window Self-Attention", "sliding_window_attention_kernel", 1, 256, (floats(50, 16), floats(50, 16), floats(50, 16), out(50, 16), 50, 16, 6), lambda q, k, v, y, m, d, w: {3: windowed(q, k, v, w)}, terms=32),
    leet("Attention with Linear Biases", "attention_scores_kernel", (2, 2), (16, 16), (floats(20, 24), floats(30, 24), out(20, 30), 20, 30, 24, 0.2, 0.5), lambda q, k, s, m, n, d, f, a: {2: f * (q @ k.T) + a * np.subtract.outer(np.arange(m), np.arange(n))}, terms=24),
    leet("Rotary Positional Embedding", "rope_kernel", 5, 256, (floats(20, 64), floats(20, 64), floats(20, 64), out(20, 64), 20, 64), lambda q, c, s, y, m, d: {3: q * c + np.concatenate([-q[:, d // 2 :], q[:, : d // 2]], 1) * s}),
    leet("Categorical Cross Entropy Loss", "loss_kernel", 1, 256, (floats(200, 10), out(200), ints(200, high=10), 200, 10), lambda x, y, t, n, c: {1: np.log(np.exp(x).sum(1)) - x[np.arange(n), t]}, terms=10),
    leet("Categorical Cross Entropy Loss", "reduce_sum_kernel", 2, 256, (floats(1000), zeros(1), 1000), lambda x, y, n: {1: x.mean()}, terms=16),
    leet("Sparse Matrix-Vector Multiplication/SparseMatrix-VectorMultiplication", "spmv_kernel", 1, 256, (of(lambda r: (r.normal(size=(100, 80)) * (r.random((100, 80)) < 0.1)).astype("f4")), floats(80), out(100), 100, 80), lambda a, x, y, *s: {2: a @ x}, terms=80),
    leet("Merge Sorted Arrays", "merge_kernel", 44, 16, (ascending(300), ascending(400), out(700), 300, 400), lambda a, b, c, *s: {2: np.sort(np.concatenate([a, b]))}),
    leet("Parallel Merge", "merge_kernel", 3, 256, (ascending(300), ascending(400), out(700), 300, 400), lambda a, b, c, *s: {2: np.sort(np.concatenate([a, b]))}),
    leet("Nearest Neighbor", "nearest_neighbor_kernel", 1, 256, (floats(200, 3), out(200, dtype="i4"), 200), lambda p, y, n: {1: nearest(p)}),
    leet("K-Means Clustering/K-Means Clustering (naive)", "assign_clusters", 2, 256, (floats(300), floats(300), out(300, dtype="i4"), floats(5), floats(5), zeros(5), zeros(5), zeros(5, dtype="i4"), 300, 5), lambda x, y, labels, cx, cy, *s: kmeans(x, y, cx, cy), terms=100),
    leet("Multi-Agent Simulation", "update_agents_kernel", 1, 256, (floats(100, 4, low=-9, high=9), out(100, 4), 100), lambda a, y, n: {1: flocked(a)}, terms=30),
    leet("Linear Recurrence", "linear_recurrence_kernel", 6, 1, (floats(6, 80), floats(6, 80), out(6, 80), 6, 80), lambda a, x, h, *s: {2: recurrence(a, x)}, terms=10),
    leet("Fast Fourier Transform", "kernel_butterfly", 1, 256, (floats(256, 2), out(256, 2), 16, 32, 256, np.bool_(False)), lambda x, y, step, s, n, inverse: {1: butterflies(x, step)}, terms=4),
    leet("Rainbow Table", "fnv1a_hash_kernel", 1, 256, (ints(200, high=2**31 - 1), out(200, dtype="u4"), 200, 3), lambda x, y, n, r: {1: np.array([hashed(int(v).to_bytes(4, "little"), r) for v in x])}),
    leet("Password Cracking (FNV-1a)/PasswordCracking", "password_crack_kernel<3>", 26, 676, (np.uint32(hashed(b"kzq", 2)), 2, zeros(8, dtype="u1")), lambda t, r, y: {2: np.frombuffer(b"kzq".ljust(8, b"\0"), "u1")}),
)
