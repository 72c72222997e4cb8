"""Races in shared memory between blocks of a cluster, which barriers of the cluster or mbarriers repair."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")
MEET = "c.sync();"
STORE = """#include <cooperative_groups.h>
__global__ void __cluster_dims__(2) f(TYPE* y) {
  auto c = cooperative_groups::this_cluster();
  __shared__ TYPE s[64];
  int t = threadIdx.x, r = c.block_rank();
  c.sync(); s[t] = -1;
  BEFORE
  c.map_shared_rank(s, r ^ 1)[t] = r * 100 + t;
  AFTER
  y[blockIdx.x * 64 + t] = s[63 - t];
  c.sync();
}"""
LOAD = """#include <cooperative_groups.h>
__global__ void __cluster_dims__(2) f(TYPE* y) {
  auto c = cooperative_groups::this_cluster();
  __shared__ TYPE s[64];
  int t = threadIdx.x, r = c.block_rank();
  c.sync(); s[t] = r * 100 + t;
  BEFORE
  TYPE other = c.map_shared_rank(s, r ^ 1)[63 - t];
  AFTER
  s[t] = 7;
  c.sync();
  y[blockIdx.x * 64 + t] = other;
}"""
ATOMIC = """#include <cooperative_groups.h>
__global__ void __cluster_dims__(4) f(TYPE* y) {
  auto c = cooperative_groups::this_cluster();
  __shared__ TYPE s[32];
  int t = threadIdx.x;
  c.sync(); s[t % 32] = 0;
  BEFORE
  for (int r = 0; r < 4; ++r) atomicAdd(c.map_shared_rank(s, r) + t % 32, 1);
  AFTER
  y[blockIdx.x * 32 + t % 32] = s[t % 32];
  c.sync();
}"""
SWAPPED = [*range(163, 99, -1), *range(63, -1, -1)]


def races(code, before, after, blocks, kind="int"):
    """The lines of each race, and the array."""
    y = np.zeros(128, np.int16 if kind == "short" else np.int32)
    code = code.replace("TYPE", kind).replace("BEFORE", before).replace("AFTER", after)
    run = emulate(code, "f", blocks, 64, [y])
    lines = {(each.line.number, each.other.number) for each in run.findings if each.kind == "race"}
    if not lines:
        assert run.findings == ()
    return lines, y


@pytest.mark.many
@pytest.mark.parametrize("kind", ["int", "short"])
@pytest.mark.parametrize(
    ("code", "before", "after", "expected"),
    [
        (STORE, MEET, MEET, set()),
        (STORE, "__syncthreads();", MEET, {(8, 6)}),
        (STORE, MEET, "__syncthreads();", {(10, 8)}),
        (LOAD, MEET, MEET, set()),
        (LOAD, "__syncthreads();", MEET, {(8, 6)}),
        (LOAD, MEET, "", {(10, 8)}),
        (LOAD, MEET, "__syncthreads();", {(10, 8)}),
    ],
)
def test_accesses_between_blocks_need_the_cluster_to_meet(code, before, after, expected, kind):
    lines, y = races(code, before, after, 2, kind)
    assert lines == expected
    if not expected:
        assert y.tolist() == SWAPPED


def test_atomics_do_not_race_with_each_other_but_with_what_is_before_and_after():
    lines, y = races(ATOMIC, MEET, MEET, 4)
    assert (lines, y.tolist()) == (set(), [8] * 128)
    assert races(ATOMIC, "__syncthreads();", MEET, 4)[0] == {(8, 6)}
    assert races(ATOMIC, MEET, "", 4)[0] >= {(10, 8)}


def test_the_message_names_both_blocks_and_the_way_out():
    code = LOAD.replace("TYPE", "int").replace("BEFORE", MEET).replace("AFTER", "")
    (finding,) = emulate(code, "f", 2, 64, [np.zeros(128, np.int32)]).findings
    assert (
        "thread 0 of block 0 writes byte 0 of shared memory (s, byte 0) of block 0, which thread 63 of block 1 reads"
        in finding.message
    )
    assert "let the cluster meet in between" in finding.message


HANDED = """#include <cooperative_groups.h>
__global__ void __cluster_dims__(2) f(int* y, int rounds) {
  auto c = cooperative_groups::this_cluster();
  __shared__ int s[32];
  __shared__ alignas(8) unsigned long long bars[2];
  unsigned own = __cvta_generic_to_shared(bars), there;
  int t = threadIdx.x, r = c.block_rank();
  if (t == 0)
    for (int i = 0; i < 2; ++i)
      asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(own + 8 * i) : "memory");
  if (t == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  c.sync();
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own + (r ? 0 : 8)), "r"(r ^ 1));
  for (int i = 0; i < rounds; ++i) {
    if (r == 1) {
      c.map_shared_rank(s, 0)[t] = i * 100 + t;
    } else {
      WAIT(0)
      y[i * 32 + t] = s[31 - t];
    }
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
    if (r == 1) { BACK }
  }
  c.sync();
}"""
WAIT = """{
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(own + 8 * NUMBER), "r"(i & 1) : "memory");
}"""


@pytest.mark.parametrize(("back", "expected"), [(True, set()), (False, {(19, 16)})])
def test_mbarriers_order_blocks(back, expected):
    code = HANDED.replace("BACK", "WAIT(1)" if back else "")
    for number in "01":
        code = code.replace(f"WAIT({number})", " ".join(WAIT.replace("NUMBER", number).split("\n")))
    y = np.zeros(64, np.int32)
    run = emulate(code, "f", 2, 32, [y, 2])
    assert {(each.line.number, each.other.number) for each in run.findings if each.kind == "race"} == expected
    if back:
        assert run.findings == ()
        assert y.tolist() == [*range(31, -1, -1), *range(131, 99, -1)]


def test_halves_of_a_word_that_different_blocks_write_do_not_race():
    code = """#include <cooperative_groups.h>
    __global__ void __cluster_dims__(2) f(short* y) {
      auto c = cooperative_groups::this_cluster();
      __shared__ short s[128];
      int t = threadIdx.x, r = c.block_rank();
      c.sync();
      c.map_shared_rank(s, 0)[2 * t + r] = 2 * t + r;
      c.sync();
      if (r == 0) y[t] = s[t], y[64 + t] = s[64 + t];
    }"""
    y = np.zeros(128, np.int16)
    assert emulate(code, "f", 2, 64, [y]).findings == ()
    assert y.tolist() == list(range(128))
