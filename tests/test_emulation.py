"""gm.emulate on kernels as people write them: what they compute, what is refused, what an error says."""

import doctest
import math
import re
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import include

ARCHS = ("sm_75", "sm_80", "sm_90")
PTX = Path(__file__).parent / "data" / "ptx"
N = 64
X = np.random.default_rng(1).uniform(-4, 4, N).astype(np.float32)
Y = np.random.default_rng(2).uniform(0.5, 3, N).astype(np.float32)
TWICE = "__global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }"

# What a kernel computes of x and y > 0, the same in NumPy's float64, and units in the last place between the two.
FLOATS = {
    "sinf(x)": (np.sin, 2),
    "cosf(x)": (np.cos, 2),
    "tanf(x)": (np.tan, 4),
    "expf(x)": (np.exp, 2),
    "exp2f(x)": (np.exp2, 2),
    "expm1f(x)": (np.expm1, 2),
    "tanhf(x)": (np.tanh, 2),
    "cbrtf(x)": (np.cbrt, 1),
    "atanf(x)": (np.arctan, 2),
    "sinhf(x)": (np.sinh, 3),
    "erff(x)": (np.vectorize(math.erf), 2),
    "floorf(x)": (np.floor, 0),
    "rintf(x)": (np.rint, 0),
    "fabsf(x)": (np.abs, 0),
    "(float)(int)x": (np.trunc, 0),
    "(float)sin((double)x)": (np.sin, 1),
    "(float)exp((double)x)": (np.exp, 1),
    "(float)tanh((double)x)": (np.tanh, 1),
}
POSITIVE = {
    "logf(y)": (np.log, 1),
    "log2f(y)": (np.log2, 1),
    "log1pf(y)": (np.log1p, 2),
    "sqrtf(y)": (np.sqrt, 0.5),
    "rsqrtf(y)": (lambda y: 1 / np.sqrt(y), 2),
    "1.0f / y": (lambda y: 1 / y, 0.5),
    "tgammaf(y)": (np.vectorize(math.gamma), 11),
    "lgammaf(y + 2)": (lambda y: np.vectorize(math.lgamma)(y + 2), 6),
    "(float)log((double)y)": (np.log, 1),
    "(float)(1.0 / (double)y)": (lambda y: 1 / y, 0.5),
    "(float)rsqrt((double)y)": (lambda y: 1 / np.sqrt(y), 1),
}
BOTH = {
    "powf(y, x)": (lambda x, y: y**x, 8),
    "atan2f(x, y)": (np.arctan2, 3),
    "fmodf(x, y)": (np.fmod, 0),
    "hypotf(x, y)": (np.hypot, 3),
    "x / y": (np.divide, 0.5),
    "fmaf(x, y, x)": (lambda x, y: x * y + x, 0.5),
    "fminf(x, y)": (np.minimum, 0),
    "copysignf(y, x)": (lambda x, y: np.copysign(y, x), 0),
    "__fdividef(x, y)": (np.divide, 2),
    "(float)pow((double)y, (double)x)": (lambda x, y: y**x, 1),
}
FAST = {"__sinf(x)": np.sin, "__cosf(x)": np.cos, "__expf(x)": np.exp}  # 2**-21 in all


def elementwise(kind, expressions, arch, x, y):
    """Each expression of x and y, compiled into one kernel, as rows."""
    stores = "\n".join(f"z[{row} * {N} + i] = {text};" for row, text in enumerate(expressions))
    code = f"""__global__ void each(const {kind}* X, const {kind}* Y, {kind}* z) {{
      int i = threadIdx.x; {kind} x = X[i], y = Y[i];\n{stores} }}"""
    z = np.zeros((len(expressions), N), x.dtype)
    assert gm.emulate(code, "each", 1, N, [x, y, z], arch=arch).findings == ()
    return dict(zip(expressions, z, strict=True))


def units(found, exact):
    """The largest distance in units in the last place."""
    return np.max(np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32)))


@pytest.mark.parametrize("arch", ARCHS)
def test_functions_of_floats(arch):
    functions = {
        **{text: (function, (X,), most) for text, (function, most) in FLOATS.items()},
        **{text: (function, (Y,), most) for text, (function, most) in POSITIVE.items()},
        **{text: (function, (X, Y), most) for text, (function, most) in BOTH.items()},
    }
    found = elementwise("float", list(functions), arch, X, Y)
    for text, (function, given, most) in functions.items():
        exact = function(*(one.astype(np.float64) for one in given))
        assert units(found[text].astype(np.float64), exact) <= most + 0.01, text


def test_fast_functions():
    found = elementwise("float", list(FAST), "sm_90", X, Y)
    for text, function in FAST.items():
        exact = function(X.astype(np.float64))
        assert np.max(np.abs(found[text] - exact) / np.maximum(1, np.abs(exact))) <= 2**-20.5, text


def signed(value):
    return (value + 2**31) % 2**32 - 2**31


def quotient(a, b):
    """C's division, toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


SWITCH = """__device__ int chosen(int x) {
  switch (x & 7) { case 0: return 5; case 1: return x * 3; case 2: return x ^ 7; case 3: return -x; case 4: return 99;
                   case 5: return x / 3; default: return 1; } }"""
WHOLE = {
    "x / y": quotient,
    "x % y": lambda a, b: a - b * quotient(a, b),
    "(int)((unsigned)x / (unsigned)y)": lambda a, b: a % 2**32 // b,
    "(int)((long long)x * 1234567LL / y)": lambda a, b: quotient(a * 1234567, b),
    "(int)((unsigned long long)x % y)": lambda a, b: a % 2**64 % b,
    "__popc(x)": lambda a, b: (a % 2**32).bit_count(),
    "__clz(x)": lambda a, b: 32 - (a % 2**32).bit_length(),
    "__ffs(x)": lambda a, b: (a & -a).bit_length() if a else 0,
    "(int)__brev(x)": lambda a, b: int(f"{a % 2**32:032b}"[::-1], 2),
    "(int)__byte_perm(x, y, 0x3715)": lambda a, b: sum(
        (((a % 2**32) | (b % 2**32) << 32) >> 8 * digit & 255) << 8 * at for at, digit in enumerate((5, 1, 7, 3))
    ),
    "__mulhi(x, y)": lambda a, b: a * b >> 32,
    "(int)__umulhi(x, y)": lambda a, b: (a % 2**32) * b >> 32,
    "(int)__mul64hi((long long)x << 30, y)": lambda a, b: (a << 30) * b >> 64,
    "(int)__funnelshift_l(x, y, 5)": lambda a, b: ((b % 2**32) << 32 | a % 2**32) << 5 >> 32,
    "(int)__sad(x, y, 1)": lambda a, b: abs(a - b) + 1,
    "__hadd(x, y)": lambda a, b: a + b >> 1,
    "__dp4a(x, y, 1)": lambda a, b: (
        sum(
            (u ^ 128) * (v ^ 128) - 128 * ((u ^ 128) + (v ^ 128)) + 128**2
            for u, v in zip(eights(a), eights(b), strict=True)
        )
        + 1
    ),
    "(int)__dp4a((unsigned)x, (unsigned)y, 1u)": lambda a, b: (
        sum(u * v for u, v in zip(eights(a), eights(b), strict=True)) + 1
    ),
    "max(x, y)": max,
    "x >> (y & 31)": lambda a, b: a >> (b & 31),
    "(int)((long long)x << (y & 63))": lambda a, b: a << (b & 63),
    "__float2int_rn((float)x)": lambda a, b: min(int(np.float32(a)), 2**31 - 1),
    "(short)x": lambda a, b: (a + 2**15) % 2**16 - 2**15,
    "(unsigned char)x": lambda a, b: a % 256,
}


def eights(a):
    return (a % 2**32).to_bytes(4, "little")


@pytest.mark.parametrize("arch", ARCHS)
def test_functions_of_integers(arch):
    generator = np.random.default_rng(3)
    x = generator.integers(-(2**31), 2**31, N).astype(np.int32)
    y = generator.integers(1, 1000, N).astype(np.int32)
    x[:4] = 0, -1, 2**31 - 1, -(2**31)
    found = elementwise("int", list(WHOLE), arch, x, y)
    for text, oracle in WHOLE.items():
        expected = [signed(oracle(int(a), int(b))) for a, b in zip(x, y, strict=True)]
        assert found[text].tolist() == expected, text


LANES = {
    "__shfl_sync(~0u, x, 3)": lambda x, lane: x[3],
    "__shfl_xor_sync(~0u, x, 5)": lambda x, lane: x[lane ^ 5],
    "__shfl_down_sync(~0u, x, 3)": lambda x, lane: x[min(lane + 3, 31)] if lane + 3 < 32 else x[lane],
    "__shfl_up_sync(~0u, x, 3, 8)": lambda x, lane: x[lane - 3] if lane % 8 >= 3 else x[lane],
    "(int)__ballot_sync(~0u, x > 0)": lambda x, lane: signed(sum(1 << i for i in range(32) if x[i] > 0)),
    "__any_sync(~0u, x > 90)": lambda x, lane: int(max(x) > 90),
    "__all_sync(~0u, x > -101)": lambda x, lane: 1,
    "(int)__match_any_sync(~0u, x / 50)": lambda x, lane: signed(
        sum(1 << i for i in range(32) if quotient(x[i], 50) == quotient(x[lane], 50))
    ),
    "(int)__shfl_sync(~0u, (double)x, 7)": lambda x, lane: x[7],
    "__ldg(X + i)": lambda x, lane: x[lane],
}


@pytest.mark.parametrize("arch", ARCHS)
def test_exchanges_between_lanes(arch):
    x = np.random.default_rng(4).integers(-100, 100, N).astype(np.int32)
    found = elementwise("int", list(LANES), arch, x, x)
    for text, oracle in LANES.items():
        warps = [x[start : start + 32].tolist() for start in (0, 32)]
        assert found[text].tolist() == [oracle(warp, lane) for warp in warps for lane in range(32)], text


def test_votes_of_a_block_a_switch_and_a_local_array():
    code = (
        SWITCH
        + """
    __global__ void each(const int* x, int* z) { int i = threadIdx.x, t[16];
      for (int j = 0; j < 16; ++j) t[j] = j * x[i];
      z[i] = __syncthreads_count(x[i] > 0) + 1000 * __syncthreads_and(x[i] > -200) + chosen(x[i]) + t[x[i] & 15]; }"""
    )
    x = np.random.default_rng(5).integers(-100, 100, N).astype(np.int32)
    z = np.zeros_like(x)
    run = gm.emulate(code, "each", 1, N, [x, z])
    by_case = [lambda a: 5, lambda a: 3 * a, lambda a: a ^ 7, lambda a: -a, lambda a: 99, lambda a: quotient(a, 3)]
    chosen = [(by_case + [lambda a: 1] * 2)[a & 7](a) for a in x.tolist()]
    expected = [int((x > 0).sum()) + 1000 + c + (a & 15) * a for a, c in zip(x.tolist(), chosen, strict=True)]
    assert z.tolist() == expected
    assert run.local.loads.requests > 0


# ---- the toolkit's own headers ----


@pytest.mark.parametrize("arch", ARCHS)
def test_pairs_of_halves(arch):
    code = """#include <cuda_fp16.h>
    __global__ void f(const __half2* x, const __half2* y, __half2* z) {
      int i = threadIdx.x; z[i] = __hfma2(x[i], y[i], __hadd2(h2rint(x[i]), __hneg2(y[i]))); }"""
    x, y = X.astype(np.float16), Y.astype(np.float16)
    z = np.zeros_like(x)
    run = gm.emulate(code, "f", 1, N // 2, [x, y, z], arch=arch)
    inner = (np.rint(x) - y).astype(np.float64)
    np.testing.assert_array_equal(z, (x.astype(np.float64) * y + inner).astype(np.float16))
    assert run.flops == 4 * N - N  # hadd2 counts one each, hfma2 two


HALVES = {  # of x and y > 0
    "hexp(x)": lambda x, y: np.exp(x),
    "hexp2(x)": lambda x, y: np.exp2(x),
    "hlog(y)": lambda x, y: np.log(y),
    "hlog2(y)": lambda x, y: np.log2(y),
    "hlog10(y)": lambda x, y: np.log10(y),
    "hsqrt(y)": lambda x, y: np.sqrt(y),
    "hrsqrt(y)": lambda x, y: 1 / np.sqrt(y),
    "hrcp(y)": lambda x, y: 1 / y,
    "hsin(x)": lambda x, y: np.sin(x),
    "hcos(x)": lambda x, y: np.cos(x),
    "htanh(x)": lambda x, y: np.tanh(x),
    "hfloor(x)": lambda x, y: np.floor(x),
    "hceil(x)": lambda x, y: np.ceil(x),
    "htrunc(x)": lambda x, y: np.trunc(x),
    "hrint(x)": lambda x, y: np.rint(x),
    "x / y": np.divide,
    "__hfma(x, y, x)": lambda x, y: x * y + x,
    "__hmax(x, y)": np.maximum,
    "__hmin(x, y)": np.minimum,
    "__habs(__hneg(x))": lambda x, y: np.abs(x),
    "T((float)x * (float)y)": np.multiply,
    "__shfl_xor_sync(~0u, x, 1)": lambda x, y: x.reshape(-1, 2)[:, ::-1].reshape(-1),
}


@pytest.mark.parametrize(
    ("kind", "digits", "arch"),
    [*(("__half", 11, arch) for arch in ARCHS), *(("__nv_bfloat16", 8, arch) for arch in ARCHS[1:])],
)
def test_functions_of_halves(kind, digits, arch):
    """Within two units in the last place of their result; bf16 has not all of them before sm_80."""
    stores = "\n".join(f"z[{row} * {N} + i] = {text};" for row, text in enumerate(HALVES))
    code = f"""#include <cuda_fp16.h>
    #include <cuda_bf16.h>
    typedef {kind} T;
    __global__ void each(const float* X, const float* Y, float* z) {{
      int i = threadIdx.x; T x = X[i], y = Y[i];\n{stores} }}"""
    x, y = np.round(X * 8) / 8, np.round(Y * 8) / 8
    z = np.zeros((len(HALVES), N), np.float32)
    assert gm.emulate(code, "each", 1, N, [x, y, z], arch=arch).findings == ()
    for text, found in zip(HALVES, z, strict=True):
        exact = HALVES[text](x.astype(np.float64), y.astype(np.float64))
        unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-10))) + 1 - digits)
        assert np.max(np.abs(found - exact) / unit) <= 2, text


@pytest.mark.parametrize("arch", ARCHS)
def test_matrix_fragments_of_the_official_header(arch):
    code = """#include <mma.h>
    using namespace nvcuda;
    __global__ void product(const half* a, const half* b, float* c) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
      wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
      wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
      wmma::fill_fragment(fc, 1.f);
      wmma::load_matrix_sync(fa, a, 16); wmma::load_matrix_sync(fb, b, 16); wmma::mma_sync(fc, fa, fb, fc);
      for (int i = 0; i < fc.num_elements; ++i) fc.x[i] *= 2;
      wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major); }"""
    a, b = (np.random.default_rng(seed).integers(-3, 4, (16, 16)).astype(np.float16) for seed in (6, 7))
    c = np.zeros((16, 16), np.float32)
    run = gm.emulate(code, "product", 1, 32, [a, b, c], arch=arch)
    np.testing.assert_array_equal(c, 2 * (a.astype(np.float32) @ b.T.astype(np.float32) + 1))
    assert run.findings == ()


@pytest.mark.parametrize("arch", ARCHS)
def test_groups_of_threads(arch):
    code = """#include <cooperative_groups.h>
    #include <cooperative_groups/reduce.h>
    #include <cstdint>
    namespace cg = cooperative_groups;
    __global__ void sum(const int* x, std::int32_t* total) {
      auto block = cg::this_thread_block();
      auto tile = cg::tiled_partition<32>(block);
      __shared__ int part[4];
      int mine = cg::reduce(tile, x[block.thread_rank() + blockIdx.x * block.size()], cg::plus<int>());
      if (tile.thread_rank() == 0) part[tile.meta_group_rank()] = mine;
      block.sync();
      if (block.thread_rank() == 0) atomicAdd(total, part[0] + part[1] + part[2] + part[3]); }"""
    x, total = np.arange(256, dtype=np.int32), np.zeros(1, np.int32)
    run = gm.emulate(code, "sum", 2, 128, [x, total], arch=arch)
    assert (total[0], run.findings) == (x.sum(), ())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_barrier_of_the_library(arch):
    code = """#include <cuda/barrier>
    __global__ void turn(const float* x, float* y) {
      __shared__ float s[64];
      __shared__ cuda::barrier<cuda::thread_scope_block> here;
      if (threadIdx.x == 0) init(&here, 64);
      __syncthreads();
      cuda::memcpy_async(s + threadIdx.x, x + threadIdx.x, sizeof(float), here);
      here.arrive_and_wait();
      y[threadIdx.x] = s[63 - threadIdx.x]; }"""
    y = np.zeros_like(X)
    run = gm.emulate(code, "turn", 1, N, [X, y], arch=arch)
    np.testing.assert_array_equal(y, X[::-1])
    assert run.findings == ()


def test_headers_are_found_without_those_of_nvrtc():
    """NVRTC before 13.3 brings none: a toolkit's, or its wheels', take their place."""
    installed = [Path(one) for one in include._installed()]
    if not installed:
        pytest.skip("no CUDA toolkit and no wheels of its headers here")
    assert any((one / "cuda_fp16.h").exists() for one in installed)


# ---- PTX of other compilers; how each is launched stands in test_emulator_ptx.py ----


def test_triton_adds():
    x, y = (np.random.default_rng(seed).standard_normal(1000).astype(np.float32) for seed in (8, 9))
    out = np.zeros_like(x)
    run = gm.emulate(PTX / "triton_add.ptx", "add", 4, 128, [x, y, out, np.int32(1000), None, None])
    np.testing.assert_array_equal(out, x + y)
    assert run.findings == ()
    assert run.global_.stores.used == out.nbytes


def test_triton_multiplies_matrices():
    m, n, k = 100, 90, 72
    a, b = (np.random.default_rng(1).standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n)))
    c = np.zeros((m, n), np.float32)
    args = [a, b, c, *map(np.int32, (m, n, k, k, n, n)), None, None]
    run = gm.emulate((PTX / "triton_matmul.ptx").read_text(), "matmul", (4, 3), 128, args, shared=4096)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = (2.5 * k + 2) * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))
    assert np.max(np.abs(c - exact) / bound) <= 1
    assert run.findings == ()
    assert run.instructions["mma"] > 0


def test_triton_takes_a_softmax():
    rows, n = 5, 100
    x = np.random.default_rng(1).standard_normal((rows, n)).astype(np.float32)
    out = np.zeros_like(x)
    run = gm.emulate(PTX / "triton_softmax.ptx", "softmax", rows, 128, [x, out, n, None, None], shared=16)
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    assert np.max(np.abs(out / (powers / powers.sum(axis=1, keepdims=True)) - 1)) <= 1e-6
    assert run.findings == ()


def as_numba(array):
    """An array as Numba passes it: parent, meminfo, elements, itemsize, address, shape, strides."""
    return [0, 0, array.size, array.itemsize, array, *array.shape, *array.strides]


def test_numba_adds():
    x, y = (np.random.default_rng(seed).standard_normal(200).astype(np.float32) for seed in (8, 9))
    out = np.zeros_like(x)
    run = gm.emulate(PTX / "numba_add.ptx", "add", 2, 128, [*as_numba(x), *as_numba(y), *as_numba(out)])
    np.testing.assert_array_equal(out, x + y)
    assert {line.file for line in run.lines} != {"ptx"}


def test_numba_multiplies_matrices():
    a, b = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((40, 24), (24, 33)))
    c = np.zeros((40, 33), np.float32)
    args = [*as_numba(a), *as_numba(b), *as_numba(c)]
    run = gm.emulate(PTX / "numba_matmul.ptx", "matmul", (3, 3), (16, 16), args)
    bound = 24 * 2.0**-23 * (np.abs(a).astype(np.float64) @ np.abs(b))
    assert np.max(np.abs(c - a.astype(np.float64) @ b) / bound) <= 1
    assert run.findings == ()


# ---- arguments ----


def copied(x, kind="unsigned char", size=1):
    """What a kernel that copies elements of a C++ type makes of an array."""
    y, count = np.zeros_like(x), x.nbytes // size
    code = f"""__global__ void copy(const {kind}* x, {kind}* y, int n) {{
      if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x]; }}"""
    assert gm.emulate(code, "copy", 1, max(count, 1), [x, y, np.int32(count)]).findings == ()
    return y


@pytest.mark.parametrize(
    "x",
    [
        np.arange(8, dtype=np.float16),
        np.arange(8, dtype=np.uint8),
        np.array([True, False]),
        np.arange(4) * (1 + 2j),
        np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(3.5),
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6.0).reshape(2, 3).T,
        np.array([b"ab", b"cd"]),
        np.array(["2026-11-20"], "datetime64[D]"),
    ],
    ids=lambda x: f"{x.dtype}{x.shape}",
)
def test_arrays_of_any_type_and_order(x):
    y = copied(x)
    assert y.tobytes("A") == x.tobytes("A")


def test_bfloat16_of_another_package():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(8).astype(ml_dtypes.bfloat16)
    assert (copied(x, "unsigned short", 2) == x).all()


def test_one_array_twice_and_a_view():
    x = np.arange(N, dtype=np.float32)
    code = "__global__ void add(float* x, const float* y) { x[threadIdx.x] += y[threadIdx.x]; }"
    gm.emulate(code, "add", 1, N, [x, x])
    np.testing.assert_array_equal(x, 2.0 * np.arange(N))
    gm.emulate(code, "add", 1, 32, [x[32:], x[:32]])
    np.testing.assert_array_equal(x[32:], 2.0 * np.arange(32, N) + 2.0 * np.arange(32))


def test_scalars_and_structs():
    code = """#include <cuda_fp16.h>
    struct Pair { float a; int b[3]; };
    __global__ void each(float* z, __half h, float2 c, bool q, char s, double d, Pair p, unsigned u, long long w) {
      z[0] = __half2float(h) + c.y + q + s + d + p.a + p.b[2] + u + w; }"""
    pair = np.array([(0.25, (1, 2, 3))], dtype=[("a", "f4"), ("b", "i4", 3)])[0]
    z = np.zeros(1, np.float32)
    given = [z, np.float16(1.5), np.complex64(1 + 2j), np.True_, np.int8(-3), 4.0, pair, 7, np.int64(-1)]
    gm.emulate(code, "each", 1, 1, given)
    assert z[0] == 1.5 + 2 + 1 - 3 + 4 + 0.25 + 3 + 7 - 1
    given[6] = pair.tobytes()
    z[0] = 0
    gm.emulate(code, "each", 1, 1, given)
    assert z[0] == 14.75


def test_variables_of_the_module():
    code = """__constant__ float scale[2] = {1, 2}; __device__ int calls = 5; __device__ float sums[4];
    __global__ void f(float* z) { sums[threadIdx.x] = scale[threadIdx.x & 1] * z[threadIdx.x];
      atomicAdd(&calls, 1); z[threadIdx.x] = calls > 0; }"""
    z, sums, calls = np.arange(4, dtype=np.float32), np.zeros(4, np.float32), np.zeros(1, np.int32)
    gm.emulate(code, "f", 1, 4, [z], variables={"sums": sums, "calls": calls})
    assert (sums.tolist(), calls[0]) == ([0, 2, 2, 6], 4)
    gm.emulate(code, "f", 1, 4, [np.ones(4, np.float32)], variables={"sums": sums, "scale": np.float32([10, 20])})
    assert sums.tolist() == [10, 20, 10, 20]


class Tensor:
    """An array of another library, whose repr is long."""

    def __repr__(self):
        return "tensor([\n" + "0., " * 100


OVERLAP = np.zeros(N, np.float32)
FOREIGN = np.zeros(N, np.dtype(np.float32).newbyteorder())
ARGUMENTS = {
    "too few": (
        [X],
        gm.ArgumentError,
        r"1 argument: kernel \w*twice\w* takes 2 \(8 bytes.*pointer.*, 4 bytes.*give one",
    ),
    "too many": ([X, 1, 2], gm.ArgumentError, "3 arguments.*takes 2"),
    "a list": (
        [[1.0, 2.0], 1],
        gm.ArgumentError,
        r"argument 0 is \[1.0, 2.0\] of type list.*pass a numpy.uint64, or an array",
    ),
    "an array of another library": ([Tensor(), 1], gm.ArgumentError, "argument 0 is of type Tensor: .*or an array"),
    "an array for a list": (
        X,
        gm.ArgumentError,
        r"args is of type ndarray: a list of the kernel's arguments, \[x, y\]",
    ),
    "a number for an array": ([1.5, 1], gm.ArgumentError, "argument 0 is 1.5 of type float: .*pointer.*an array"),
    "an array for a number": ([X, X], gm.ArgumentError, "argument 1 is an array of float32.*4 bytes.*numpy.uint32"),
    "None for a number": ([X, None], gm.ArgumentError, "argument 1 is None.*pass a numpy.uint32"),
    "a float for an int": ([X, 1.0], gm.ArgumentError, "argument 1 is 1.0 of type float.*numpy.uint32"),
    "another size": ([X, np.int64(1)], gm.ArgumentError, "argument 1 is 1 of type int64.*4 bytes.*numpy.uint32"),
    "float bits": ([X, np.float32(1)], gm.ArgumentError, "argument 1 is 1.0 of type float32.*numpy.uint32"),
    "too large": ([X, 2**32], gm.ArgumentError, "argument 1 is 4294967296.*pass a number of 32 bits"),
    "bytes": ([X, b"abc"], gm.ArgumentError, "argument 1 is 3 bytes.*pass 4 bytes"),
    "gaps": ([np.zeros((8, 8))[:, ::2], 1], gm.LayoutError, "argument 0 has strides.*ascontiguousarray"),
    "objects": ([np.array([None]), 1], gm.ArgumentError, "argument 0 holds Python objects.*astype"),
    "byte order": ([FOREIGN, 1], gm.LayoutError, "argument 0 has the foreign byte order.*astype"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_wrong_argument_is_refused_in_words(case):
    args, error, words = ARGUMENTS[case]
    with pytest.raises(error, match=words):
        gm.emulate(TWICE, "twice", 1, N, args)


def test_overlapping_arrays_are_refused():
    code = "__global__ void f(float* x, float* y) { x[0] = y[0]; }"
    with pytest.raises(gm.LayoutError, match="argument 1 overlaps argument 0: pass one array and an offset"):
        gm.emulate(code, "f", 1, 1, [OVERLAP[1:], OVERLAP[:-1]])


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"nowhere": X}, "variable 'nowhere': this module has table"),
        ({"table": X}, "variable table has 16 bytes, the array 256: pass as many"),
        ({"table": [1.0]}, r"variable table is \[1.0\]: pass a NumPy array"),
    ],
)
def test_a_wrong_variable_is_refused(variables, words):
    code = "__device__ float table[4]; __global__ void f(float* z) { z[0] = table[0]; }"
    with pytest.raises(gm.ArgumentError, match=words):
        gm.emulate(code, "f", 1, 1, [np.zeros(1, np.float32)], variables=variables)


def test_a_read_only_array_may_be_read_and_not_written():
    code = "__global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }"
    x, y = X.copy(), np.zeros_like(X)
    x.flags.writeable = False
    gm.emulate(code, "f", 1, N, [x, y])
    np.testing.assert_array_equal(y, x)
    other = np.zeros_like(X)
    swapped = "__global__ void f(float* z, float* x, const float* y) { z[threadIdx.x] = x[threadIdx.x] = 1 + y[0]; }"
    with pytest.raises(gm.LayoutError, match="argument 1 is read-only, and the kernel writes it: pass a writable copy"):
        gm.emulate(swapped, "f", 1, N, [other, x, y])
    assert not other.any()
    np.testing.assert_array_equal(x, X)


def test_an_error_leaves_arrays_as_they_were():
    code = """__global__ void f(long long* z) { z[threadIdx.x] = 1; __syncthreads();
      if (blockIdx.x == 1) z[threadIdx.x] = clock64(); }"""
    z = np.zeros(64, np.int64)
    with pytest.raises(gm.EmulationError, match=r"special register %clock64 of .*\(kernel.cu:2\) is not modelled"):
        gm.emulate(code, "f", 2, 64, [z])
    assert not z.any()
    gm.emulate(code, "f", 1, 64, [z])  # it is not reached
    assert z.all()


# ---- launches ----

BOUNDED = "__global__ void __launch_bounds__(64) f(float* x) { x[0] = 1; }"
LARGE = (
    "__global__ void f(float* x) { __shared__ float s[13000]; s[threadIdx.x] = x[0]; __syncthreads(); x[0] = s[99]; }"
)
DYNAMIC = "__global__ void f(float* x) { extern __shared__ float s[]; s[threadIdx.x] = 1; x[0] = s[threadIdx.x]; }"
FIXED = "__global__ void __cluster_dims__(2, 1, 1) f(float* x) { x[0] = 1; }"
PLAIN = "__global__ void f(float* x) { x[0] = 1; }"
LAUNCHES = {
    "no blocks": (PLAIN, (0, 1), {}, "grid=0: a whole number >= 1, or a tuple of up to three"),
    "half a block": (PLAIN, (1.5, 1), {}, "grid=1.5: a whole number"),
    "words": (PLAIN, (1, "64"), {}, "block='64': a whole number"),
    "four sides": (PLAIN, ((1, 1, 1, 1), 1), {}, r"grid=\(1, 1, 1, 1\).*up to three"),
    "a tall grid": (PLAIN, ((1, 65536), 1), {}, r"grid=\(1, 65536, 1\): no more than \(2147483647, 65535, 65535\)"),
    "a deep block": (PLAIN, (1, (1, 1, 65)), {}, r"block=\(1, 1, 65\): no more than \(1024, 1024, 64\)"),
    "many threads": (PLAIN, (1, (64, 32)), {}, r"2048 threads; a block has at most 1024"),
    "launch bounds": (BOUNDED, (1, 65), {}, "65 threads, and it was compiled for at most 64.*__launch_bounds__"),
    "static shared": (LARGE, (1, 32), {}, "declares 52000 bytes of shared memory, and 49152 is the most.*extern"),
    "dynamic shared": (DYNAMIC, (1, 32), {"shared": 232449}, "block of sm_90 has at most 232448"),
    "of that device": (DYNAMIC, (1, 32), {"shared": 65537, "arch": "sm_75"}, "sm_75 has at most 65536.*arch"),
    "negative shared": (DYNAMIC, (1, 32), {"shared": -1}, r"shared=-1: .* >= 0"),
    "clusters before Hopper": (PLAIN, (4, 1), {"cluster": 2, "arch": "sm_80"}, "sm_80 has no clusters.*sm_90"),
    "a large cluster": (PLAIN, (32, 1), {"cluster": 32}, "32 blocks; a cluster has at most 16"),
    "an odd grid": (PLAIN, (3, 1), {"cluster": 2}, r"each side of grid=\(3, 1, 1\) must be a multiple"),
    "its own cluster": (FIXED, (4, 1), {"cluster": 4}, r"compiled for clusters of \(2, 1, 1\) alone"),
    "its own cluster, odd": (FIXED, (3, 1), {}, "must be a multiple of the cluster's"),
    "no architecture": (PLAIN, (1, 1), {"arch": "hopper"}, "arch='hopper': .*such as sm_80"),
    "half a byte of shared memory": (DYNAMIC, (1, 1), {"shared": 1.5}, "shared=1.5: .* whole number >= 0"),
    "a negative seed": (PLAIN, (1, 1), {"seed": -1}, "seed=-1: a whole number >= 0, or None"),
    "a file by its name": ("kernel.cu", (1, 1), {}, "source='kernel.cu': .* or a pathlib.Path of its file"),
    "bytes": (b"__global__ void f() {}", (1, 1), {}, "source=b'__global.* the text of a kernel"),
    "a string of options": (PLAIN, (1, 1), {"options": "-DN=4"}, "options='-DN=4': a tuple of options"),
    "a number among options": (PLAIN, (1, 1), {"options": (4,)}, r"options=\(4,\): a tuple of options"),
    "a number for an architecture": (PLAIN, (1, 1), {"arch": 90}, "arch=90: .*such as sm_80"),
    "no shared memory": (PLAIN, (1, 1), {"shared": None}, "shared=None: .* whole number >= 0"),
    "half a seed": (PLAIN, (1, 1), {"seed": 1.5}, "seed=1.5: a whole number >= 0"),
    "a list of variables": (PLAIN, (1, 1), {"variables": [1]}, "variables is of type list: arrays by the names"),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_a_launch_that_a_driver_refuses_is_an_error(case):
    code, dims, options, words = LAUNCHES[case]
    x = np.zeros(4, np.float32)
    with pytest.raises(gm.ArgumentError, match=words):
        gm.emulate(code, "f", *dims, [x], **options)
    assert not x.any()


def test_launches_at_the_limits():
    x = np.zeros(1, np.float32)
    for code, block, options in ((DYNAMIC, 32, {"shared": 232448}), (BOUNDED, 64, {}), (FIXED, 1, {"cluster": 2})):
        x[0] = 0
        gm.emulate(code, "f", 2, block, [x], **options)
        assert x[0] == 1


def test_blocks_of_a_required_size():
    text = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f(.param .u64 x) .reqntid 8, 2 { ret; }"
    with pytest.raises(gm.ArgumentError, match=r"block=\(16, 1, 1\): it was compiled for blocks of \(8, 2, 1\) alone"):
        gm.emulate(text, "f", 1, 16, [None])
    assert gm.emulate(text, "f", 1, (8, 2), [None]).findings == ()
    with pytest.raises(
        gm.ArgumentError, match="this PTX is for sm_80, which older devices cannot run; pass arch='sm_80'"
    ):
        gm.emulate(text, "f", 1, (8, 2), [None], arch="sm_75")
    with pytest.raises(gm.ArgumentError, match="PTX is not compiled"):
        gm.emulate(text, "f", 1, (8, 2), [None], options=("-DN=1",))
    with pytest.raises(gm.ArgumentError, match="kernel 'g': this PTX has f; name one of them"):
        gm.emulate(text, "g", 1, (8, 2), [None])


# ---- names and sources ----

SEVERAL = """
template <class T, int N> __global__ void fill(T* x) { x[threadIdx.x] = N; }
namespace inner { __global__ void fill(float* x) { x[threadIdx.x] = 5; } }
extern "C" __global__ void plain(float* x) { x[threadIdx.x] = 6; }
__global__ void over(float* x) { x[threadIdx.x] = VALUE; }
__global__ void over(int* x) { x[threadIdx.x] = 8; }
"""


@pytest.mark.parametrize(
    ("name", "value"), [("fill<float, 4>", 4), ("inner::fill", 5), ("plain", 6), ("_Z4overPf", 7), ("_Z4overPi", 8)]
)
def test_a_kernel_by_its_name(name, value):
    x = np.zeros(32, np.int32 if name == "_Z4overPi" else np.float32)
    run = gm.emulate(SEVERAL, name, 1, 32, [x], options=("-DVALUE=7",))
    assert (x == value).all()
    assert run.kernel == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", 'identifier "nowhere" is undefined(.|\n)*kernels of this source: fill, plain, over; an instance'),
        ("fill", "cannot determine which instance(.|\n)*named with its arguments"),
        ("over", "overloaded(.|\n)*by its symbol"),
    ],
)
def test_a_kernel_that_is_not_there(name, words):
    with pytest.raises(gm.CompileError, match=words):
        gm.emulate(SEVERAL, name, 1, 32, [X], options=("-DVALUE=7",))
    with pytest.raises(gm.ArgumentError, match=r"kernel '_Z4overPd': this PTX has .*_Z4overPf"):
        gm.emulate(SEVERAL, "_Z4overPd", 1, 32, [X], options=("-DVALUE=7",))


def test_an_error_of_the_compiler_is_its_own_words_alone():
    code = "__global__ void f(float* x) { int unused; x[0] = missing; }"
    with pytest.raises(gm.CompileError, match=r'kernel.cu\(1\): error: identifier "missing" is undefined') as caught:
        gm.emulate(code, "f", 1, 1, [X])
    assert "warning" not in str(caught.value)


def test_a_file_and_what_it_includes_beside_it(tmp_path):
    (tmp_path / "value.h").write_text("#define VALUE 3\n")
    source = tmp_path / "own.cu"
    source.write_text('#include "value.h"\n__global__ void f(float* x) {\n  x[threadIdx.x] = VALUE;\n}\n')
    x = np.zeros(32, np.float32)
    run = gm.emulate(source, "f", 1, 32, [x])
    assert (x == 3).all()
    assert [str(line) for line, counts in run.lines.items() if counts.global_.stores.requests] == ["own.cu:3"]
    (tmp_path / "value.h").write_text("#define VALUE 4\n")
    gm.emulate(source, "f", 1, 32, [x])
    assert (x == 4).all()


# ---- what is not modelled ----


REFUSED = {
    'asm volatile("mov.u64 %0, %%clock64;" : "=l"(z[0]));': "special register %clock64 of .*kernel.cu:1",
    'int a = 1; asm volatile("vabsdiff4.u32.u32.u32.add %0, %0, %0, %0;" : "+r"(a)); z[0] = a;': (
        r"instruction 'vabsdiff4.*kernel.cu:1\) is not modelled: docs/emulator.md"
    ),
    "z[0] = (long long)malloc(8);": r"a call of malloc \(kernel.cu:1\) is not modelled: .*-DEMULATED",
    "z[0] = tex1Dfetch<float>((cudaTextureObject_t)z[0], 3);": r"instruction 'tex.1d.*kernel.cu:1\) is not modelled",
    "z[0] = fib(z[0]);": "calls itself: recursion is not modelled; use a loop",
    "z[0] = table[z[0] & 1](z[0]);": "addresses are not",
}
BEFORE = {
    "fib": "__device__ __noinline__ int fib(int n) { return n < 2 ? 1 : fib(n - 1) + fib(n - 2); } ",
    "table": "__device__ int one(int n) { return n; } __device__ int (*table[2])(int) = {one, one}; ",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_is_not_modelled_is_an_error_with_its_line(statement):
    before = next((text for name, text in BEFORE.items() if name in statement), "")
    z = np.full(1, 7, np.int64)
    with pytest.raises(gm.EmulationError, match=REFUSED[statement]):
        gm.emulate(f"{before}__global__ void f(long long* z) {{ {statement} }}", "f", 1, 1, [z])
    assert z[0] == 7


def test_a_trap_and_an_assertion_are_findings():
    code = """#include <cassert>
    __global__ void f(int* x) {
      assert(x[threadIdx.x] < 40);
      x[threadIdx.x] = -1;
      if (threadIdx.x == 3) __trap();
    }"""
    x = np.arange(64, dtype=np.int32)
    run = gm.emulate(code, "f", 1, 64, [x])
    assert [(one.line.number, one.count) for one in run.findings] == [(3, 24), (5, 1)]
    assert "thread 40 of block 0 fails an assert()" in str(run.findings[0])
    assert "thread 3 of block 0 traps" in str(run.findings[1])
    assert (x == np.where(np.arange(64) < 40, -1, np.arange(64))).all()
    assert gm.emulate(code, "f", 1, 3, [np.zeros(3, np.int32)]).findings == ()


# ---- what a run tells ----

TRANSPOSE = """
__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[32][32 + PAD];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
  __syncthreads();
  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}"""


def transposed(pad, **options):
    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    y = np.zeros_like(x)
    run = gm.emulate(TRANSPOSE, "transpose", 1, (32, 32), [x, y], options=(f"-DPAD={pad}",), **options)
    np.testing.assert_array_equal(y, x.T)
    return run


def test_bank_conflicts_of_a_transpose():
    """32 lanes read one column: 32 passes for each of 32 warps, 31 of them conflicts; a column more, and none."""
    assert transposed(1).shared.bank_conflicts == 0
    shared = transposed(0).shared
    assert (shared.loads.wavefronts, shared.loads.wavefronts_ideal, shared.loads.bank_conflicts) == (1024, 32, 992)
    assert (shared.stores.wavefronts, shared.stores.bank_conflicts) == (32, 0)
    assert shared.bank_conflicts == 992


def test_a_run_in_words():
    run = transposed(0)
    assert repr(run) == "<Run of transpose: 992 bank conflicts, 0 findings>"
    said = str(run)
    assert "transpose: grid 1 x 1 x 1, block 32 x 32 x 1" in said
    assert re.search(r"^global loads +32 +128 +4,096$", said, re.MULTILINE)
    assert re.search(r"^shared loads +32 +1,024 +32 +992$", said, re.MULTILINE)
    assert "kernel.cu:6: 992 bank conflicts" in said
    assert said.endswith("no findings")
    assert len(said.splitlines()) <= 12
    code = TRANSPOSE.replace("__syncthreads();", "")
    args = [np.arange(1024, dtype=np.float32), np.zeros(1024, np.float32)]
    broken = gm.emulate(code, "transpose", 1, (32, 32), args, options=("-DPAD=1",))
    assert "race" in str(broken)
    assert "1 finding>" in repr(broken)


def test_any_order_of_blocks_and_warps_gives_the_same():
    for seed in range(3):
        assert transposed(1, seed=seed).findings == ()


def test_merged_and_as_written():
    code = """__global__ void f(float* x) {
      __shared__ float s[64];
      float* own = s + 2 * threadIdx.x;
      own[0] = x[0];
      own[1] = x[1];
      x[threadIdx.x] = own[0] + own[1]; }"""
    counts = {
        merge: gm.emulate(code, "f", 1, 32, [np.zeros(32, np.float32)], merge=merge).shared for merge in (True, False)
    }
    assert (counts[False].stores.requests, counts[True].stores.requests) == (2, 1)
    assert (counts[False].bank_conflicts, counts[True].bank_conflicts) == (2, 0)  # every second bank, then all


def test_the_examples_of_the_document():
    """docs/emulator.md is right in what it shows, line by line."""
    path = Path(__file__).parents[1] / "docs" / "emulator.md"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(path), module_relative=False, optionflags=options)
    assert (failed, tried > 15) == (0, True)
