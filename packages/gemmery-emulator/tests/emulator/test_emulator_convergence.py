"""Masks of warp instructions: correct programs have no finding, whatever the layout of their code."""

from __future__ import annotations

import re

import numpy as np
import pytest

import hopper
from gemmery.cuda import nvrtc
from gemmery_emulator.convergence import ranges
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")

GROUPS = "#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\nnamespace cg = cooperative_groups;\n"
NUMBERS = np.arange(128, dtype=np.int32)


# Correct kernels f(out, in) of 128 threads, `in` being 0, 1, 2, ...; and what `out` begins with.
RIGHT = {
    "aggregated atomics": (
        GROUPS
        + """__device__ int next(int* count) {
          auto group = cg::coalesced_threads();
          int first = 0;
          if (group.thread_rank() == 0) first = atomicAdd(count, group.size());
          return group.shfl(first, 0) + group.thread_rank();
        }
        __global__ void f(int* out, const int* in) { if (in[threadIdx.x] % 3 == 1) out[1 + next(out)] = 1; }""",
        [43] + [1] * 43,
    ),
    "tiles": (
        GROUPS
        + """__global__ void f(int* out, const int* in) {
          auto tile = cg::tiled_partition<8>(cg::this_thread_block());
          int sum = cg::reduce(tile, in[threadIdx.x], cg::plus<int>());
          if (tile.thread_rank() == 0) out[threadIdx.x / 8] = sum;
        }""",
        NUMBERS.reshape(16, 8).sum(axis=1),
    ),
    "parts of a tile": (
        GROUPS
        + """__global__ void f(int* out, const int* in) {
          int v = in[threadIdx.x];
          if (v % 5 < 2) {
            auto some = cg::coalesced_threads();
            int most = cg::reduce(some, v, cg::greater<int>());
            if (some.thread_rank() == 0) atomicMax(out, most);
            auto half = cg::binary_partition(some, v % 2);
            atomicAdd(out + 1, half.thread_rank() == 0);
          }
          auto alike = cg::labeled_partition(cg::tiled_partition<32>(cg::this_thread_block()), v % 3);
          int sum = cg::reduce(alike, v, cg::plus<int>());
          if (alike.thread_rank() == 0) atomicAdd(out + 2 + v % 3, sum);
        }""",
        [126, 8, *(int(NUMBERS[rest::3].sum()) for rest in range(3))],
    ),
    "leaders of equal keys": (
        """__global__ void f(int* out, const int* in) {
          unsigned peers = __match_any_sync(~0u, in[threadIdx.x] % 5);
          if (threadIdx.x % 32 == __ffs(peers) - 1) atomicAdd(out + in[threadIdx.x] % 5, __popc(peers));
        }""",
        [26, 26, 26, 25, 25],
    ),
    "a mask from before the branch": (
        """__global__ void f(int* out, const int* in) {
          int v = in[threadIdx.x];
          unsigned mask = __ballot_sync(~0u, v % 4);
          if (v % 4) {
            for (int i = 0; i < 3; ++i) v += __shfl_sync(mask, v, __ffs(mask) - 1);
            __syncwarp(mask);
          }
          out[threadIdx.x] = v;
        }""",
        [0, 8, 9, 10, 4],
    ),
    "lanes that leave a loop": (
        """__global__ void f(int* out, const int* in) {
          int v = in[threadIdx.x];
          for (unsigned mask = ~0u;;) {
            mask = __ballot_sync(mask, v > 0);
            if (v <= 0) break;
            v -= 9 * __shfl_sync(mask, 1, __ffs(mask) - 1);
          }
          out[threadIdx.x] = v;
        }""",
        [0, -8, -7, -6, -5],
    ),
    "the lanes that are here": (
        """__global__ void f(int* out, const int* in) {
          int v = in[threadIdx.x];
          if (v % 7 < 3) v = __shfl_sync(__activemask(), v, __ffs(__activemask()) - 1);
          out[threadIdx.x] = v;
        }""",
        [0, 0, 0, 3, 4, 5, 6, 0],
    ),
    "sums that a condition drops": (
        """__global__ void f(int* out, const int* in) {
          int i = threadIdx.x, v = in[i], lane = i % 32;
          unsigned mask = __ballot_sync(~0u, i < 108);
          if (i >= 108) return;
          for (int apart = 1; apart < 32; apart *= 2) {
            int more = __shfl_down_sync(mask, v, apart);
            if (lane + apart < __popc(mask)) v += more;
          }
          if (lane == 0) out[i / 32] = v;
        }""",
        [496, 1520, 2544, 1218],
    ),
    "values that one side of a branch uses": (
        """__global__ void f(int* out, const int* in) {
          int i = threadIdx.x;
          if (i >= 100) return;
          int next = __shfl_down_sync(i < 96 ? ~0u : 0xf, in[i], 1);
          if (i < 99 && next % 2 == 0) atomicAdd(out, next);
        }""",
        [2450 - 32 - 64 - 96],
    ),
    "halves with masks of their own": (
        """__global__ void f(int* out, const int* in) {
          int v = in[threadIdx.x];
          if (threadIdx.x % 32 < 16) {
            for (int apart = 8; apart; apart /= 2) v += __shfl_xor_sync(0x0000ffff, v, apart);
          } else {
            for (int apart = 8; apart; apart /= 2) v += __shfl_xor_sync(0xffff0000, v, apart);
          }
          out[threadIdx.x] = v;
        }""",
        [120] * 16 + [376] * 16,
    ),
}


@pytest.mark.many
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", RIGHT)
def test_masks_that_fit_are_not_blamed(name, seed):
    """And the results are right."""
    code, expected = RIGHT[name]
    out = np.zeros(256, np.int32)
    assert emulate(code, "f", 1, 128, [out, NUMBERS], seed=seed).findings == ()
    assert out[: len(expected)].tolist() == list(expected)


def test_a_vote_of_a_block_with_half_a_warp_is_not_blamed():
    """A full mask may name lanes that the block does not have."""
    code = "__global__ void f(unsigned* out) { out[threadIdx.x] = __ballot_sync(~0u, threadIdx.x % 2); __syncwarp(); }"
    out = np.zeros(48, np.uint32)
    assert emulate(code, "f", 1, 48, [out]).findings == ()
    assert out[[0, 47]].tolist() == [0xAAAAAAAA, 0xAAAA]


DETOUR = """.version 8.0
.target sm_80
.address_size 64
.visible .entry f(.param .u64 x) {
.reg .b64 %d<4>; .reg .b32 %r<9>; .reg .pred %p<3>;
ld.param.u64 %d1, [x]; mov.u32 %r1, %tid.x; mad.wide.u32 %d2, %r1, 4, %d1;
mov.u32 %r2, %r1; MASK
and.b32 %r3, %r1, 3; setp.eq.u32 %p1, %r3, 0; @%p1 bra FAR;
NEAR: INSTRUCTION
st.global.u32 [%d2], %r5; ret;
FAR: mul.lo.u32 %r2, %r2, 10; bra NEAR; }"""


@pytest.mark.parametrize("mask", ["-1", "%r4"])
@pytest.mark.parametrize("seed", [None, 1])
def test_lanes_wait_for_those_that_take_a_detour(mask, seed):
    """Code after the shuffle that jumps back to it: no lane shuffles before all have arrived."""
    text = DETOUR.replace("MASK", "mov.b32 %r4, -1;" if mask == "%r4" else "")
    text = text.replace("INSTRUCTION", f"shfl.sync.bfly.b32 %r5, %r2, 1, 31, {mask};")
    x = np.zeros(64, np.uint32)
    assert emulate(text, "f", 1, 64, [x], seed=seed).findings == ()
    values = np.arange(64)
    assert x.tolist() == np.where(values % 4 == 0, 10 * values, values)[values ^ 1].tolist()


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("before", ["wgmma.fence", "wgmma.mma_async", "wgmma.wait_group"])
def test_warps_of_a_warpgroup_wait_for_each_other(before, seed):
    """One thread takes a detour before an instruction of the warpgroup, and the others wait for it."""
    case = hopper.PRODUCTS["n 64"].case.again()
    text = nvrtc.ptx_alone(case.source, "kernel.cu", case.kernel, "sm_90a", (), {}).text
    at = text.index(before)
    at = text.rindex("\n", 0, text.rindex("{", 0, at) if before == "wgmma.mma_async" else at) + 1
    detour = "{ .reg .pred %away; .reg .b32 %own; mov.u32 %own, %tid.x; setp.eq.u32 %away, %own, 77;"
    detour += "@%away bra FAR; }\nBACK:\n"
    end = text.rindex("ret;") + 4
    text = text[:at] + detour + text[at:end] + "\nFAR: bra BACK;\n" + text[end:]
    expected = hopper.PRODUCTS["n 64"].case.again()
    emulate(expected.source, case.kernel, case.grid, case.block, expected.args, case.shared, "sm_90a")
    run = emulate(text, case.kernel, case.grid, case.block, case.args, case.shared, "sm_90a", seed=seed)
    assert run.findings == ()
    assert case.written.tobytes() == expected.written.tobytes()


def told(body, block=32):
    """The text of the one finding of a kernel with this body."""
    code = f"__global__ void f(int* x) {{ int t = threadIdx.x, v = x[t]; {body} x[t] = v; }}"
    (one,) = emulate(code, "f", 1, block, [np.zeros(128, np.int32)]).findings
    assert one.kind == "warp mask"
    return one.message


def test_a_message_names_the_lanes_and_the_way_out():
    """The caller, the function, its mask, the missing lanes, and the remedy."""
    way_out = "or pass the mask of those that do (__ballot_sync() of the condition, before the branch)"
    assert told("if (t < 20) v = __shfl_xor_sync(~0u, v, 1);") == (
        "thread 0 of block 0 executes __shfl_xor_sync() with mask 0xffffffff, and lanes 20-31 do not: they take "
        f"another path or have ended; let all lanes of the mask execute it, {way_out}"
    )
    assert "leaves out its own lane 8" in told("v = __any_sync(0xff, v);")
    assert "lanes 0, 2-31 do not" in told("if (t == 1) v = __reduce_max_sync(~0u, v);")
    assert "reads lane 9, which its mask leaves out" in told("if (t < 4) v = __shfl_sync(0xf, v, 9);")
    tree = "if (t < 20) for (int i = 16; i; i /= 2) v += __shfl_down_sync(0xfffff, v, i);"
    assert "reads lane 20, which its mask leaves out" in told(tree)
    assert "reads lane 20, which its mask leaves out" in told(tree.replace("for", "\n#pragma unroll 1\nfor"))
    assert "reads lane 20, which the block lacks" in told("v = __shfl_sync(~0u, v, 20);", 20)
    assert "and lane 2 with mask 0xc" in told("if (t < 4) v = __shfl_sync(t < 2 ? 0xf : 0xc, v, t);")
    waits = told("if (t < 3) __syncwarp(0xf); __syncthreads();")
    assert "waits at __syncwarp() with mask 0xf for lane 3, which never arrive" in waits


def test_a_matrix_that_part_of_a_warp_multiplies_is_found():
    """Matrix instructions take all lanes and have no mask."""
    code = """__global__ void f(float* x) {
      float d[4] = {}; unsigned a = 0;
      if (threadIdx.x % 2)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %4}, {%4}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));
      x[threadIdx.x] = d[0] + d[1];
    }"""
    (one,) = emulate(code, "f", 1, 32, [np.zeros(32, np.float32)]).findings
    lanes = ", ".join(str(lane) for lane in range(0, 32, 2))
    assert re.search(rf"executes mma, and lanes {lanes} of its warp do not: let all 32 lanes", one.message)


def test_ranges_of_lanes():
    """One, some, and all."""
    assert ranges(np.arange(32) == 7) == "lane 7"
    assert ranges(np.ones(32, bool)) == "lanes 0-31"


LAST_SUM = """
__global__ void f(const float* x, float* y, int n, int half) {
  __shared__ float s[4];
  int i = threadIdx.x;
  if (i % 32 == 0) s[i / 32] = x[i];
  __syncthreads();
  unsigned mask = __ballot_sync(~0u, i < n);
  float v = 0;
  if (i < n) {
    v = s[i];
    #pragma unroll 1
    for (int apart = half; apart; apart /= 2) {
      float other = __shfl_down_sync(mask, v, apart);
      SUM
    }
  }
  if (i == 0) y[0] = v;
}"""


@pytest.mark.parametrize(("total", "count"), [("v += other;", 1), ("if (i + apart < n) v += other;", 0)])
def test_a_sum_of_lanes_outside_the_mask_is_found_when_it_is_stored(total, count):
    """A loop hides from the compiler's text whether the undefined values are dropped."""
    y = np.zeros(1, np.float32)
    x = np.arange(128, dtype=np.float32)
    run = emulate(LAST_SUM.replace("SUM", total), "f", 1, 128, [x, y, 4, 16])
    assert [finding.kind for finding in run.findings] == ["warp mask"] * count
    if count:
        assert "with mask 0xf and reads lane 16, which its mask leaves out" in run.findings[0].message
        assert np.isnan(y[0])
    else:
        assert y[0] == 0 + 32 + 64 + 96
