"""Kernels by NumPy and by compiled blocks: results, counters, findings and pictures are the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import gemmery as gm
from gemmery.errors import EmulationError
from gemmery_emulator.kernels.native import compiling
from gemmery_emulator.kernels.native.engine import BlockEngine, tell

pytest.importorskip("cuda.bindings")
UNSAID = "ignore:GEMMERY_EMULATOR=compiled:RuntimeWarning"
pytestmark = pytest.mark.filterwarnings(UNSAID)

N = 40
# Kernels of blocks of 64 threads unless they say otherwise; x has 4,096 numbers, n is N.
PLAIN = {
    "arithmetic": "float s = t; for (int j = 0; j < n; j++) s = s * 1.0001f + j; x[i] = s;",
    "integers": """unsigned s = t + 1;
        for (int j = 1; j < n; j++) s = s * 7 / j + (s >> (j & 40)) % j - (s << j); x[i] = s;""",
    "signed": """int s = t - 31;
        for (int j = 1; j < n; j++) s = s * 3 / (j - 20 ? j - 20 : 1) + s % j + (s >> 2); x[i] = s;""",
    "long": "long s = t; for (int j = 1; j < n; j++) s = s * 0x123456789L + (s >> j) / j; x[i] = s % 1000;",
    "double": "double s = t; for (int j = 1; j < n; j++) s = s / j + sqrt(s + j) - fmin(s, 3.0); x[i] = s;",
    "conversions": """float s = t * 1e6f; for (int j = 0; j < n; j++) { int k = (int)s; unsigned u = (unsigned)(s * j);
        s = k * 0.5f + u * 0.25f + (unsigned char)k + (short)u; } x[i] = s;""",
    "loads": "float s = 0; for (int j = 0; j < n; j++) s += y[(i * 3 + j) & 1023]; x[i] = s;",
    "vectors": """float4 s = {0, 0, 0, 0}; for (int j = 0; j < n; j++) { float4 v = ((const float4*)y)[(i + j) & 255];
        s.x += v.x; s.y += v.w; s.z = v.y; } ((float4*)x)[i & 255] = s;""",
    "bytes": """int s = 0;
        for (int j = 0; j < n; j++) s += ((const signed char*)y)[i + j] + ((const short*)y)[i]; x[i] = s;""",
    "in place": "for (int j = 0; j < n; j++) x[i] = x[i] * 0.5f + j;",
    "divergent": """float s = t; for (int j = 0; j < n; j++) {
        if ((t + j) & 1) s = s * 1.5f + y[t & 63]; else if (t & 2) s = y[(t + j) & 63] - s; } x[i] = s;""",
    "uneven loops": "float s = 0; for (int j = 0; j < t; j++) s += y[j]; x[i] = s;",
    "early ends": "for (int j = 0; j < n; j++) { if (j > t) return; x[i] = j; }",
    "shared": """__shared__ float s[64]; s[t] = t; for (int j = 0; j < n; j++) {
        __syncthreads(); float v = s[(t + 1) & 63]; __syncthreads(); s[t] = v + 1; } x[i] = s[t];""",
    "bank conflicts": """__shared__ float s[2048]; for (int j = 0; j < n; j++) { s[t * (j & 31)] = 0; }
        for (int j = 0; j < n; j++) { __syncthreads(); s[t * 32 + (j & 31)] = t; __syncthreads();
        x[i] += s[(t & 31) * 32 + (j & 31)]; }""",
    "a reduction": """__shared__ float s[64]; float sum = 0; for (int j = 0; j < n; j++) { s[t] = y[(t + j) & 63];
        for (int h = 32; h > 0; h /= 2) { __syncthreads(); if (t < h) s[t] += s[t + h]; }
        __syncthreads(); sum += s[0]; __syncthreads(); } x[i] = sum;""",
    "shuffles": "float s = t; for (int j = 0; j < n; j++) s += __shfl_xor_sync(~0u, s, 1 + (j & 15)) * 0.5f; x[i] = s;",
    "atomics": """__shared__ int s[8]; if (t < 8) s[t] = 0; __syncthreads();
        for (int j = 0; j < n; j++) atomicAdd(&s[(t + j) & 7], j); __syncthreads(); x[i] = s[t & 7];""",
    "clocks": "long s = 0; for (int j = 0; j < n; j++) s += clock64() & 1; x[i] = 1;",
    "special functions": "float s = t; for (int j = 0; j < n; j++) s = __expf(-s) + __fdividef(s, j + 1.0f); x[i] = s;",
    "a switch": """int s = t; for (int j = 0; j < n; j++) switch ((t + j) % 5) {
        case 0: s += 3; break; case 1: s ^= j; break; case 2: s *= 5; break; case 3: s -= t; break; default: s++; }
        x[i] = s;""",
    "a barrier in a branch of all": "for (int j = 0; j < n; j++) { if (n > 3) __syncthreads(); x[i] = j; }",
    "registers for a while": """float s = t; for (int j = 0; j < n; j++) {
        float a = y[(t + j) & 63], b = y[(t * 3 + j) & 63];
        asm volatile("ex2.approx.ftz.f32 %0, %0; ex2.approx.ftz.f32 %1, %1;" : "+f"(a), "+f"(b));
        float c = y[t + j] * a, d = y[t + 2 * j] - b; asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(d));
        s = s * 0.5f + a * b - c * y[t * 2 + j] * d; } x[i] = s;""",
    "addresses that move": """__shared__ unsigned s[512]; float v = 0; for (int k = t; k < 512; k += 64)
        s[k] = (unsigned)__cvta_generic_to_shared(s + (k * 5 & 63)); __syncthreads();
        for (int j = 0; j < n; j++) { unsigned p = (unsigned)__cvta_generic_to_shared(s + t), a, b, c;
        asm volatile("{.reg .b32 q<6>; ld.shared.u32 %1, [%0]; add.u32 %0, %0, 4; ld.shared.u32 %2, [%0+8];"
        "add.u32 q1, %0, 64; add.u32 q2, %0, 128; add.u32 q3, %0, 192; add.u32 q4, %0, 256; ld.shared.u32 %3, [q1];"
        "ld.shared.u32 q5, [q2]; xor.b32 %3, %3, q5; ld.shared.u32 q5, [q3+4]; add.u32 %3, %3, q5;"
        "ld.shared.u32 q5, [q4]; xor.b32 %3, %3, q5; ld.shared.u32 q5, [%0]; add.u32 %3, %3, q5;"
        "ld.shared.u32 q5, [q1+4]; xor.b32 %3, %3, q5; ld.shared.u32 %0, [%0+4]; ld.shared.u32 %0, [%0];}"
        : "+r"(p), "=r"(a), "=r"(b), "=r"(c)); v += (p & 255) + (a & 63) + (b & 31) + (c & 127); } x[i] = v;""",
    "constant stores": "for (int j = 0; j < n; j++) { x[i] = 7; ((int*)x)[i + 1024] = 3; }",
}
# Copies of so many bytes of y from a thread's place on, and the wait for all groups but the latest ones.
COPIES = """
#define COPY(TO, FROM, BYTES) asm volatile("cp.async.ca.shared.global [%0], [%1], " #BYTES ";" \\
    :: "r"((unsigned)__cvta_generic_to_shared(TO)), "l"(FROM) : "memory")
#define PART(TO, FROM, SIZE) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" \\
    :: "r"((unsigned)__cvta_generic_to_shared(TO)), "l"(FROM), "r"(SIZE) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(N) asm volatile("cp.async.wait_group " #N ";" ::: "memory")
"""
PLAIN |= {
    "votes": """int s = t; for (int j = 0; j < n; j++) { s += __ballot_sync(~0u, (s ^ j) & 4) & 255;
        if (__any_sync(~0u, s > 9000)) s -= 9000;
        s += __all_sync(~0u, s > j) - __all_sync(~0u, s == s + j); } x[i] = s;""",
    "warp sums": """int s = t; for (int j = 0; j < n; j++) { s += __reduce_add_sync(~0u, s & 15) % 7;
        s ^= __reduce_max_sync(~0u, s - 40) & 3; s -= __reduce_min_sync(~0u, (unsigned)s) % 5; } x[i] = s;""",
    "all shuffles": """int s = t * 77; for (int j = 0; j < n; j++) { s += __shfl_up_sync(~0u, s, 1 + (j & 7)) * 2;
        s ^= __shfl_down_sync(~0u, s, 1 + (j & 3), 8);
        s = s * 5 + __shfl_sync(~0u, s, (t * 5 + j) & 31, 16); } x[i] = s;""",
    "a warp of two": """float s = t; for (int j = 0; j < n; j++) { if (t < 32) s += __shfl_xor_sync(~0u, s, 3) * 0.5f;
        else s -= y[t]; } x[i] = s;""",
    "copies": """__shared__ float s[3][64]; COPY(&s[0][t], y + t, 4); COMMIT; float v = 0;
        for (int j = 0; j < n; j++) { COPY(&s[(j + 1) % 3][t], y + t + (j & 63), 4); COMMIT; WAIT(1); __syncthreads();
        v += s[j % 3][(t + 1) & 63]; __syncthreads(); } WAIT(0); x[i] = v;""",
    "wide copies": """__shared__ float4 s[2][64]; float v = 0; PART(&s[0][t], y + 4 * t, 16); COMMIT;
        for (int j = 0; j < n; j++) { PART(&s[~j & 1][t ^ 1], y + 4 * ((t + j) & 63), (t + j) & 1 ? 16 : 0); COMMIT;
        WAIT(1); __syncthreads(); v += s[j & 1][63 - t].x + s[j & 1][t].w; __syncthreads(); } x[i] = v;""",
    "short copies": """__shared__ float4 s[64]; float v = 0; for (int j = 0; j < n; j++) {
        PART(&s[t], y + 4 * t, j == 20 ? 8 : 16); COMMIT; WAIT(0); v += s[t].x + s[t].w; } x[i] = v;""",
    "copies of some": """__shared__ float s[64]; s[t] = 0; __syncthreads(); float v = 0; for (int j = 0; j < n; j++) {
        if (t & 1) { COPY(&s[t], x + i, 4); COMMIT; WAIT(0); } v += s[t]; x[i] = v; } x[i] = v;""",
}
ENTIRELY = (
    "divergent",
    "a reduction",
    "shared",
    "long",
    "shuffles",
    "all shuffles",
    "votes",
    "warp sums",
    "copies",
    "wide copies",
)
ONLY_NUMPY = ("special functions", "clocks", "a switch", "early ends")  # a picture of a path, at first
FAULTY = {
    "beyond one of two arrays": """const float *p = t & 1 ? x : y, *at; float s = 0, v; for (int j = 0; j < n; j++) {
        at = p + (j == 20 && t == 6 ? 4095 : t);
        asm volatile("ld.global.f32 %0, [%1+4];" : "=f"(v) : "l"(at)); s += v; } x[i] = s;""",
    "a race": """__shared__ float s[64]; s[t] = t; __syncthreads(); float v = 0;
        for (int j = 0; j < n; j++) { v += s[(t + 32) & 63]; if (j == 20) s[t] = v; } x[i] = v;""",
    "one place": "__shared__ int s[4]; for (int j = 0; j < n; j++) s[t & 3] = t; __syncthreads(); x[i] = s[t & 3];",
    "equal stores": "__shared__ int s[4]; for (int j = 0; j < n; j++) s[0] = j; __syncthreads(); x[i] = s[0];",
    "uninitialized": """__shared__ float s[64]; float v = 0; if (t < 60) s[t] = t; __syncthreads();
        for (int j = 0; j < n; j++) v += s[j + 24 - n + t % n]; x[i] = v;""",
    "outside": "for (int j = 0; j < n; j++) x[i * 50 + j * 5] = j;",
    "outside shared": """__shared__ float s[64];
        for (int j = 0; j < n; j++) s[t + j - 20] = 1; __syncthreads(); x[i] = s[t];""",
    "misaligned": "for (int j = 0; j < n; j++) *(float*)((char*)x + 4 * i + (j == 30)) = j;",
    "neighbors": "for (int j = 0; j < n; j++) x[i] = x[i + 1] + j;",
    "blocks": "for (int j = 0; j < n; j++) { if (blockIdx.x == 1 && j == 30) x[3] = 1; x[i] = j; }",
    "broadcast then written": """float v = 0;
        for (int j = 0; j < n; j++) { v += x[j & 7]; if (j == 33 && t == 5) x[2] = v; } x[i + 64] = v;""",
    "a missing barrier": """__shared__ float s[64];
        for (int j = 0; j < n; j++) { s[t] = j; if (j != 25) __syncthreads();
        x[i] += s[63 - t]; __syncthreads(); }""",
    "a copy in flight": """__shared__ float s[2][64]; COPY(&s[0][t], y + t, 4); COMMIT; float v = 0;
        for (int j = 0; j < n; j++) { COPY(&s[~j & 1][t], y + t + j, 4); COMMIT; if (j == 20) WAIT(1); else WAIT(0);
        __syncthreads(); v += s[~j & 1][t]; __syncthreads(); } x[i] = v;""",
    "a group of some threads": """__shared__ float s[64]; float v = 0; for (int j = 0; j < n; j++) {
        COPY(&s[t], y + t + j, 4); if (t < 32) { COMMIT; v += y[j]; } WAIT(0); v += s[t]; } x[i] = v;""",
    "a copy of what changes": """__shared__ float s[64]; float v = 0; for (int j = 0; j < n; j++) {
        COPY(&s[t], x + ((i + 1) & 63), 4); COMMIT; x[i] = j; WAIT(0); v += s[t]; } x[i] = v;""",
    "a copy outside": """__shared__ float s[64]; for (int j = 0; j < n; j++) { COPY(&s[t], y + t + j * 110, 4); COMMIT;
        WAIT(0); } x[i] = s[t];""",
    "an unwritten variable": "float v; for (int j = 0; j < n; j++) if (j > t) v += j; x[i] = v;",
}


@pytest.fixture
def both(monkeypatch):
    ran: list[int] = []
    run = BlockEngine.run
    monkeypatch.setattr(BlockEngine, "run", lambda self, allowance: (ran.append(run(self, allowance)), ran[-1])[1])

    def emulated(body, blocks=3, threads=64, **options):
        code = f"""{COPIES}extern "C" __global__ void f(float* x, const float* y, int n) {{
            int t = threadIdx.x, i = blockIdx.x * blockDim.x + t; {body} }}"""
        results = []
        for way in ("numpy", "compiled"):
            monkeypatch.setenv("GEMMERY_EMULATOR", way)
            ran.clear()
            x, y = np.linspace(-3, 5, 4096, dtype=np.float32), np.random.default_rng(0).random(4096, np.float32)
            run = gm.emulate(code, "f", blocks, threads, [x, y, np.int32(N)], **options)
            results.append((x, run, sum(ran)))
        return results

    return emulated


def told(run):
    return [str(each) for each in (*run.findings, *run.warnings)]


def check(first, second):
    """The same in all that a user sees; NaNs of any payload."""
    (x, run, steps), (own, compiled, own_steps) = first, second
    assert not steps
    np.testing.assert_array_equal(x, own)
    assert np.array_equal(np.signbit(x[~np.isnan(x)]), np.signbit(own[~np.isnan(x)]))
    assert told(run) == told(compiled)
    for merged in (True, False):
        counts, others = run.counted(merged), compiled.counted(merged)
        assert dataclasses.replace(counts, lines={}, frames={}) == dataclasses.replace(others, lines={}, frames={})
        assert dict(counts.lines) == dict(others.lines)
        assert counts.frames == others.frames
    trace, other = run.drawable.trace, compiled.drawable.trace
    assert trace.accesses == other.accesses
    assert trace.divergences == other.divergences
    assert trace.sources == other.sources
    return own_steps


@pytest.mark.many(3)
@pytest.mark.parametrize("name", PLAIN)
def test_a_kernel_is_the_same_both_ways(name, both):
    steps = check(*both(PLAIN[name]))
    assert steps > (N if name in ENTIRELY else 0) or name in ONLY_NUMPY


@pytest.mark.many(3)
@pytest.mark.parametrize("name", FAULTY)
def test_faults_are_found_both_ways(name, both):
    first, second = both(FAULTY[name])
    check(first, second)
    assert told(first[1])


@pytest.mark.many(3)
@pytest.mark.parametrize("threads", [1, 31, 48, 96, 257])
@pytest.mark.parametrize("name", ["divergent", "shared", "in place", "uneven loops", "a reduction"])
def test_blocks_of_any_size(name, threads, both):
    body = PLAIN[name].replace("[64]", "[512]").replace("& 63]", "% blockDim.x]") if name == "shared" else PLAIN[name]
    check(*both(body.replace("__shared__ float s[64]", "__shared__ float s[512]"), threads=threads))


@pytest.mark.many(3)
@pytest.mark.parametrize("blocks", [1, 7])
@pytest.mark.parametrize("name", ["shared", "divergent", "a race", "in place", "blocks"])
def test_any_number_of_blocks(name, blocks, both):
    check(*both({**PLAIN, **FAULTY}[name], blocks=blocks))


@pytest.mark.many(3)
@pytest.mark.parametrize("name", ["shared", "a race", "a reduction"])
def test_without_checks_and_in_another_order(name, both):
    first, second = both({**PLAIN, **FAULTY}[name], check=False)
    assert first[1].merged == second[1].merged
    assert second[2] > 0
    first, second = both({**PLAIN, **FAULTY}[name], seed=3)
    assert told(first[1]) == told(second[1])
    assert second[2] == 0  # in a random order warps run one after the other, by NumPy


PART = """.version 8.0\n.target sm_80\n.address_size 64
.global .align 4 .b32 table[4] = {5, 6, 7, 8};
.visible .entry f(.param .u64 x, .param .u32 n) { .reg .b64 %a<4>; .reg .b32 %r<8>; .reg .pred %p;
  .shared .align 4 .b32 s[4]; ld.param.u64 %a1, [x]; ld.param.u32 %r1, [n]; mov.u32 %r2, 9; st.shared.u32 [s+8], %r2;
again: mov.u64 %a2, table+8; ld.global.u32 %r3, [%a2]; mov.u32 %r4, s+8; ld.shared.u32 %r5, [%r4];
  st.global.u32 [%a1], %r3; st.global.u32 [%a1+4], %r5; sub.u32 %r1, %r1, 1; setp.ne.u32 %p, %r1, 0; @%p bra again;
  ret; }"""


@pytest.mark.parametrize("way", ["numpy", "compiled"])
def test_the_address_of_a_part_of_a_variable(way, monkeypatch):
    monkeypatch.setenv("GEMMERY_EMULATOR", way)
    x = np.zeros(2, np.int32)
    gm.emulate(PART, "f", 1, 1, [x, N])
    assert x.tolist() == [7, 9]


POWERS = """float s = t; for (int j = 0; j < n; j++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(s)); x[i] = s;"""


@pytest.mark.parametrize(("body", "reason"), [(POWERS, "code: ex2.approx.ftz.f32"), (PLAIN["early ends"], "registers")])
def test_a_block_without_code_is_told_once(body, reason, both):
    tell.cache_clear()
    with pytest.warns(RuntimeWarning, match="f runs by NumPy") as warned:
        assert [len(both(body, blocks=blocks)) for blocks in (4, 5)] == [2, 2]
    assert [reason in str(each.message) for each in warned] == [True]


def test_an_endless_loop_is_told(both):
    with pytest.raises(EmulationError, match="does not end"):
        both("while (n) { if (n == 1) x[i] = 1; }")


def test_a_long_loop_ends_at_the_limit(monkeypatch):
    code = 'extern "C" __global__ void f(float* x, int n) { for (int j = 0; j < n; j++) x[threadIdx.x] = j; }'
    for way in ("numpy", "compiled"):
        monkeypatch.setenv("GEMMERY_EMULATOR", way)
        with pytest.raises(EmulationError, match="did not end within 5,000 steps"):
            gm.emulate(code, "f", 1, 32, [np.zeros(32, np.float32), np.int32(1 << 30)], max_steps=5000)


def test_blocks_are_compiled_once_that_pays(monkeypatch):
    """A short loop is not; a long one is, and all later launches have its code at once."""
    code = """extern "C" __global__ void f(float* x, int n)
        { float s = threadIdx.x; for (int j = 0; j < n; j++) s = s * 0.99f + x[(threadIdx.x + j) & 31];
          x[threadIdx.x + 32] = s; }"""
    monkeypatch.setenv("GEMMERY_EMULATOR", "auto")
    monkeypatch.setattr(compiling.jit, "stored", lambda target, name: 0)
    made = []
    compile_ = compiling.Native._compile
    monkeypatch.setattr(
        compiling.Native, "_compile", lambda self, blocks: (made.append(list(blocks)), compile_(self, blocks))[1]
    )
    for n, compiled in ((4, 0), (20000, 1), (20000, 1)):
        gm.emulate(code, "f", 1, 32, [np.zeros(64, np.float32), np.int32(n)])
        assert (len(made) > 0) == compiled
