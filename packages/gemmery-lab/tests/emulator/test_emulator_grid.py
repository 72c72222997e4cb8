"""Races in global memory: correct kernels have no finding, and broken ones have one with its remedy."""

from __future__ import annotations

import numpy as np
import pytest

from checked_products import problem_of, product
from gemmery.ladder.cuda import CUDA
from gemmery.ladder.rung import find
from gemmery_emulator.findings import global_races
from gemmery_emulator.findings.pointers import reach
from gemmery_emulator.kernels.kernel import emulate
from gemmery_emulator.memory import Global
from gemmery_emulator.ptx.module import parse

pytest.importorskip("cuda.bindings")

SCOPES = "#include <cuda/atomic>\nusing Int = cuda::atomic_ref<int, cuda::thread_scope_device>;\n"
# Correct in any order: (code, (grid, block), arguments, the final values of the first argument).
RIGHT = {
    "last block by ticket": (
        """__device__ unsigned ticket;
        __global__ void f(float* out, float* parts, const float* in) {
          __shared__ float own[4];
          __shared__ bool last;
          int t = threadIdx.x;
          float sum = in[blockIdx.x * 128 + t];
          for (int apart = 16; apart; apart /= 2) sum += __shfl_down_sync(~0u, sum, apart);
          if (t % 32 == 0) own[t / 32] = sum;
          __syncthreads();
          if (t == 0) {
            parts[blockIdx.x] = own[0] + own[1] + own[2] + own[3];
            __threadfence();
            last = atomicInc(&ticket, gridDim.x) == gridDim.x - 1;
          }
          __syncthreads();
          if (last) {
            __threadfence();
            float all = 0;
            for (int i = t; i < gridDim.x; i += 128) all += parts[i];
            atomicAdd(out, all);
            if (t == 0) ticket = 0;
          }
        }""",
        (30, 128),
        [np.zeros(1, np.float32), np.zeros(30, np.float32), np.ones(30 * 128, np.float32)],
        [30 * 128],
    ),
    "ticket with a fence before it alone": (
        """__device__ unsigned ticket;
        __global__ void f(float* out, float* parts, const float* in) {
          __shared__ bool last;
          if (threadIdx.x == 0) {
            parts[blockIdx.x] = in[blockIdx.x];
            __threadfence();
            last = atomicInc(&ticket, gridDim.x) == gridDim.x - 1;
          }
          __syncthreads();
          if (last)
            for (int i = threadIdx.x; i < gridDim.x; i += 64) atomicAdd(out, parts[i]);
        }""",
        (150, 64),
        [np.zeros(1, np.float32), np.zeros(150, np.float32), np.ones(150, np.float32)],
        [150],
    ),
    "ticket that every thread fences": (
        """__device__ unsigned ticket;
        __global__ void f(int* out, int* parts) {
          __shared__ bool last;
          parts[blockIdx.x * 64 + threadIdx.x] = 1;
          __threadfence();
          __syncthreads();
          if (threadIdx.x == 0) last = atomicAdd(&ticket, 1) == gridDim.x - 1;
          __syncthreads();
          if (!last) return;
          __threadfence();
          for (int i = threadIdx.x; i < 64 * gridDim.x; i += 64) atomicAdd(out, parts[i]);
        }""",
        (6, 64),
        [np.zeros(1, np.int32), np.zeros(384, np.int32)],
        [384],
    ),
    "ticket of release and acquire": (
        SCOPES
        + """__device__ int ticket;
        __global__ void f(int* out, int* parts) {
          __shared__ bool last;
          parts[blockIdx.x * 64 + threadIdx.x] = 1;
          __syncthreads();
          if (threadIdx.x == 0) last = Int(ticket).fetch_add(1, cuda::memory_order_acq_rel) == gridDim.x - 1;
          __syncthreads();
          if (!last) return;
          for (int i = threadIdx.x; i < 64 * gridDim.x; i += 64) atomicAdd(out, parts[i]);
        }""",
        (6, 64),
        [np.zeros(1, np.int32), np.zeros(384, np.int32)],
        [384],
    ),
    "lock of acquire and release": (
        SCOPES
        + """__device__ int lock;
        __global__ void f(int* x) {
          if (threadIdx.x % 8) return;
          for (bool done = false; !done;) {
            int free = 0;
            if (Int(lock).compare_exchange_strong(free, 1, cuda::memory_order_acquire, cuda::memory_order_relaxed)) {
              x[0] += 1;
              x[1] = x[0] * 2;
              Int(lock).store(0, cuda::memory_order_release);
              done = true;
            }
          }
        }""",
        (4, 64),
        [np.zeros(2, np.int32)],
        [32, 64],
    ),
    "lock of fences": (
        """__device__ int lock;
        __global__ void f(int* x) {
          if (threadIdx.x == 0)
            for (bool done = false; !done;)
              if (atomicCAS(&lock, 0, 1) == 0) {
                __threadfence();
                x[0] += 1;
                __threadfence();
                atomicExch(&lock, 0);
                done = true;
              }
        }""",
        (40, 64),
        [np.zeros(1, np.int32)],
        [40],
    ),
    "more locks than a block keeps apart": (
        """__global__ void f(int* x, int* lock) {
          if (threadIdx.x) return;
          for (int i = 0; i < 150; ++i)
            for (bool done = false; !done;)
              if (atomicCAS(lock + i, 0, 1) == 0) {
                __threadfence();
                x[i] += 1;
                __threadfence();
                atomicExch(lock + i, 0);
                done = true;
              }
        }""",
        (3, 32),
        [np.zeros(150, np.int32), np.zeros(150, np.int32)],
        [3] * 150,
    ),
    "a maximum by compare and swap": (
        """__device__ void largest(float* at, float x) {
          int old = *(int*)at, seen;
          do {
            seen = old;
            old = atomicCAS((int*)at, seen, __float_as_int(fmaxf(x, __int_as_float(seen))));
          } while (seen != old);
        }
        __global__ void f(float* x) { largest(x, blockIdx.x * 64 + threadIdx.x); }""",
        (3, 64),
        [np.zeros(1, np.float32)],
        [191],
    ),
    "a sort of each block's part": (
        """__global__ void f(int* x) {
          int t = threadIdx.x;
          x += blockIdx.x * 64;
          for (int k = 2; k <= 64; k *= 2)
            for (int j = k / 2; j > 0; j /= 2) {
              int other = t ^ j;
              if (other > t) {
                int a = x[t], b = x[other];
                if ((a > b) == ((t & k) == 0)) { x[t] = b; x[other] = a; }
              }
              __syncthreads();
            }
        }""",
        (3, 64),
        [np.arange(192, dtype=np.int32).reshape(3, 64)[:, ::-1].copy().reshape(-1)],
        np.arange(192),
    ),
    "a list that is pushed on": (
        """__device__ int head = -1;
        __global__ void f(int* next) {
          int node = blockIdx.x * 64 + threadIdx.x, old = head;
          for (;;) {
            next[node] = old;
            int seen = atomicCAS(&head, old, node);
            if (seen == old) break;
            old = seen;
          }
          next[node] = 7;
        }""",
        (1, 64),
        [np.zeros(64, np.int32)],
        [7] * 64,
    ),
    "a flag of a block's own": (
        """__global__ void f(int* x, int* flag) {
          int t = threadIdx.x, i = blockIdx.x * 64 + t;
          if (t >= 32) {
            x[i] = 5;
            __syncwarp();
            __threadfence_block();
            if (t == 32) atomicExch(flag + blockIdx.x, 1);
          }
          __syncwarp();
          if (t < 32) {
            while (atomicAdd(flag + blockIdx.x, 0) == 0) __nanosleep(8);
            __threadfence_block();
            x[i] = x[i + 32];
          }
        }""",
        (2, 64),
        [np.zeros(128, np.int32), np.zeros(2, np.int32)],
        [5] * 128,
    ),
    "equal stores": (
        "__global__ void f(int* x) { x[0] = 3; if (threadIdx.x > 4) x[1] = 1; }",
        (4, 64),
        [np.zeros(2, np.int32)],
        [3, 1],
    ),
    "neighboring bytes": (
        "__global__ void f(unsigned char* x) { x[blockIdx.x * 40 + threadIdx.x] += 1; }",
        (4, 40),
        [np.zeros(160, np.uint8)],
        [1] * 160,
    ),
    "wide and narrow": (
        """__global__ void f(float* x) {
          ((float4*)x)[threadIdx.x] = float4{1, 2, 3, 4};
          __syncthreads();
          float mine = x[threadIdx.x] + x[threadIdx.x + 64];
          __syncthreads();
          x[threadIdx.x] = mine;
        }""",
        (1, 64),
        [np.zeros(256, np.float32)],
        [2, 4, 6, 8] * 16 + [1, 2, 3, 4] * 48,
    ),
    "blocks of a cluster": (
        """#include <cooperative_groups.h>
        namespace cg = cooperative_groups;
        __global__ void __cluster_dims__(2, 1, 1) f(int* x, int* y) {
          int i = blockIdx.x * 64 + threadIdx.x;
          y[i] = i;
          cg::this_cluster().sync();
          x[i] = y[i ^ 64];
        }""",
        (4, 64),
        [np.zeros(256, np.int32), np.zeros(256, np.int32)],
        np.arange(256) ^ 64,
    ),
    "a pointer in memory": (
        """__global__ void f(int** where, int* x) {
          if (threadIdx.x == 0) where[blockIdx.x] = x + blockIdx.x * 64;
          __syncthreads();
          where[blockIdx.x][threadIdx.x] += 2;
        }""",
        (2, 64),
        [np.zeros(2, np.uint64), np.zeros(128, np.int32)],
        None,
    ),
}


SPINS = "a flag of a block's own"  # ends only if the warp that sets it runs first


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name in RIGHT for seed in ((None,) if name == SPINS else (None, 1))]
)
def test_nothing_is_found_where_all_is_ordered(name, seed):
    """In the usual order and in another one, with the same result."""
    code, dims, args, expected = RIGHT[name]
    args = [one.copy() for one in args]
    assert emulate(code, "f", *dims, args, seed=seed).findings == ()
    if expected is not None:
        assert args[0].tolist() == list(expected)


def found(body, blocks=2, block=64, args=None):
    """The texts of the findings of a kernel with this body."""
    args = [np.zeros(256, np.int32)] if args is None else args
    names = "".join(f", int* {name}" for name in "yz"[: len(args) - 1])
    return [
        str(one) for one in emulate(f"__global__ void f(int* x{names}) {{ {body} }}", "f", blocks, block, args).findings
    ]


UPDATED = {
    "x[0] += 1;": "atomicAdd()",
    "x[0]--;": "atomicAdd()",
    "x[0] = max(x[0], int(threadIdx.x));": "atomicMax()",
    "x[0] |= 1 << threadIdx.x % 32;": "atomicOr()",
    "x[0] = x[0] * 3 + 1;": "atomicCAS() in a loop",
    "__shared__ int s[1]; s[0] = 0; __syncthreads(); s[0] += 1; x[threadIdx.x] = 0;": "atomicAdd()",
}


@pytest.mark.parametrize("body", UPDATED)
def test_an_update_without_an_atomic_is_told_which_one_it_wants(body):
    """Whatever its values: here all threads store the same."""
    (told,) = found(body, blocks=1)
    assert told.endswith(f"one update is lost: use {UPDATED[body]}")


def test_a_race_that_an_atomic_does_not_mend_is_told_of_barriers():
    """A tree of sums reads what other threads store."""
    told = found("for (int n = 32; n; n /= 2) if (threadIdx.x < n) x[threadIdx.x] += x[threadIdx.x + n];", blocks=1)
    assert told
    assert all("__syncwarp()" in one for one in told)  # both threads of the first pair are of one warp
    assert not any("atomic" in one for one in told)


def test_a_message_names_both_threads_and_blocks():
    """The thread of the other block, also where it ran in an earlier chunk."""
    (told,) = found("if (threadIdx.x == 3) x[7] = blockIdx.x;", blocks=300, block=256)
    assert "thread 3 of block 0 writes address 0x101c (argument 0, byte 28), which thread 3 of block 63 writes" in told
    assert "blocks run in any order: give each its own elements, or use an atomic" in told
    told = found("if (blockIdx.x == 290) x[0] = 1; else if (blockIdx.x == 2) x[1] = x[0];", 300, 256)
    assert len(told) == 1
    assert "block 290 writes" in told[0]
    assert "which thread 255 of block 2 reads" in told[0]
    assert "read it in a later launch" in told[0]


def test_a_read_by_one_of_many_blocks_is_kept():
    """Two readers of different blocks are kept, so one of them differs from the block that writes."""
    body = "if (blockIdx.x != 2 && x[0] > 5) y[threadIdx.x] = 1; __syncthreads(); if (blockIdx.x == 3) x[0] = 1;"
    told = found(body, 4, 64, [np.zeros(1, np.int32), np.zeros(64, np.int32)])
    assert len(told) == 1
    assert "of block 3 writes" in told[0]
    assert "of block 0 reads" in told[0]


def test_what_is_only_read_is_not_followed():
    """Arrays that no store of the kernel can access, by the registers of its addresses."""
    from gemmery_emulator.findings.pointers import reach
    from gemmery_emulator.memory import Global
    from gemmery_emulator.ptx.module import parse

    text = """.version 8.0\n.target sm_80\n.address_size 64
    .global .align 4 .u32 counter;
    .visible .entry f(.param .u64 a, .param .align 8 .b8 b[24], .param .u64 c) {
    .reg .b64 %d<9>; .reg .b32 %r<9>; .reg .pred %p;
    ld.param.u64 %d1, [a]; ld.param.v2.u64 {%d2, %d3}, [b+8]; ld.param.u64 %d4, [c];
    cvta.to.global.u64 %d5, %d1; mov.u32 %r1, %tid.x; mad.wide.u32 %d5, %r1, 4, %d5;
    ld.global.u32 %r2, [%d5]; ld.global.u32 %r3, [%d2]; ld.global.u32 %r4, [%d3+4];
    add.s64 %d6, %d3, 8; st.global.u32 [%d6], %r3; ld.global.u64 %d7, [%d4]; ld.global.u32 %r5, [%d7];
    ld.global.u32 %r6, [counter]; ret; }"""
    (kernel,) = parse(text).kernels.values()
    memory = Global({"A": 64, "B": 64, "C": 64, "D": 64, "counter": 4})
    starts = [memory.address(name) for name in "ABCD"]
    parameters = b"".join(one.to_bytes(8, "little") for one in (starts[0], 0, *starts[1:3], starts[3]))
    told = reach(kernel, memory, parameters)
    followed = {one.text: flag for one, flag in zip(kernel.instructions, told.followed, strict=True)}
    assert {text for text, flag in followed.items() if flag and "global." in text} == {
        "ld.global.u32 %r4, [%d3+4]",
        "st.global.u32 [%d6], %r3",
        "ld.global.u32 %r5, [%d7]",
    }


@pytest.mark.parametrize("name", ["simt_naive", "simt_smem", "mma_pipelined"])
def test_arrays_that_a_rung_only_reads_are_not_followed(name, monkeypatch):
    """Also where the address of the argument is moved before the pointers are loaded from it."""
    reaches = []

    def spy(kernel, *others):
        reaches.append((kernel, reach(kernel, *others)))
        return reaches[-1][1]

    monkeypatch.setattr(global_races, "reach", spy)
    rung = find(CUDA, name)
    product(rung, problem_of((64, 64, 64), rung.dtypes[0], ("row", "row", "row")), {}, {})
    ((kernel, found),) = reaches
    opcodes = {one.opcode.name for one, kept in zip(kernel.instructions, found.followed, strict=True) if kept}
    assert opcodes == {"st"}


@pytest.mark.parametrize("step", ["%rd9", "-200", "9000"])
def test_a_parameter_at_an_unknown_place_may_point_anywhere(step):
    source = f""".version 8.0
.target sm_80
.address_size 64
.visible .entry f(.param .align 8 .b8 p[16]) {{
  .reg .b64 %rd<10>;
  .reg .b32 %r<4>;
  mov.u32 %r1, %tid.x;
  cvt.u64.u32 %rd9, %r1;
  mov.b64 %rd1, p;
  add.s64 %rd2, %rd1, {step};
  ld.param.u64 %rd3, [%rd2];
  ld.param.u64 %rd4, [p+8];
  ld.global.u32 %r2, [%rd4];
  st.global.u32 [%rd3], %r2;
  ret;
}}
"""
    kernel = parse(source).kernels["f"]
    memory = Global({"x": 64, "y": 64})
    starts = b"".join(memory.address(name).to_bytes(8, "little") for name in ("x", "y"))
    assert reach(kernel, memory, starts).arrays[-2] is None
