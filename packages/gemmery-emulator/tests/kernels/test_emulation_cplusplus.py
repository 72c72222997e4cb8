"""gm.emulate on CUDA C++: what functions, lanes and the toolkit's own headers compute."""

import math
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery.cuda import include
from gemmery_emulator.kernels import host_runtime

ARCHS = ("sm_75", "sm_80", "sm_90")
N = 64
X = np.random.default_rng(1).uniform(-4, 4, N).astype(np.float32)
Y = np.random.default_rng(2).uniform(0.5, 3, N).astype(np.float32)

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


@pytest.mark.many
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


def test_a_type_with_marks_and_containers_of_the_host():
    code = """#include <map>
#include <string>
#include <vector>
template <int N> __device__ class Few { public: int v[N]; __device__ int top() const { return v[N - 1]; } };
class Scene {
 public:
  std::vector<float> host; std::string name; std::map<int, float> values; int n;
  Scene() { host.resize(3); }
  __device__ int twice() const { return 2 * n; }
};
__global__ void f(int* x, const Scene s, Few<2> few) { *x = s.twice() + few.top() + int(sizeof(Scene)); }
int main() {
  int* x; cudaMallocManaged(&x, 4);
  Scene s; s.n = 5; Few<2> few{{1, 7}};
  f<<<1, 1>>>(x, s, few);
  return *x == 17 + int(sizeof(Scene)) ? 0 : 1;
}"""
    program = host_runtime.run_program(code)
    assert (program.status, program.notes) == (0, ())


def test_integers_of_128_bits_are_divided():
    x = np.random.default_rng(7).integers(-(2**62), 2**62, 65)
    quotients, remainders = np.zeros((2, 64, 2), np.uint64)
    code = """typedef unsigned long long u64;
    __device__ void put(u64* to, __int128 value) { to[0] = u64(value); to[1] = u64(value >> 64); }
    __global__ void divide(u64* q, u64* r, const long long* x) {
      int i = threadIdx.x;
      __int128 a = __int128(x[i]) * x[i + 1], b = x[i + 1] >> i | 1;
      put(q + 2 * i, a / b), put(r + 2 * i, a % b);
    }"""
    gm.emulate(code, "divide", 1, 64, [quotients, remainders, x])
    for i in range(64):
        a, b = int(x[i]) * int(x[i + 1]), int(x[i + 1]) >> i | 1
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        for pair, expected in ((quotients[i], quotient), (remainders[i], a - b * quotient)):
            assert int(pair[1]) << 64 | int(pair[0]) == expected % 2**128
