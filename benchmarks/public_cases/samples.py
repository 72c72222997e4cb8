"""Kernels of NVIDIA/cuda-samples."""

# ruff: noqa: D103, E501  (a row of the table is a line; references are named after what they compute)

from __future__ import annotations

import math
from typing import Any

import numpy as np

import gemmery as gm
from public_cases import Array, Case, bfloats, floats, from_bits, halves, ints, of, out, zeros
from public_cases.leetgpu import erf, folded

ROOT = "NVIDIA/cuda-samples/Samples/"
BASIC, IDEAS, FEATURES, LIBRARIES, DOMAINS, SPEED = (
    "0_Introduction/",
    "2_Concepts_and_Techniques/",
    "3_CUDA_Features/",
    "4_CUDA_Libraries/",
    "5_Domain_Specific/",
    "6_Performance/",
)


def sample(path: str, kernel: str, grid: Any, block: Any, args: tuple[Any, ...], reference: Any, **more: Any) -> Case:
    """A case in ROOT."""
    return Case(ROOT + path, kernel, grid, block, args, reference, **more)


def reduction(name: str, blocks: int, block: int, n: int, shared: int = 2048, **more: Any) -> Case:
    """One of the sums of the reduction sample: each block's sum; the blocks together have the sum of all."""
    each = n // blocks
    reference = lambda x, y, n: {1: x.reshape(blocks, each).sum(1)}  # noqa: E731
    return sample(
        f"{IDEAS}reduction/reduction_kernel.cu",
        name,
        blocks,
        block,
        (floats(n), out(blocks), n),
        reference,
        terms=12,
        options={"shared": shared},
        **more,
    )


def sorted_pairs(keys: Array, size: int) -> tuple[Array, Array]:
    """Keys and values sorted in parts of `size`; the values were the places."""
    order = np.argsort(keys.reshape(-1, size), axis=1, kind="stable")
    places = (order + np.arange(0, keys.size, size)[:, None]).reshape(-1)
    return keys[places], places.astype("u4")


def words(*shape: int) -> Any:
    """Random bytes, in words."""
    return of(lambda random: random.integers(0, 256, shape).astype("u1").view("u4"))


def distinct(n: int) -> Any:
    return of(lambda random: random.permutation(4 * n)[:n].astype("u4"))


def misplaced(a: Array, b: Array, y: Array, n: int) -> dict[int, Array]:
    """The sums of fp16ScalarProduct with the indices that it has."""
    products = np.pad((a * b).sum(1), (0, 512))
    return {2: np.array([sum(products[t + 128 + block : n : 512].sum() for t in range(128)) for block in range(4)])}


def counting(n: int) -> Any:
    return of(lambda random: np.arange(n).astype("u4"))


def sorting(path: str, kernel: str, n: int, size: int, *last: int) -> Case:
    args = out(n, dtype="u4"), out(n, dtype="u4"), distinct(n), counting(n), size, *last

    def reference(dk: Array, dv: Array, sk: Array, *rest: Any) -> dict[int, Array]:
        keys, values = sorted_pairs(sk, size)
        return {0: keys, 1: values}

    return sample(path, kernel, n // 1024, 512, args, reference)


def exclusive(x: Array, size: int) -> Array:
    rows = x.reshape(-1, size)
    return np.cumsum(rows, 1).reshape(-1) - x


def convolved(x: Array, k: Array, axis: int, edge: bool) -> Array:
    radius = len(k) // 2
    width = [(radius, radius) if each == axis else (0, 0) for each in range(2)]
    wide = np.pad(x, width, mode="edge" if edge else "constant")
    view = np.lib.stride_tricks.sliding_window_view(wide, len(k), axis)
    return view @ k[::-1]


def boxed(x: Array, r: int) -> Array:
    return np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (r, r)), mode="edge"), 2 * r + 1, 1).mean(2)


def dct(x: Array) -> Array:
    """Cosine transforms of blocks of 8 x 8."""
    k = np.arange(8)
    c = np.cos(np.outer(2 * k + 1, k) * math.pi / 16) * np.where(k, 0.5, math.sqrt(1 / 8))
    parts = x.reshape(x.shape[0] // 8, 8, -1, 8)
    return np.einsum("iajb,ak,bl->ikjl", parts, c, c).reshape(x.shape)


def normalized(a: Array, b: Array, partial: Array, blocks: int, threads: int) -> dict[int, Array]:
    products = np.pad(a * b, (0, -len(a) % (blocks * threads))).reshape(-1, blocks, threads)
    sums = products.sum((0, 2))
    root = math.sqrt(sums.sum())
    return {0: a / root, 1: b / root, 2: np.concatenate([[root], sums[1:]])}


def atomics(data: Array, n: int) -> dict[int, Array]:
    t = np.arange(n)
    masks = np.bitwise_and.reduce(2 * t + 7) & 0xFF, np.bitwise_or.reduce(1 << t[:32]), np.bitwise_xor.reduce(t) ^ 0xFF
    return {
        0: np.array([10 * n, -10 * n, n - 1, n - 1, 0, n % 18, (138 - n) % 138, n - 1, *masks, *data[11:]])
        .astype("u4")
        .view("i4")
    }


def texture(make: Any, **options: Any) -> Any:
    """A texture of a random array, which the reference receives beside it."""
    return lambda random: gm.texture(make(random), **options)


IMAGE = np.random.default_rng(11).uniform(-1, 1, (64, 64)).astype("f4")
MASK = floats(17)


def turned(width: int, height: int, theta: float) -> Array:
    """IMAGE turned about its center, read with linear weights and wrapped around."""
    x, y = np.meshgrid(np.arange(width) - width / 2, np.arange(height) - height / 2)
    u = (x * math.cos(theta) - y * math.sin(theta)) / width + 0.5
    v = (y * math.cos(theta) + x * math.sin(theta)) / height + 0.5
    s, t = u * width - 0.5, v * height - 0.5
    i, j = np.floor(s).astype(int), np.floor(t).astype(int)
    a, b = s - i, t - j
    at = lambda row, column: IMAGE[row % height, column % width].astype("f8")  # noqa: E731
    return (1 - b) * ((1 - a) * at(j, i) + a * at(j, i + 1)) + b * ((1 - a) * at(j + 1, i) + a * at(j + 1, i + 1))


def priced(s: Array, x: Array, t: Array, rate: float, volatility: float) -> tuple[Array, Array]:
    d1 = (np.log(s / x) + (rate + volatility**2 / 2) * t) / (volatility * np.sqrt(t))
    n1, n2 = ((1 + erf(d / math.sqrt(2))) / 2 for d in (d1, d1 - volatility * np.sqrt(t)))
    call = s * n1 - x * np.exp(-rate * t) * n2
    return call, call - s + x * np.exp(-rate * t)


def walsh(x: Array) -> Array:
    y = x.copy().reshape(-1)
    step = 1
    while step < y.size:
        pairs = y.reshape(-1, 2, step)
        y = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        step *= 2
    return y


def walsh4(x: Array, stride: int) -> Array:
    a, b, c, d = x.reshape(-1, 4, stride).swapaxes(0, 1)
    return np.stack([a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d], 1).reshape(-1)


def haar(x: Array, levels: int) -> tuple[Array, float]:
    details, rest = [], x
    for _ in range(levels):
        details.insert(0, (rest[::2] - rest[1::2]) / math.sqrt(2))
        rest = (rest[::2] + rest[1::2]) / math.sqrt(2)
    return np.concatenate(details), float(rest[0])


def sobol(n: int, directions: Array) -> Array:
    gray = np.arange(n) ^ (np.arange(n) >> 1)
    x = np.zeros(n, np.int64)
    for bit in range(32):
        x ^= np.where(gray >> bit & 1, directions[bit].astype(np.int64), 0)
    return x * 2.0**-32


def moved(position: Array, velocity: Array, dt: float, damping: float, softening: float) -> tuple[Array, Array]:
    r = position[None, :, :3] - position[:, None, :3]
    a = (r * (position[:, 3] / ((r**2).sum(2) + softening) ** 1.5)[..., None]).sum(1)
    v = np.concatenate([(velocity[:, :3] + a * dt) * damping, velocity[:, 3:]], 1)
    return np.concatenate([position[:, :3] + v[:, :3] * dt, position[:, 3:]], 1), v


def dominant(n: int) -> Any:
    return of(lambda random: (random.uniform(-1, 1, (n, n)) / n + 2 * np.eye(n)).astype("f4"))


def jacobi(a: Array, b: Array, x: Array) -> dict[int, Any]:
    dx = (b - a @ x) / np.diag(a)
    return {4: x + dx, 5: np.abs(dx).sum()}


def conjugate(n: int) -> Case:
    """A tridiagonal system, solved from rest by the grid together; only the solution is compared."""
    rows = np.minimum(np.maximum(3 * np.arange(n + 1) - 1, 0), 3 * n - 2).astype("i4")
    columns = np.concatenate([np.arange(max(i - 1, 0), min(i + 2, n)) for i in range(n)]).astype("i4")
    values = np.where(columns == np.repeat(np.arange(n), np.diff(rows)), 4, 1).astype("f4")
    dense = 4 * np.eye(n) + np.eye(n, k=1) + np.eye(n, k=-1)
    fixed = tuple(of(lambda random, each=each: each.copy()) for each in (rows, columns, values))
    args = (
        *fixed,
        zeros(n),
        zeros(n),
        zeros(n),
        of(lambda random: np.ones(n, "f4")),
        zeros(1, dtype="f8"),
        3 * n - 2,
        n,
        1e-5,
    )
    return sample(
        f"{LIBRARIES}conjugateGradientMultiBlockCG/conjugateGradientMultiBlockCG.cu",
        "gpuConjugateGradient",
        3,
        64,
        args,
        lambda *a: {3: np.linalg.solve(dense, np.ones(n))},
        terms=200,
        options={"shared": 256},
        scratch=(4, 5, 6, 7),
    )


def wmma(path: str, kernel: str, tile: int, a: Any, c: Any, n: int = 64, **more: Any) -> Case:
    """D = alpha A B + beta C, of n rows and columns, B with contiguous columns."""
    kind = more.pop("kind", "f4")
    read = from_bits if more.get("rounds") == "bf16" else lambda x: x.astype("i4") if x.dtype.kind in "iu" else x
    grid, scalars = n // (4 * tile), ((2, -3) if kind == "i4" else (0.5, -1.5))
    args = a, a, c, out(n, n, dtype=kind), n, n, n, *scalars
    return sample(
        f"{FEATURES}{path}",
        kernel,
        (grid, grid),
        (128, 4),
        args,
        lambda a, b, c, d, *s: {3: s[3] * (read(a) @ read(b).T) + s[4] * c},
        **more,
    )


def copying(name: str, block: tuple[int, int] = (16, 16), grid: tuple[int, int] = (4, 4)) -> Case:
    """C = A B by copies to shared memory that run beside the products."""
    args = out(64, 64), floats(64, 64), floats(64, 64), 64, 64
    path = f"{FEATURES}globalToShmemAsyncCopy/globalToShmemAsyncCopy.cu"
    large = "LargeChunk" in name and "Naive" not in name
    more = {"fault": OTHER_TILE, "as_written": tiles_of_a} if large else {}
    return sample(path, f"{name}<16>", grid, block, args, lambda c, a, b, *s: {0: a @ b}, terms=64, **more)


def tiles_of_a(c: Array, a: Array, b: Array, *sizes: int) -> dict[int, Array]:
    """Products of tiles of A with the tiles of B at the same places."""
    left, right = (x.reshape(4, 16, 4, 16).transpose(0, 2, 1, 3) for x in (a, b))
    return {0: np.tile((left @ right).sum(1), (1, 1, 4)).reshape(64, 64)}


def blocks_turned(a: Array, b: Array, c: Array, *rest: Any) -> dict[int, Array]:
    """alpha A B + beta C with each block of 16 x 16 of B transposed."""
    turned = from_bits(b).reshape(4, 16, 4, 16).transpose(0, 3, 2, 1).reshape(64, 64)
    return {3: 0.5 * (from_bits(a) @ turned) - 1.5 * c}


def transposing(name: str) -> Case:
    args = out(64, 96), floats(96, 64), 64, 96
    return sample(f"{SPEED}transpose/transpose.cu", name, (2, 3), (32, 16), args, lambda y, x, *s: {0: x.T})


OTHER_TILE = "The tiles of B are read with the index of A, so the product is another one."
TURNED = "The blocks of B are found as if it were stored by rows, but each is read by columns."
INACTIVE = "The last sum reads lanes that its mask leaves out, whose values are undefined."
PARTIALS = "The first warp reads a sum for each of its lanes, and only full warps have written one."
LINEAR = {"filter": "linear", "address": "wrap", "normalized": True}
FUNCTIONS = f"{BASIC}fp16ScalarProduct/fp16ScalarProduct.cu"
# fmt: off
CASES = (
    sample(f"{BASIC}matrixMul/matrixMul.cu", "MatrixMulCUDA<16>", (3, 2), (16, 16), (out(32, 48), floats(32, 64), floats(64, 48), 64, 48), lambda c, a, b, *s: {0: a @ b}, terms=64),
    sample(FUNCTIONS, "scalarProductKernel_native", 4, 128, (halves(1024, 2, low=0), halves(1024, 2, low=0), out(4), 1024), lambda a, b, y, n: {2: (a * b).reshape(2, 4, 256).sum((0, 2))}, terms=16, rounds="f2", fault="The first index is threadIdx.x + blockDim.x + blockIdx.x instead of threadIdx.x + blockDim.x * blockIdx.x: products are left out and others counted more than once.", as_written=misplaced),
    sample(f"{BASIC}simpleAWBarrier/simpleAWBarrier.cu", "normVecByDotProductAWBarrier", 3, 128, (floats(1000, low=0.1), floats(1000, low=0.1), out(3, dtype="f8"), 1000), lambda a, b, p, n: normalized(a, b, p, 3, 128), options={"shared": 64}),
    sample(f"{BASIC}simpleAtomicIntrinsics/simpleAtomicIntrinsics.cu", "testKernel", 1, 64, (of(lambda r: np.array([0] * 8 + [0xFF, 0, 0xFF], "i4")),), lambda data: atomics(data, 64)),
    sample(f"{BASIC}simpleVoteIntrinsics/simpleVoteIntrinsics.cu", "VoteAllKernel2", 1, 128, (of(lambda r: (np.arange(128) // 32 % 2).astype("u4")), out(128, dtype="u4"), 128), lambda x, y, n: {1: x}),
    sample(f"{BASIC}simpleTexture/simpleTexture.cu", "transformKernel", (8, 8), (8, 8), (out(64, 64), 64, 64, 0.5, texture(lambda r: IMAGE, **LINEAR)), lambda y, w, h, theta, t: {0: turned(w, h, theta)}, rounds="bf16", terms=1),
    sample(f"{BASIC}simpleTemplates/simpleTemplates.cu", "testKernel<float>", 1, 64, (floats(64), out(64)), lambda x, y: {1: 64 * x}, options={"shared": 256}),
    sample(f"{BASIC}simpleMultiGPU/simpleMultiGPU.cu", "reduceKernel", 2, 64, (out(128), floats(1000), 1000), lambda y, x, n: {0: np.pad(x, (0, 24)).reshape(8, 128).sum(0)}, terms=8),
    sample(f"{BASIC}mergeSort/mergeSort.cu", "mergeSortSharedKernel<1u>", 2, 512, (out(2048, dtype="u4"), out(2048, dtype="u4"), distinct(2048), counting(2048), 1024), lambda dk, dv, sk, *s: dict(enumerate(sorted_pairs(sk, 1024)))),
    sorting(f"{IDEAS}sortingNetworks/bitonicSort.cu", "bitonicSortShared", 2048, 256, 1),
    sorting(f"{IDEAS}sortingNetworks/oddEvenMergeSort.cu", "oddEvenMergeSortShared", 2048, 1024, 1),
    sample(f"{FEATURES}cdpAdvancedQuicksort/cdpBitonicSort.cu", "bitonicsort", 1, 256, (distinct(256), out(256, dtype="u4"), 0, 256), lambda x, y, *s: {1: np.sort(x)}, options={"shared": 1024}),
    sample(f"{IDEAS}scan/scan.cu", "scanExclusiveShared", 2, 256, (out(2048, dtype="u4"), ints(2048, dtype="u4"), 512), lambda y, x, size: {0: exclusive(x, size)}),
    sample(f"{IDEAS}shfl_scan/shfl_scan.cu", "shfl_scan_test", 4, 256, (ints(1024), 32, out(4, dtype="i4")), lambda x, w, p: {0: np.cumsum(x.reshape(4, -1), 1).reshape(-1), 2: x.reshape(4, -1).sum(1)}, options={"shared": 32}),
    sample(f"{IDEAS}shfl_scan/shfl_scan.cu", "shfl_intimage_rows", 3, 120, (words(3, 1920), out(3, 1920, dtype="u4")), lambda x, y: {1: np.cumsum(x.view("u1"), 1)}, fault=PARTIALS),
    sample(f"{IDEAS}shfl_scan/shfl_scan.cu", "shfl_vertical_shfl", 2, (32, 8), (ints(1080, 64, high=256, dtype="u4"), 64, 1080), lambda x, *s: {0: np.cumsum(x, 0)}),
    sample(f"{IDEAS}histogram/histogram256.cu", "histogram256Kernel", 3, 192, (out(3, 256, dtype="u4"), words(4000), 1000), lambda y, x, n: {0: np.stack([np.bincount(x.view("u1").reshape(-1, 4)[np.arange(1000) // 192 % 3 == b].reshape(-1), minlength=256) for b in range(3)])}),
    sample(f"{IDEAS}histogram/histogram256.cu", "mergeHistogram256Kernel", 256, 256, (out(256, dtype="u4"), ints(300, 256, dtype="u4"), 300), lambda y, x, n: {0: x.sum(0)}),
    sample(f"{IDEAS}histogram/histogram64.cu", "histogram64Kernel", 2, 64, (out(2, 64, dtype="u4"), words(6400), 400), lambda y, x, n: {0: np.stack([np.bincount(x.view("u1").reshape(-1, 16)[np.arange(400) // 64 % 2 == b].reshape(-1) >> 2, minlength=64) for b in range(2)])}),
    reduction("reduce0<float>", 4, 128, 512),
    reduction("reduce2<float>", 4, 128, 512),
    reduction("reduce3<float>", 4, 128, 1024),
    reduction("reduce5<float, 128>", 4, 128, 1024),
    reduction("reduce6<float, 128, true>", 4, 128, 1024),
    reduction("reduce7<float, 128, true>", 4, 128, 1024, fault=INACTIVE, as_written=lambda x, y, n: {1: np.nan}),
    reduction("cg_reduce<float>", 4, 128, 512),
    reduction("multi_warp_cg_reduce<float, 128, 64>", 4, 128, 1024),
    sample(f"{IDEAS}reductionMultiBlockCG/reductionMultiBlockCG.cu", "reduceSinglePassMultiBlockCG", 3, 128, (floats(384), out(3), 384), lambda x, y, n: {1: np.concatenate([[x.sum()], folded(x, 128)[1:]])}, terms=12, floor=4, options={"shared": 1024}),
    sample(f"{IDEAS}threadFenceReduction/threadFenceReduction.cu", "reduceSinglePass<128, true>", 4, 128, (floats(1024), out(4), 1024), lambda x, y, n: {1: np.concatenate([[x.sum()], folded(x, 256)[1:]])}, terms=12, floor=4, options={"shared": 512}),
    sample(f"{IDEAS}scalarProd/scalarProd.cu", "scalarProdGPU", 2, 256, (out(5), floats(5, 2000), floats(5, 2000), 5, 2000), lambda c, a, b, *s: {0: (a * b).sum(1)}, terms=12, floor=4),
    sample(f"{IDEAS}convolutionSeparable/convolutionSeparable.cu", "convolutionRowsKernel", (2, 2), (16, 4), (out(8, 256), floats(8, 256), 256, 8, 256), lambda y, x, w, h, p, c_Kernel: {0: convolved(x, c_Kernel, 1, False)}, terms=17, variables={"c_Kernel": MASK}),
    sample(f"{IDEAS}convolutionSeparable/convolutionSeparable.cu", "convolutionColumnsKernel", (2, 2), (16, 8), (out(128, 32), floats(128, 32), 32, 128, 32), lambda y, x, w, h, p, c_Kernel: {0: convolved(x, c_Kernel, 0, False)}, terms=17, variables={"c_Kernel": MASK}),
    sample(f"{IDEAS}convolutionTexture/convolutionTexture.cu", "convolutionRowsKernel", (4, 6), (16, 12), (out(64, 64), 64, 64, texture(lambda r: IMAGE)), lambda y, w, h, t, c_Kernel: {0: convolved(IMAGE.astype("f8"), c_Kernel, 1, True)}, terms=17, variables={"c_Kernel": MASK}),
    sample(f"{IDEAS}boxFilter/boxFilter_kernel.cu", "d_boxfilter_x_tex", 1, 64, (out(64, 64), 64, 64, 5, texture(lambda r: IMAGE)), lambda y, w, h, r, t: {0: boxed(IMAGE.astype("f8"), r)}, terms=128),
    sample(f"{IDEAS}dct8x8/dct8x8.cu", "CUDAkernel2DCT", (2, 2), (8, 4, 2), (out(32, 64), floats(32, 64), 64), lambda y, x, s: {0: dct(x)}, terms=32),
    sample(f"{FEATURES}binaryPartitionCG/binaryPartitionCG.cu", "oddEvenCountAndSumCG", 2, 128, (ints(1024), zeros(1, dtype="i4"), zeros(2, dtype="i4"), 1024), lambda x, c, s, n: {1: (x % 2).sum(), 2: np.array([x[x % 2 == 1].sum(), x[x % 2 == 0].sum()])}),
    sample(f"{FEATURES}warpAggregatedAtomicsCG/warpAggregatedAtomicsCG.cu", "filter_arr", 4, 256, (zeros(1000, dtype="i4"), zeros(1, dtype="i4"), ints(1000, low=-50), 1000), lambda d, c, x, n: {0: np.concatenate([x[x > 0], np.zeros((x <= 0).sum(), "i4")]), 1: (x > 0).sum()}),
    sample(f"{FEATURES}warpAggregatedAtomicsCG/warpAggregatedAtomicsCG.cu", "calculateMaxInEachBuckets", 4, 256, (ints(1000, high=5), ints(1000), zeros(5, dtype="i4"), 1000, 5), lambda b, v, m, *s: {2: np.array([v[b == i].max() for i in range(5)])}),
    sample(f"{FEATURES}jacobiCudaGraphs/jacobi.cu", "JacobiMethod", 64, 256, (dominant(512), floats(512, dtype="f8"), 1e-5, floats(512, dtype="f8"), out(512, dtype="f8"), zeros(1, dtype="f8")), lambda a, b, t, x, y, s: jacobi(a, b, x), terms=64, rounds="f8"),
    wmma("cudaTensorCoreGemm/cudaTensorCoreGemm.cu", "simple_wmma_gemm", 16, halves(64, 64), floats(64, 64), terms=64),
    wmma("bf16TensorCoreGemm/bf16TensorCoreGemm.cu", "simple_wmma_bf16gemm", 16, bfloats(64, 64), floats(64, 64), rounds="bf16", fault=TURNED, as_written=blocks_turned),
    wmma("tf32TensorCoreGemm/tf32TensorCoreGemm.cu", "simple_wmma_tf32gemm", 16, floats(64, 64), floats(64, 64), rounds="tf32"),
    wmma("dmmaTensorCoreGemm/dmmaTensorCoreGemm.cu", "simple_wmma_gemm", 8, floats(64, 64, dtype="f8"), floats(64, 64, dtype="f8"), kind="f8", rounds="f8", terms=64),
    wmma("immaTensorCoreGemm/immaTensorCoreGemm.cu", "simple_wmma_gemm_imma", 16, ints(64, 64, high=256, dtype="u1"), ints(64, 64), kind="i4"),
    copying("MatrixMulAsyncCopyMultiStageLargeChunk"),
    copying("MatrixMulAsyncCopyLargeChunk"),
    copying("MatrixMulAsyncCopyLargeChunkAWBarrier"),
    copying("MatrixMulAsyncCopySingleStage"),
    copying("MatrixMulAsyncCopyMultiStage"),
    copying("MatrixMulAsyncCopyMultiStageSharedState", (16, 20)),
    sample(f"{FEATURES}newdelete/newdelete.cu", "vectorCreate", 1, 32, (zeros(1, dtype="u8"), 32), lambda *a: {}),
    conjugate(100),
    sample(f"{LIBRARIES}oceanFFT/oceanFFT_kernel.cu", "calculateSlopeKernel", (4, 4), (8, 8), (floats(32, 32), out(32, 32, 2), 32, 32), lambda h, s, *n: {1: np.pad(np.stack([h[1:-1, 2:] - h[1:-1, :-2], h[2:, 1:-1] - h[:-2, 1:-1]], 2), ((1, 1), (1, 1), (0, 0)))}),
    sample(f"{DOMAINS}BlackScholes/BlackScholes.cu", "BlackScholesGPU", 2, 128, (out(500), out(500), floats(500, low=5, high=30), floats(500, low=1, high=100), floats(500, low=0.25, high=10), 0.02, 0.3, 500), lambda c, p, s, x, t, r, v, n: dict(enumerate(priced(s, x, t, r, v))), terms=50),
    sample(f"{DOMAINS}fastWalshTransform/fastWalshTransform.cu", "fwtBatch1Kernel", 2, 256, (out(2, 1024), floats(2, 1024), 10), lambda y, x, n: {0: np.stack([walsh(row) for row in x])}, terms=10, options={"shared": 4096}),
    sample(f"{DOMAINS}fastWalshTransform/fastWalshTransform.cu", "fwtBatch2Kernel", (2, 1), 128, (out(1024), floats(1024), 16), lambda y, x, s: {0: walsh4(x, s)}),
    sample(f"{DOMAINS}dwtHaar1D/dwtHaar1D.cu", "dwtHaar1D", 1, 256, (floats(512), out(512), out(1), 9, 256, 256), lambda x, y, a, levels, *s: {1: np.concatenate([[np.nan], haar(x, levels)[0]]), 2: haar(x, levels)[1]}, terms=18, options={"shared": 2200}),
    sample(f"{DOMAINS}SobolQRNG/sobol_gpu.cu", "sobolGPU_kernel", (2, 3), 64, (1000, 3, of(lambda r: (r.integers(0, 2**32, (3, 32)) | 1).astype("u4")), out(3, 1000)), lambda n, d, v, y: {3: np.stack([sobol(n, each) for each in v])}),
    sample(f"{DOMAINS}nbody/bodysystemcuda.cu", "integrateBodies<float>", 2, 64, (out(128, 4), floats(128, 4), floats(128, 4), 0, 128, 0.01, 0.9, 2), lambda new, p, v, o, n, dt, d, t, softeningSquared: dict(zip((0, 2), moved(p, v, dt, d, float(softeningSquared[0])), strict=True)), terms=128, options={"shared": 1024}, variables={"softeningSquared": of(lambda r: np.array([0.01], "f4"))}),
    sample(f"{SPEED}UnifiedMemoryPerf/matrixMultiplyPerf.cu", "matrixMultiplyKernel", (2, 2), (32, 32), (out(64, 64), floats(64, 64), floats(64, 64), 64), lambda c, a, b, n: {0: a @ b}, terms=64),
    transposing("transposeNaive"),
    transposing("transposeNoBankConflicts"),
    transposing("transposeDiagonal"),
)
