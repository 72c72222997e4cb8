"""Races of bulk copies in global memory: broken kernels have a finding, and their repaired twins have none."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery_emulator.hopper.tensormap import tensor_map
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")
START = """
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ void store(float* to, const float* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;"
               ::"l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
__device__ void add(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               " cp.async.bulk.commit_group;" ::"l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
__device__ void load(float* to, const float* from, int bytes, unsigned long long* bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at(bar)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(at(to)), "l"(from), "r"(bytes), "r"(at(bar)) : "memory");
}
__device__ void begin(unsigned long long* bar) {
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(bar)) : "memory");
  fence();
  __syncthreads();
}
__device__ void land(unsigned long long* bar) {
  asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra W; }"
               ::"r"(at(bar)) : "memory");
}
__device__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""
FILLED = "__shared__ alignas(128) float s[64]; s[threadIdx.x] = threadIdx.x; fence(); __syncthreads();"
# The body of f(float* out, float* x, unsigned* flag), and that of a twin without the race: 2 blocks of 64 threads.
RACES = {
    "two blocks store a row": (
        FILLED + "if (threadIdx.x == 0) { store(out, s, 256); wait(); }",
        FILLED + "if (threadIdx.x == 0) { store(out + 64 * blockIdx.x, s, 256); wait(); }",
    ),
    "rows of two blocks overlap": (
        FILLED + "if (threadIdx.x == 0) { store(out + 60 * blockIdx.x, s, 256); wait(); }",
        FILLED + "if (threadIdx.x == 0) { store(out + 60 * blockIdx.x, s, 240); wait(); }",
    ),
    "two threads store a row": (
        FILLED + "if (threadIdx.x % 32 == 0) { store(out + 64 * blockIdx.x, s, 256); wait(); }",
        FILLED + "if (threadIdx.x % 32 == 0) { store(out + 64 * blockIdx.x + threadIdx.x, s, 128); wait(); }",
    ),
    "a store and a sum": (
        FILLED + "if (threadIdx.x == 0) { if (blockIdx.x) store(out, s, 256); else add(out, s, 256); wait(); }",
        FILLED + "if (threadIdx.x == 0) { add(out, s, 256); wait(); }",
    ),
    "an atomic and a store": (
        FILLED + "if (blockIdx.x) atomicAdd(out + threadIdx.x, 1.f);"
        "else if (threadIdx.x == 0) { store(out, s, 256); wait(); }",
        FILLED + "if (blockIdx.x) atomicAdd(out + threadIdx.x, 1.f);"
        "else if (threadIdx.x == 0) { add(out, s, 256); wait(); }",
    ),
    "read before the copy is waited for": (
        FILLED + "out += 64 * blockIdx.x; if (threadIdx.x == 0) store(out, s, 256);"
        "__syncthreads(); x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x]; if (threadIdx.x == 0) wait();",
        FILLED + "out += 64 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 256); wait(); }"
        "__syncthreads(); x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];",
    ),
    "read after no barrier": (
        FILLED + "out += 64 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 256); wait(); }"
        "x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];",
        FILLED + "out += 64 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 256); wait(); }"
        "__syncthreads(); x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];",
    ),
    "read after a wait for the copy's source alone": (
        FILLED + "out += 64 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 256); wait_read(); }"
        "__syncthreads(); x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];",
        FILLED + "out += 64 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 256); wait_read(); wait(); }"
        "__syncthreads(); x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];",
    ),
    "stored to after a wait for the copy's source alone": (
        FILLED + "out += 64 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 256); wait_read(); }"
        "__syncthreads(); out[threadIdx.x] = 3; if (threadIdx.x == 0) wait();",
        FILLED + "if (threadIdx.x == 0) { store(out + 64 * blockIdx.x, s, 256); wait_read(); }"
        "__syncthreads(); s[threadIdx.x] = 3; x[64 * blockIdx.x + threadIdx.x] = s[threadIdx.x];",
    ),
    "one of two groups is waited for": (
        FILLED + "out += 96 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 128); store(out + 32, s, 128);"
        'wait_read(); asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); }'
        "__syncthreads(); if (threadIdx.x < 8) x[64 * blockIdx.x + threadIdx.x] = out[32 + threadIdx.x];",
        FILLED + "out += 96 * blockIdx.x; if (threadIdx.x == 0) { store(out, s, 128); store(out + 32, s, 128);"
        'wait_read(); asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); }'
        "__syncthreads(); if (threadIdx.x < 8) x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];",
    ),
    "one of two threads waits": (
        FILLED + "out += 96 * blockIdx.x; if (threadIdx.x % 32 == 0) { store(out + threadIdx.x, s, 128);"
        "wait_read(); if (threadIdx.x == 0) wait(); }"
        "__syncthreads(); if (threadIdx.x < 8) x[64 * blockIdx.x + threadIdx.x] = out[32 + threadIdx.x];",
        FILLED + "out += 96 * blockIdx.x; if (threadIdx.x % 32 == 0) { store(out + threadIdx.x, s, 128);"
        "wait_read(); if (threadIdx.x == 0) wait(); }"
        "__syncthreads(); if (threadIdx.x < 8) x[64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];",
    ),
    "handed over after a wait for the copy's source alone": (
        FILLED + "if (blockIdx.x == 0) { if (threadIdx.x == 0) { store(out, s, 256); wait_read(); fence();"
        "__threadfence(); atomicExch(flag, 1u); } }"
        "else { if (threadIdx.x == 0) { while (atomicAdd(flag, 0u) == 0) { } __threadfence(); }"
        "__syncthreads(); x[threadIdx.x] = out[threadIdx.x]; }",
        FILLED + "if (blockIdx.x == 0) { if (threadIdx.x == 0) { store(out, s, 256); wait(); fence();"
        "__threadfence(); atomicExch(flag, 1u); } }"
        "else { if (threadIdx.x == 0) { while (atomicAdd(flag, 0u) == 0) { } __threadfence(); }"
        "__syncthreads(); x[threadIdx.x] = out[threadIdx.x]; }",
    ),
    "another block reads": (
        FILLED + "if (blockIdx.x == 0 && threadIdx.x == 0) { store(out, s, 256); wait(); }"
        "if (blockIdx.x) x[threadIdx.x] = out[threadIdx.x];",
        FILLED + "if (blockIdx.x == 0 && threadIdx.x == 0) { store(out, s, 256); wait(); }"
        "if (blockIdx.x) x[threadIdx.x] = out[64 + threadIdx.x];",
    ),
    "loaded in bulk while another block writes": (
        (
            "__shared__ alignas(128) float s[64]; __shared__ unsigned long long bar; begin(&bar);"
            "if (blockIdx.x == 0) x[threadIdx.x] = 1; else { if (threadIdx.x == 0) load(s, x, 256, &bar);"
            "land(&bar); out[threadIdx.x] = s[threadIdx.x]; }"
        ),
        (
            "__shared__ alignas(128) float s[64]; __shared__ unsigned long long bar; begin(&bar);"
            "if (blockIdx.x == 0) x[threadIdx.x] = 1; else { if (threadIdx.x == 0) load(s, x + 64, 256, &bar);"
            "land(&bar); out[threadIdx.x] = s[threadIdx.x]; }"
        ),
    ),
    "overwritten while a bulk copy loads it": (
        (
            "__shared__ alignas(128) float s[64]; __shared__ unsigned long long bar; begin(&bar); x += 64 * blockIdx.x;"
            "if (threadIdx.x == 0) load(s, x, 256, &bar); x[threadIdx.x] = 2; land(&bar); out[threadIdx.x] = s[0];"
        ),
        (
            "__shared__ alignas(128) float s[64]; __shared__ unsigned long long bar; begin(&bar); x += 64 * blockIdx.x;"
            "if (threadIdx.x == 0) load(s, x, 256, &bar); land(&bar); x[threadIdx.x] = 2;"
            "out[64 * blockIdx.x + threadIdx.x] = s[0];"
        ),
    ),
}


def raced(body):
    """The messages of the races of a body, in global memory."""
    code = f"{START} __global__ void f(float* out, float* x, unsigned* flag) {{ {body} }}"
    arrays = [np.zeros(192, np.float32), np.zeros(192, np.float32), np.zeros(1, np.uint32)]
    found = emulate(code, "f", 2, 64, arrays).findings
    assert {each.kind for each in found} <= {"race"}
    return [each.message for each in found]


@pytest.mark.many(5)
@pytest.mark.parametrize("name", RACES)
def test_a_race_of_a_bulk_copy_is_found_and_its_twin_has_none(name):
    broken, repaired = RACES[name]
    messages = raced(broken)
    assert messages
    assert all("address 0x" in message for message in messages)
    assert raced(repaired) == []


def test_a_race_says_what_the_copy_does():
    (message,) = raced(RACES["two blocks store a row"][0])
    assert "writes address" in message
    assert "give each its own elements" in message
    (message,) = raced(RACES["read before the copy is waited for"][0])
    assert "wait for the copy (cp.async.bulk.wait_group" in message


TENSOR = (
    START
    + """
struct alignas(64) Map { char bytes[128]; };
__global__ void f(const __grid_constant__ Map to, int apart) {
  __shared__ alignas(128) float s[64];
  s[threadIdx.x] = 1;
  fence();
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.OP.bulk_group [%0, {%1, %2}], [%3];"
                 "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
                 ::"l"(&to), "r"(0), "r"(apart * (int)blockIdx.x), "r"(at(s)) : "memory");
}"""
)


def test_boxes_of_two_blocks_overlap():
    def kinds(code, apart):
        y = np.zeros((8, 16), np.float32)
        return [each.kind for each in emulate(code, "f", 2, 64, [tensor_map(y, (4, 16)), np.int32(apart)]).findings]

    stores = TENSOR.replace("OP", "tile")
    adds = TENSOR.replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor").replace("OP", "add.tile")
    assert kinds(stores, 3) == ["race"]
    assert kinds(stores, 4) == []
    assert kinds(adds, 3) == []


STORED = (
    "__shared__ alignas(128) float s[64]; __shared__ unsigned long long bar; begin(&bar); x += 64 * blockIdx.x;"
    "x[threadIdx.x] = threadIdx.x; BEFORE; __syncthreads();"
    "if (threadIdx.x == 0) { AFTER; load(s, x, 256, &bar); } land(&bar);"
    "out[64 * blockIdx.x + threadIdx.x] = s[threadIdx.x];"
)
HANDED = (
    "__shared__ alignas(128) float s[64]; __shared__ unsigned long long bar; begin(&bar); if (blockIdx.x == 0) {"
    "x[threadIdx.x] = 1; BEFORE; __syncthreads(); if (threadIdx.x == 0) { __threadfence(); atomicExch(flag, 1u); } }"
    "else if (threadIdx.x == 0) { while (atomicAdd(flag, 0u) == 0) { } __threadfence(); AFTER;"
    "load(s, x, 256, &bar); land(&bar); out[0] = s[3]; }"
)


@pytest.mark.parametrize(("body", "place"), [(STORED, "BEFORE"), (STORED, "AFTER"), (HANDED, "AFTER")])
@pytest.mark.parametrize("space", ["", ".global", ".shared::cta"])
def test_a_bulk_copy_of_what_threads_stored_needs_a_fence(body, place, space):
    fence = f'asm volatile("fence.proxy.async{space};" ::: "memory")'
    start = START.replace("fence.proxy.async;", "fence.proxy.async.shared::cta;")
    code = f"{start} __global__ void f(float* out, float* x, unsigned* flag) {{ {body.replace(place, fence)} }}"
    code = code.replace("BEFORE", "").replace("AFTER", "")
    arrays = [np.zeros(192, np.float32), np.zeros(192, np.float32), np.zeros(1, np.uint32)]
    found = emulate(code, "f", 2, 64, arrays).findings
    assert [each.kind for each in found] == ["misuse"] * (space == ".shared::cta")
    assert all("fence.proxy.async" in each.message and "address 0x" in each.message for each in found)
