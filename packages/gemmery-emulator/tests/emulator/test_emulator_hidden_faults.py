"""Faults that a right result may hide, each with the repaired kernel, in which nothing is found."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

import gemmery as gm
from gemmery.errors import CheckError, EmulationError

WGMMA = r"""
__global__ void __launch_bounds__(128) f(const unsigned short* A, const unsigned short* B, float* C, int steps) {
  __shared__ __align__(128) unsigned short sa[64 * 16], sb[8 * 16];
  int t = threadIdx.x, w = t / 32, l = t % 32;
  for (int i = t; i < 64 * 16; i += 128) sa[i % 16 / 8 * 512 + i / 16 * 8 + i % 8] = A[i];
  for (int i = t; i < 8 * 16; i += 128) sb[i % 16 / 8 * 64 + i / 16 * 8 + i % 8] = B[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  unsigned long long da = (__cvta_generic_to_shared(sa) & 0x3ffff) >> 4 | 64ull << 16 | 8ull << 32;
  unsigned long long db = (__cvta_generic_to_shared(sb) & 0x3ffff) >> 4 | 8ull << 16 | 8ull << 32;
  float c[4] INIT;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  #pragma unroll 1
  for (int k = 0; k < steps; k++) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %6, 0;"
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;}"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(da), "l"(db), "r"(ADDS));
    COMMIT
    LOOP
  }
  AFTER
  for (int i = 0; i < 4; i++) C[(16 * w + l / 4 + i / 2 * 8) * 8 + l % 4 * 2 + i % 2] = c[i];
}"""
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'


def waiting(pending: int) -> str:
    return f'asm volatile("wgmma.wait_group.sync.aligned {pending};" ::: "memory");'


def multiplied(
    loop: str, after: str, commit: str = COMMIT, init: str = "= {}", adds: str = "1"
) -> tuple[float, list[str]]:
    parts = {"COMMIT": commit, "LOOP": loop, "AFTER": after, "INIT": init, "ADDS": adds}
    code = re.sub("|".join(parts), lambda match: parts[match[0]], WGMMA)
    a, b, c = np.ones((64, 16), np.float16), np.ones((8, 16), np.float16), np.zeros((64, 8), np.float32)
    run = gm.emulate(code, "f", 1, 128, [a.view(np.uint16), b.view(np.uint16), c, 3], arch="sm_90a")
    return float(c[0, 0]), [f"{finding.kind}: {finding.message}" for finding in run.findings]


@pytest.mark.parametrize(("loop", "after"), [(waiting(1), waiting(0)), (waiting(0), ""), ("", waiting(0))])
def test_sums_after_a_wait_for_their_group_are_right(loop, after):
    assert multiplied(loop, after) == (48, [])


@pytest.mark.parametrize(("loop", "after"), [(waiting(1), ""), ("", waiting(1)), ("", "")])
def test_sums_that_nobody_waited_for_are_a_misuse(loop, after):
    _, findings = multiplied(loop, after)
    assert re.search("misuse: .* uses a register that the wgmma at .* may still write", findings[0])
    assert re.search("misuse: .* starts a product that nobody waits for", findings[-1])


def test_a_missing_commit_is_told():
    _, findings = multiplied("", waiting(0), commit="")
    assert "wgmma.commit_group, which no thread executed" in findings[0]


def test_sums_that_nobody_set_are_uninitialized_where_a_product_adds_to_them():
    assert multiplied(waiting(0), "", init="", adds="k")[1] == []
    assert any(finding.startswith("uninitialized") for finding in multiplied(waiting(0), "", init="")[1])


MMA = """
__global__ void f(float* y, int steps) {
  float d[4] INIT; unsigned one = 0x3c003c00;
  for (int k = 0; k < steps; k++)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4}, {%4}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(one));
  y[threadIdx.x] = d[0];
}"""
OWN = """
__global__ void f(float* x, int n) {
  float a[8];
  for (int i = 0; i < n; i++) a[i * 7 % 8] = x[i];
  x[64 + threadIdx.x] = a[AT];
}"""
GUARDED = "{ .reg .pred p; setp.ne.s32 p, %1, 0; @p ld.global.f32 %0, [%2]; }"
ASM = f"""
__global__ void f(float* x, int n) {{
  float v;
  asm volatile("{GUARDED}" : "=f"(v) : "r"((int)(int(threadIdx.x) < n)), "l"(x + threadIdx.x));
  if (threadIdx.x < LIMIT) x[threadIdx.x + 64] = v;
}}"""
BEST = """
__global__ void f(float* x, int n) {
  float best;
  int at = -1;
  for (int i = 0; i < n; i++)
    if (at < 0 || x[i] > best) best = x[i], at = i;
  x[threadIdx.x + 64] = at + best;
}"""
ACCUMULATED = """
__global__ void f(float* x, int n) {
  float s INIT;
  for (int i = 0; i < n; i++) s += x[i];
  x[64 + threadIdx.x] = s;
}"""
JOINED = """
__global__ void f(float* x, int n) {
  unsigned both;
  asm volatile("{ .reg .b32 none; prmt.b32 %0, %1, none, BYTES; }" : "=r"(both) : "r"(n));
  x[threadIdx.x + 64] = both & 0xff;
}"""
UNWRITTEN = {
    "mma": (MMA.replace("INIT", ""), MMA.replace("INIT", "= {}")),
    "sum": (ACCUMULATED.replace("INIT", ""), ACCUMULATED.replace("INIT", "= 0")),
    "array": (OWN.replace("AT", "threadIdx.x % 8"), OWN.replace("AT", "threadIdx.x % 4 * 7 % 8")),
    "asm": (ASM.replace("LIMIT", "32"), ASM.replace("LIMIT", "n")),
    "best": (None, BEST),
    "bytes": (JOINED.replace("BYTES", "0x7654"), JOINED.replace("BYTES", "0x5410")),
}  # fmt: skip


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_a_thread_has_not_written_is_uninitialized(name):
    faulty, repaired = UNWRITTEN[name]
    x = np.arange(128, dtype=np.float32)
    assert gm.emulate(repaired, "f", 1, 32, [x, 4]).findings == ()
    if faulty is not None:
        kinds = {finding.kind for finding in gm.emulate(faulty, "f", 1, 32, [x, 4]).findings}
        assert kinds == {"uninitialized"}


@pytest.mark.parametrize("block", [8, 16, 24, 48])
def test_a_matrix_instruction_needs_whole_warps(block):
    code = MMA.replace("INIT", "= {}")
    (finding,) = gm.emulate(code, "f", 1, block, [np.zeros(64, np.float32), 1]).findings
    assert finding.kind == "warp mask"
    assert "in a block of whole warps" in finding.message
    assert gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32), 1]).findings == ()


@pytest.mark.parametrize(("apart", "first", "rule"), [(16, 0, ""), (12, 0, "16"), (16, 8, "32"), (24, 16, "")])
def test_rules_of_wmma(apart, first, rule):
    code = """
    #include <mma.h>
    __global__ void f(const __half* x, float* y) {
      nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, __half, nvcuda::wmma::row_major> a;
      nvcuda::wmma::load_matrix_sync(a, x + FIRST, APART);
      y[threadIdx.x] = float(a.x[0]);
    }"""
    code = code.replace("FIRST", str(first)).replace("APART", str(apart))
    run = gm.emulate(code, "f", 1, 32, [np.zeros(512, np.float16), np.zeros(32, np.float32)])
    assert [finding.kind for finding in run.findings] == ["misuse"] * bool(rule)
    assert all(f"must be a multiple of {rule} bytes" in finding.message for finding in run.findings)


NAMED = """
__global__ void f(float* x) {
  __shared__ float s[256];
  int t = threadIdx.x;
  if (t < 128) { s[t] = x[t]; asm volatile("bar.arrive 1, ARRIVE;" ::: "memory"); }
  else { asm volatile("bar.sync 1, SYNC;" ::: "memory"); x[t] = s[t - 128]; }
}"""


@pytest.mark.parametrize(("arrive", "sync", "kinds"), [(256, 256, []), (128, 256, ["misuse"]), (256, 128, ["misuse"])])
def test_arrivals_and_waits_at_a_named_barrier_name_one_count(arrive, sync, kinds):
    code = NAMED.replace("ARRIVE", str(arrive)).replace("SYNC", str(sync))
    run = gm.emulate(code, "f", 2, 256, [np.zeros(256, np.float32)])
    assert [finding.kind for finding in run.findings if finding.kind != "race"] == kinds


@pytest.mark.parametrize(("count", "kinds"), [(64, []), (48, ["misuse"])])
def test_a_count_of_threads_is_a_multiple_of_32(count, kinds):
    code = f"""__global__ void f(float* x) {{
      if (threadIdx.x < {count}) {{ asm volatile("bar.sync 1, {count};" ::: "memory"); x[threadIdx.x] = 1; }}
    }}"""
    run = gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32)])
    assert [finding.kind for finding in run.findings] == kinds


SCALE = """
__global__ void f(const float* x, float* y, int n) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}"""


@pytest.mark.parametrize(("blocks", "warned"), [(4, 0), (3, 232), (1, 744)])
def test_elements_that_nobody_writes_are_counted_and_warned_of(blocks, warned):
    run = gm.emulate(SCALE, "f", blocks, 256, [np.zeros(1000, np.float32), np.zeros(1000, np.float32), 1000])
    assert run.unwritten == ({"argument 1": 4 * warned} if warned else {})
    assert [warning.kind for warning in run.warnings] == ["unwritten"] * bool(warned)
    assert run.findings == ()


@pytest.mark.parametrize(
    "code",
    [
        "__global__ void f(float* y) { y[0] = 1; }",  # few on purpose
        "__global__ void f(float* y) { y[threadIdx.x] += 1; }",
        "__global__ void f(float* y) { atomicAdd(y + threadIdx.x, 1); }",
        "__device__ float v[64]; __global__ void f(float* y) { v[threadIdx.x] = 1; y[0] = v[threadIdx.x]; }",
    ],
)
def test_arrays_of_which_a_part_is_meant_give_no_warning(code):
    warnings = gm.emulate(code, "f", 1, 32, [np.zeros(64, np.float32)]).warnings
    assert "unwritten" not in {warning.kind for warning in warnings}


SKIPPED = """
__global__ void f(float* x, int n) {
  __shared__ float s[64];
  int i = threadIdx.x;
  if (i < n) s[i] = x[i];
  if (BEFORE) return;
  __syncthreads();
  if (i < n) x[i] = s[n - 1 - i];
}"""


@pytest.mark.parametrize(("before", "warned"), [("false", 0), ("i >= n", 1)])
def test_a_barrier_that_threads_skip_is_a_warning(before, warned):
    run = gm.emulate(SKIPPED.replace("BEFORE", before), "f", 1, 64, [np.zeros(64, np.float32), 40])
    assert run.findings == ()
    assert [(warning.kind, warning.line.number) for warning in run.warnings] == [("skipped barrier", 7)] * warned


def test_threads_that_ended_before_a_barrier_are_ordered_by_it():
    code = """
    __global__ void f(float* x) {
      __shared__ float s[128];
      s[threadIdx.x] = x[threadIdx.x];
      if (threadIdx.x >= 64) return;
      BARRIER;
      x[threadIdx.x] = s[threadIdx.x + 64];
    }"""
    x = np.zeros(128, np.float32)
    assert gm.emulate(code.replace("BARRIER", "__syncthreads()"), "f", 1, 128, [x], seed=1).findings == ()
    assert gm.emulate(code.replace("BARRIER", "__syncwarp()"), "f", 1, 128, [x]).findings[0].kind == "race"


LOOP = """
__global__ void f(float* x, int n) {
  __shared__ float s[64];
  float sum = 0;
  for (int k = 0; k < COUNT; k++) {
    s[threadIdx.x] = x[k * 64 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 64; i++) sum += s[i];
    LAST
  }
  x[512 + threadIdx.x] = sum;
}"""


@pytest.mark.parametrize("count", ["n", "4"])  # 4 is unrolled
def test_the_race_between_two_passes_of_a_loop_is_told_as_such(count):
    code, x = LOOP.replace("COUNT", count), np.zeros(1024, np.float32)
    (finding,) = gm.emulate(code.replace("LAST", ""), "f", 1, 64, [x, 4]).findings
    assert "kernel.cu:8 reads it in one pass of a loop, and kernel.cu:6 writes it in the next" in finding.message
    assert "put __syncthreads() after kernel.cu:8, at the end of the loop" in finding.message
    assert gm.emulate(code.replace("LAST", "__syncthreads();"), "f", 1, 64, [x, 4]).findings == ()


def test_advice_is_for_the_pair_that_needs_the_strongest_order():
    # Thread 0 races first with lane 1 of its warp, then with thread 32.
    code = """
    __global__ void f(float* x) {
      for (int k = 0; k < 2; k++)
        if (threadIdx.x == 0) x[0] = 2;
        else if (threadIdx.x == (k ? 32 : 1)) x[1 + k] = x[0];
    }"""
    run = gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32)])
    assert any("__syncthreads()" in finding.message for finding in run.findings)


def test_two_accesses_of_one_statement_get_other_advice():
    code = "__global__ void f(float* x) { x[threadIdx.x] = x[(threadIdx.x + 1) % 64]; }"
    (finding,) = gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32)]).findings
    assert "both are one statement: read into a variable, then __syncthreads(), then write" in finding.message


def test_a_deadlock_tells_the_state_of_the_barrier_and_comes_first():
    code = """
    #include <cuda/barrier>
    __global__ void f(float* x) {
      __shared__ cuda::barrier<cuda::thread_scope_block> all;
      if (threadIdx.x == 0) init(&all, 65);
      x[threadIdx.x / 2] = threadIdx.x;
      __syncthreads();
      all.arrive_and_wait();
    }"""
    first, *others = gm.emulate(code, "f", 1, 64, [np.zeros(64, np.float32)]).findings
    assert first.kind == "deadlock"
    assert "in its phase 0 1 of 65 arrivals and 0 bytes are missing" in first.message
    assert {finding.kind for finding in others} == {"race"}


def test_a_loop_in_which_nothing_waits_is_told_as_such():
    code = "__global__ void f(float* x) { for (int i = 0;; i++) x[1] = i; }"
    with pytest.raises(EmulationError, match=r"the loop at kernel.cu:1 does not end"):
        gm.emulate(code, "f", 1, 32, [np.zeros(32, np.float32)])
    with pytest.raises(EmulationError, match=r"the value they wait for does not change"):
        gm.emulate(
            "__global__ void f(volatile float* x) { while (x[0] == 0); }", "f", 1, 32, [np.zeros(32, np.float32)]
        )


def test_a_launch_has_a_limit_of_time():
    code = "__global__ void f(float* x) { for (unsigned i = 10; i >= 0; --i) x[i & 7] += i; }"
    x = np.ones(32, np.float32)
    with pytest.raises(
        EmulationError, match=r"did not end within 0.01 seconds, and is at kernel.cu:1.*larger seconds="
    ):
        gm.emulate(code, "f", 1, 32, [x], seconds=0.01)
    assert (x == 1).all()
    gm.emulate(SCALE, "f", 1, 32, [x, x, 32], seconds=math.inf)
    with pytest.raises(gm.ArgumentError, match="seconds=0"):
        gm.emulate(code, "f", 1, 32, [x], seconds=0)


def test_strict_raises_for_findings_and_leaves_the_arrays():
    x = np.zeros(32, np.float32)
    code = "__global__ void f(float* x) { x[threadIdx.x + SHIFT] = 1; }"
    with pytest.raises(
        CheckError, match=r"strict=True allows no findings, and there are 1:\nkernel.cu:1: out of bounds"
    ):
        gm.emulate(code.replace("SHIFT", "1"), "f", 1, 32, [x], strict=True)
    assert not x.any()
    gm.emulate(code.replace("SHIFT", "0"), "f", 1, 32, [x], strict=True)
    assert x.all()


def test_warnings_of_the_compiler_are_shown():
    code = r"""
    #include <cstdio>
    __global__ void f(float* y) {
      float d[4]; int unused;
      asm volatile("mov.f32 %0, 0f00000000;" : "+f"(d[0]));
      y[0] = d[0];
      printf("%d %d\n", 1);
    }"""
    for _ in range(2):  # compiled, and from the cache
        warnings = gm.emulate(code, "f", 1, 1, [np.zeros(4, np.float32)]).warnings
        texts = {(str(warning.line), warning.message) for warning in warnings if warning.kind == "source"}
        assert texts == {
            ("kernel.cu:5", 'variable "d" is used before its value is set'),
            ("kernel.cu:7", "the format string requires additional arguments"),
        }
