"""Kernels without end, and those that only look like it: loops that wait for other threads, and the limit of steps."""

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator.lockstep import Spinning

SPINS = {
    "while (atomicAdd(x, 0) == 0);": 2,
    "unsigned ns = 8; while (*(volatile int*)x == 0) { __nanosleep(ns);\n if (ns < 256) ns *= 2; }": 2,
    "\n\nwhile (atomicCAS(x, 0, 1) != 0);\n x[1] += 1;": 4,
    "\nif (threadIdx.x < 32) { while (*(volatile int*)x == 0); } else x[1] = 1;": 3,
    "for (;;) __syncthreads();": 2,
}


@pytest.mark.many(3)
@pytest.mark.parametrize("spin", SPINS)
@pytest.mark.parametrize("seed", [None, 3])
def test_threads_that_loop_for_ever_are_named_with_their_line(spin, seed):
    """They wait for a value that never changes; arrays keep their values."""
    code = f"__global__ void f(int* x) {{\n{spin}\nx[2] = 1; }}"
    x = np.zeros(64, np.int32)
    with pytest.raises(gm.EmulationError, match=rf"loop forever at kernel.cu:{SPINS[spin]}: .*barrier.*two kernels"):
        gm.emulate(code, "f", 2, 64, [x], seed=seed)
    assert not x.any()


HANDING = {
    "lock": "if (t == 0) { while (atomicCAS(x, 0, 1)); __threadfence(); ++x[1]; __threadfence(); atomicExch(x, 0); }",
    "flag": """if (b == 1) { x[9] = 5; __syncthreads(); if (t == 0) { __threadfence(); atomicExch(x + 8, 1); } }
      else { if (t == 0) { while (!atomicAdd(x + 8, 0)); __threadfence(); } __syncthreads();
             if (t == 0) atomicAdd(x + 1, x[9]); }""",
    "all blocks": """if (t == 0) x[16 + b] = b; __syncthreads();
      if (t == 0) { __threadfence(); atomicAdd(x + 8, 1); while (atomicAdd(x + 8, 0) < 4); __threadfence(); }
      __syncthreads(); if (t == 0) atomicAdd(x + 1, 2 * x[16 + (b + 1) % 4]);""",
}


@pytest.mark.many(4)
@pytest.mark.parametrize("handing", HANDING)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_threads_that_wait_in_a_loop_let_others_run(handing, seed):
    """Locks, flags and barriers of all blocks that run together."""
    code = f"__global__ void f(int* x) {{ int t = threadIdx.x, b = blockIdx.x; {HANDING[handing]} }}"
    x = np.zeros(32, np.int32)
    assert gm.emulate(code, "f", 4, 64, [x], seed=seed).findings == ()
    assert x[1] == {"lock": 4, "flag": 15, "all blocks": 12}[handing]


def test_a_long_loop_is_not_one_without_end():
    """6,000 iterations that write nothing, and 6,000 that count in memory."""
    code = """__global__ void f(unsigned* x) {
      unsigned s = threadIdx.x;
      for (int i = 0; i < 6000 + threadIdx.x % 3; ++i) { s = s * 3 + 1; if (s & 4) s ^= 8; }
      x[threadIdx.x] = s;
      while (atomicAdd(x + 32, 1) < 32 * 6000);
    }"""
    x = np.zeros(33, np.uint32)
    gm.emulate(code, "f", 1, 32, [x])

    def expected(s):
        for _ in range(6000 + s % 3):
            s = (s * 3 + 1) % 2**32
            s ^= 8 if s & 4 else 0
        return s

    assert x[:32].tolist() == [expected(thread) for thread in range(32)]
    assert x[32] == 32 * 6000 + 32


ENDLESS = (
    "__global__ void f(unsigned* x) {\nunsigned s = 0;\nfor (unsigned i = 0; x[0] != ~i; ++i)\ns += i;\nx[1] = s; }"
)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_kernel_that_takes_too_many_steps_is_refused(seed):
    """A counter that changes in each turn is no cycle: the limit of steps ends it, at the line of the loop."""
    x = np.zeros(2, np.uint32)
    with pytest.raises(
        gm.EmulationError, match=r"did not end within 3,000 steps, and is at kernel.cu:[34].*max_steps="
    ):
        gm.emulate(ENDLESS, "f", 1, 32, [x], seed=seed, max_steps=3000)
    assert not x.any()


@pytest.mark.parametrize("steps", [1, 2])
def test_a_limit_of_steps_that_the_last_block_exceeds_names_a_line(steps):
    """The step that exceeds the limit may end the kernel: then no thread is at a block."""
    code = "__global__ void f(float* x, int n) {\nif (threadIdx.x < n)\nx[threadIdx.x] += 1;\n}"
    with pytest.raises(gm.EmulationError, match=rf"did not end within {steps} steps, and is at kernel.cu:[1-4]:"):
        gm.emulate(code, "f", 1, 32, [np.zeros(32, np.float32), 32], max_steps=steps)


def test_a_limit_of_steps_is_for_the_blocks_that_run_together():
    """Chunks do not add up, so a kernel of many blocks may take more steps in total."""
    code = "__global__ void f(float* x) { for (int i = 0; i < 100; ++i) __syncthreads(); x[blockIdx.x] = 1; }"
    x = np.zeros(300, np.float32)
    gm.emulate(code, "f", 300, 1024, [x], max_steps=300)
    assert x.all()


# One thread reads what another one fills by a bulk copy; the reader expects the bytes before it waits.
RING = """
typedef unsigned u32;
__device__ u32 place(const void* p) { return u32(__cvta_generic_to_shared(p)); }
__device__ void wait(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
__global__ void ring(const float* in, float* out, int steps) {
  __shared__ __align__(128) float tile[32];
  __shared__ __align__(8) unsigned long long full, empty;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(place(&full)) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(place(&empty)) : "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int step = 0; step < steps; ++step) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(place(&full)) : "memory");
      wait(place(&full), step & 1);
      for (int i = 0; i < 32; ++i) sum += tile[i];
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(place(&empty)) : "memory");
    }
    out[0] = sum;
  } else if (threadIdx.x == 32) {
    for (int step = 0; step < steps; ++step) {
      wait(place(&empty), step & 1 ^ 1);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                   ::"r"(place(tile)), "l"(in + 32 * step), "r"(place(&full)) : "memory");
    }
  }
}
"""


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_bulk_copy_that_starts_wakes_threads_that_wait_for_it(seed):
    """A ring of one stage, with more steps than other events that wake threads."""
    x, y = np.arange(32 * 12, dtype=np.float32), np.zeros(1, np.float32)
    run = gm.emulate(RING, "ring", 1, 64, [x, y, np.int32(12)], seed=seed)
    assert run.findings == ()
    assert y[0] == x.sum()


def test_copies_that_nobody_waits_for_do_not_fill_memory(monkeypatch):
    """A loop of cp.async without a wait is refused at its line; one that waits is not."""
    monkeypatch.setattr("gemmery_emulator.reach.IN_FLIGHT", 64 * 16 * 10)
    code = """__global__ void f(const float4* x, int waits) {
      __shared__ float4 s[64];
      unsigned to = unsigned(__cvta_generic_to_shared(s + threadIdx.x));
      for (int i = 0; i < 30; ++i) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + threadIdx.x) : "memory");
        if (waits) asm volatile("cp.async.wait_all;" ::: "memory");
      }
    }"""
    x = np.zeros(256, np.float32)
    gm.emulate(code, "f", 1, 64, [x, np.int32(1)])
    with pytest.raises(
        gm.EmulationError, match=r"MiB of cp.async at kernel.cu:5 have not been waited for: wait for them"
    ):
        gm.emulate(code, "f", 1, 64, [x, np.int32(0)])


def test_a_loop_that_counts_needs_no_copy_of_the_arrays(monkeypatch):
    """The search for endless loops copies memory once the registers come back, or while threads are apart.

    It looks after 1024, 3072 and 7168 basic blocks.
    """
    copies = []
    keep = Spinning._keep_memory
    monkeypatch.setattr(Spinning, "_keep_memory", lambda self: (copies.append(1), keep(self))[0])
    counts = """extern "C" __global__ void f(volatile int* x) { for (int i = 0; i < 8000; i++) x[threadIdx.x] = i; }"""
    x = np.zeros(32, np.int32)
    gm.emulate(counts, "f", 1, 32, [x])
    assert x.tolist() == [7999] * 32
    assert not copies
    spins = """extern "C" __global__ void f(volatile int* x) { while (x[0] == 0); }"""
    with pytest.raises(gm.EmulationError, match=r"threads loop forever at kernel\.cu:1"):
        gm.emulate(spins, "f", 1, 32, [np.zeros(1, np.int32)])
    assert copies
