"""Blocks that hand sums to each other by flags in global memory: in any order, and as many as a device runs."""

from __future__ import annotations

import numpy as np
import pytest

import hopper
from gemmery_emulator.kernels.kernel import emulate

pytestmark = pytest.mark.sampled(3)

pytest.importorskip("cuda.bindings")
RELEASE = 'asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flags + block) : "memory");'
ACQUIRE = 'asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flags + other) : "memory");'
LOWER = "flags[other] = 0;"
FENCE, SYNC = "__threadfence();", "__syncthreads();"
VOLATILE, ATOMIC = "*(volatile u32*)(flags + {})", "atomicAdd(flags + {}, {})"
RAISING = {  # the threads of a block raise its flag, and those of the owner wait for it and lower it
    "release": f"{SYNC} if (t == 0) {RELEASE}",
    "volatile": f"{FENCE} {SYNC} if (t == 0) {VOLATILE.format('block')} = 1;",
    "atomic": f"{FENCE} {ATOMIC.format('block', 1)};",
}
WAITING = {
    "release": f"if (t == 0) {{ u32 raised; do {ACQUIRE} while (!raised); {LOWER} }} {SYNC}",
    "volatile": f"if (t == 0) {{ while (!{VOLATILE.format('other')}); {FENCE} {LOWER} }} {SYNC}",
    "atomic": f"while ({ATOMIC.format('other', 0)} < blockDim.x); {FENCE} {SYNC} if (t == 0) {LOWER}",
}


def handing_over(way, blocks, threads, owner, seed=None, rounds=2):
    """Each block hands its numbers to the owner, which adds them up in the order of blocks, once a round."""
    code = f"""{hopper.HEAD}
extern "C" __global__ void f(float* parts, u32* flags, float* out) {{
  u32 t = threadIdx.x, block = blockIdx.x;
  if (block != {owner}) {{
    parts[block * blockDim.x + t] = block + t;
    {RAISING[way]}
  }} else {{
    float sum = 0;
    for (u32 other = 0; other < gridDim.x; ++other) {{
      if (other == {owner}) continue;
      {WAITING[way]}
      sum += parts[other * blockDim.x + t];
    }}
    out[t] = sum;
  }}
}}"""
    parts, flags, out = (
        np.zeros(blocks * threads, np.float32),
        np.zeros(blocks, np.uint32),
        np.zeros(threads, np.float32),
    )
    for _ in range(rounds):  # the flags are lowered again
        run = emulate(code, "f", blocks, threads, [parts, flags, out], arch="sm_90a", seed=seed)
        assert run.findings == ()
        others = [block for block in range(blocks) if block != owner]
        assert out.tolist() == [sum(others) + len(others) * t for t in range(threads)]
        assert not flags.any()


@pytest.mark.many
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("owner", [0, 3])
@pytest.mark.parametrize("way", RAISING)
def test_the_owner_of_a_sum_waits_for_the_others(way, owner, seed):
    """It may run before all of them, and lowers the flags that it has seen."""
    handing_over(way, 4, 64, owner, seed)


def test_blocks_that_a_device_runs_together_wait_for_each_other():
    """More threads than run in lock step otherwise: the first block waits for the last."""
    handing_over("release", 132, 384, 0, rounds=1)


# ---- blocks that wait for each other ----

COOPERATIVE = """
#include <cooperative_groups.h>
__global__ void f(float* x, float* y) {
  auto grid = cooperative_groups::this_grid();
  int i = grid.thread_rank(), n = grid.size();
  for (int round = 1; round < 3; ++round) {
    x[i] = round * i;
    grid.sync();
    y[i] += x[n - 1 - i];
    AFTER
  }
}"""
BARRIER = """
__device__ unsigned count;
__device__ volatile unsigned sense;
__device__ void meet(unsigned& mine) {  // the last block resets the count, and turns the sense
  mine ^= 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    BEFORE
    if (atomicAdd(&count, 1) == gridDim.x - 1) {
      count = 0;
      __threadfence();
      sense = mine;
    } else {
      while (sense != mine) continue;
    }
    AFTER
  }
  __syncthreads();
}
__global__ void f(float* x, float* y) {
  unsigned mine = 0, i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  for (int round = 1; round < 3; ++round) {
    x[i] = round * i;
    meet(mine);
    y[i] += x[n - 1 - i];
    meet(mine);
  }
}"""
LOCKS = """
__global__ void f(int* sums, int* locks) {
  int block = blockIdx.x;
  for (int part = 0; part < 2; ++part) {  // blocks add to each part in their order, and the last one resets its lock
    if (threadIdx.x == 0) {
      int turn;
      do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(turn) : "l"(locks + part) : "memory");
      while (turn != block);
    }
    __syncthreads();
    sums[64 * part + threadIdx.x] += block + 1;
    __syncthreads();
    if (threadIdx.x != 0) continue;
    if (block == gridDim.x - 1) {
      locks[part] = 0;
    } else {
      BEFORE
      asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(locks + part) : "memory");
    }
  }
}"""
LOOK_BACK = """
__global__ void f(int* sums, int* totals, int* prefixes, volatile int* state) {
  int block = blockIdx.x;
  if (threadIdx.x != 0) return;
  int sum = 0, own = block + 1;
  totals[block] = own;
  BEFORE
  state[block] = 1;
  for (int other = block - 1; other >= 0; --other) {
    int known;
    while ((known = state[other]) == 0) continue;
    AFTER
    sum += known == 2 ? prefixes[other] : totals[other];
    if (known == 2) break;
  }
  prefixes[block] = sum + own;
  __threadfence();
  state[block] = 2;
  sums[block] = sum;
}"""
BACKING_OFF = """
__global__ void f(int* x, int* y, volatile int* flag) {
  if (blockIdx.x == 0) {
    unsigned turns = 0;
    while (*flag == 0) __nanosleep(++turns);
    AFTER
    y[threadIdx.x] = x[threadIdx.x];
  } else {
    x[threadIdx.x] = threadIdx.x;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *flag = 1;
  }
}"""
REVERSED = [3 * (255 - i) for i in range(256)]
MEETING = {  # the source and its repairs; the blocks, the sizes and type of the arrays; what the launch leaves in one
    "grid.sync()": (COOPERATIVE, {"AFTER": "grid.sync();"}, 4, (256, 256), np.float32, (1, REVERSED)),
    "barrier of the grid": (BARRIER, {"BEFORE": FENCE, "AFTER": FENCE}, 4, (256, 256), np.float32, (1, REVERSED)),
    "locks": (LOCKS, {"BEFORE": FENCE}, 4, (128, 2), np.int32, (0, [10] * 128)),
    "look-back": (LOOK_BACK, {"BEFORE": FENCE, "AFTER": FENCE}, 4, (4, 4, 4, 4), np.int32, (0, [0, 1, 3, 6])),
    "back-off": (BACKING_OFF, {"AFTER": FENCE}, 2, (64, 64, 1), np.int32, (1, list(range(64)))),
}


def met(name, missing="", seed=None):
    """The arrays after a launch without one of the repairs, and its findings."""
    source, repairs, blocks, sizes, kind, _ = MEETING[name]
    for word, text in repairs.items():
        source = source.replace(word, "" if word == missing else text)
    arrays = [np.zeros(size, kind) for size in sizes]
    return arrays, emulate(source, "f", blocks, 64, arrays, seed=seed, max_steps=20_000).findings


@pytest.mark.many
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", MEETING)
def test_blocks_that_wait_for_each_other_go_on(name, seed):
    arrays, findings = met(name, seed=seed)
    place, values = MEETING[name][-1]
    assert findings == ()
    assert arrays[place].tolist() == values


@pytest.mark.many(2)
@pytest.mark.parametrize(("name", "missing"), [(name, word) for name in MEETING for word in MEETING[name][1]])
def test_what_their_order_lacks_is_a_race(name, missing):
    _, findings = met(name, missing)
    assert {one.kind for one in findings} == {"race"}
    assert any("argument 0" in one.message or "argument 1" in one.message for one in findings)


COUNTER = """
__global__ void f(float* y) {
  __shared__ float s[4];
  __shared__ unsigned count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (threadIdx.x % 32) return;
  s[threadIdx.x / 32] = threadIdx.x;
  unsigned old, at = __cvta_generic_to_shared(&count);
  asm volatile("atom.ORDER.cta.shared.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(at) : "memory");
  if (old == 3) y[blockIdx.x] = s[0] + s[1] + s[2] + s[3];
}"""


@pytest.mark.parametrize(("order", "kinds"), [("acq_rel", []), ("release", ["race"]), ("relaxed", ["race"])])
def test_the_last_warp_at_a_counter_sees_what_the_others_wrote(order, kinds):
    """All warps update the counter in one step of lock step: each acquires from those before it."""
    y = np.zeros(2, np.float32)
    run = emulate(COUNTER.replace("ORDER", order), "f", 2, 128, [y])
    assert y.tolist() == [192, 192]
    assert [finding.kind for finding in run.findings] == kinds


def test_tiles_of_several_warps():
    code = """
    #include <cooperative_groups.h>
    #include <cooperative_groups/reduce.h>
    namespace cg = cooperative_groups;
    __global__ void f(const int* x, int* y) {
      __shared__ cg::block_tile_memory<256> scratch;
      __shared__ int s[256];
      auto tile = cg::tiled_partition<64>(cg::this_thread_block(scratch));
      s[threadIdx.x] = x[threadIdx.x];
      tile.sync();
      int other = s[threadIdx.x ^ 63];
      y[threadIdx.x] = other + cg::reduce(tile, x[threadIdx.x], cg::plus<int>());
    }"""
    x, y = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    run = emulate(code, "f", 1, 256, [x, y])
    assert run.findings == ()
    assert np.array_equal(y, (x ^ 63) + np.repeat(x.reshape(4, 64).sum(1), 64))


# ---- what a release does not cover ----

STORE = "out[t] = 7;"
RELEASES = {  # a thread raises the flag
    "st": 'asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");',
    "red": 'asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");',
    "atom": '{ u32 old; asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], 1;" : "=r"(old) : "l"(flag) : '
    '"memory"); }',
    "fence": "__threadfence(); atomicAdd(flag, 1);",
}
BEHIND = {  # stores that no release covers, and where the store has to be
    "by the same thread": ("if (t == 0) {{ {release} out[0] = 7; }}", "if (t == 0) {{ out[0] = 7; {release} }}"),
    "between two": ("if (t == 0) {{ {release} out[0] = 7; }}", "if (t == 0) {{ {release} out[0] = 7; {release} }}"),
    "by other threads": ("if (t == 0) {{ {release} }} {sync} {store}", "{store} {sync} if (t == 0) {{ {release} }}"),
}


@pytest.mark.many
@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", BEHIND)
def test_a_store_after_a_release_is_not_part_of_it(name, release, threads):
    for covered, body in enumerate(BEHIND[name]):
        if "{release} out" in body and body.count("{release}") == 2 and release in ("st", "atom"):
            continue  # the flag says 1 both times
        raises = body.format(release=RELEASES[release], sync=SYNC, store=STORE)
        code = f"""{hopper.HEAD}
extern "C" __global__ void f(u32* flag, u32* out, u32* seen) {{
  u32 t = threadIdx.x;
  if (blockIdx.x == 0) {{ {raises} }}
  else if (t == 0) {{
    u32 raised;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
    while (raised < {body.count("{release}")});
    seen[0] = out[0];
  }}
}}"""
        arrays = [np.zeros(1, np.uint32), np.zeros(96, np.uint32), np.zeros(1, np.uint32)]
        run = emulate(code, "f", 2, threads, arrays, arch="sm_90a")
        assert [finding.kind for finding in run.findings] == ([] if covered else ["race"]), (body, run.findings)
