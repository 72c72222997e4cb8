"""What one lane of a warp publishes of the other lanes' writes: only those that the lanes have met after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gemmery as gm
from gemmery_emulator.findings.orders import Clocks
from gemmery_emulator.findings.races import History
from test_emulator_races import THREADS, Pairs, detected, traces

pytestmark = pytest.mark.sampled(3)

pytest.importorskip("cuda.bindings")

HEAD = "#include <cooperative_groups.h>\n#include <cuda/atomic>\n#include <cuda/barrier>\n"
FENCED = "if (lane == 0) { __threadfence();\n atomicExch(flag, 1); }"
WAIT = "if (lane == 0) { while (atomicAdd(flag, 0) == 0) { } __threadfence(); } __syncwarp();"
RELEASED = (
    "if (lane == 0) cuda::atomic_ref<int, cuda::thread_scope_device>(*flag).store(1, cuda::memory_order_release);"
)
PLAIN_RELEASE = 'if (lane == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");'
WRITE = "data[lane] = lane + 1;"


def between_blocks(writes, publishes=FENCED, reads="out[lane] = data[lane];"):
    """The first block writes and publishes, and the second reads; a block has two warps, of which one does nothing."""
    return f"""__global__ void f(int* data, int* flag, int* out) {{
  int lane = threadIdx.x;
  if (blockIdx.x == 0) {{
    if (lane >= 32) return;
    {writes}
    {publishes}
  }} else if (lane < 32) {{
    {WAIT}
    {reads}
  }}
}}"""


def between_warps(writes, publishes=FENCED, where="__shared__ int all[66]; int *data = all, *flag = all + 64;"):
    """The first warp writes and publishes, and the second reads; memory is shared."""
    return f"""__global__ void f(int* x, int* flags, int* out) {{
  {where}
  int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) *flag = 0;
  __syncthreads();
  if (threadIdx.x < 32) {{
    {writes}
    {publishes}
  }} else {{
    {WAIT}
    out[lane] = data[lane];
  }}
}}"""


def emulated(code, grid=2, block=64):
    """A run with arrays of 256 ints."""
    head = HEAD if "cuda::" in code or "cooperative" in code else ""
    return gm.emulate(head + code, "f", grid, block, [np.zeros(256, np.int32) for _ in range(3)])


IN_GLOBAL = "int *data = x, *flag = flags;"
ARRIVES = "if (lane == 0) (void)barrier.arrive();"
ON_BARRIER = """__global__ void f(int* x, int* flags, int* out) {{
  __shared__ cuda::barrier<cuda::thread_scope_block> barrier;
  __shared__ int data[32];
  int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) init(&barrier, 33);
  __syncthreads();
  if (threadIdx.x < 32) {{ {} }} else {{
    barrier.arrive_and_wait();
    out[lane] = data[lane];
  }}
}}"""
ON_MBARRIER = """__global__ void f(int* x, int* flags, int* out) {{
  __shared__ unsigned long long barrier;
  __shared__ int data[32];
  int lane = threadIdx.x % 32;
  unsigned at = __cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at));
  __syncthreads();
  if (threadIdx.x < 32) {{
    {}
    if (lane == 0) asm volatile("{{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }}" ::"r"(at) : "memory");
  }} else {{
    asm volatile("{{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra W; }}"
                 ::"r"(at) : "memory");
    out[lane] = data[lane];
  }}
}}"""
FENCE_OF_ALL = "__threadfence(); if (lane == 0) atomicExch(flag, 1);"
FAULTY = {
    "between blocks": (between_blocks(WRITE), "fence"),
    "by a store with release": (between_blocks(WRITE, PLAIN_RELEASE), "line"),
    "by a volatile store": (
        between_blocks(WRITE, "if (lane == 0) { __threadfence(); *(volatile int*)flag = 1; }"),
        "fence",
    ),
    "after fences of all lanes": (between_blocks(WRITE, FENCE_OF_ALL), "fence"),
    "by another lane": (between_blocks(WRITE, FENCED.replace("lane == 0", "lane == 7")), "fence"),
    "after a shuffle": (between_blocks(f"__shfl_sync(~0u, lane, 0); {WRITE}"), "fence"),
    "a write after a shuffle": (between_blocks(f"{WRITE} data[lane] += __shfl_sync(~0u, lane, 1);"), "fence"),
    "after __syncwarp()": (between_blocks(f"{WRITE} __syncwarp(); data[lane] += lane;"), "fence"),
    "after __syncwarp() of others": (
        between_blocks(f"{WRITE} if (lane < 16) __syncwarp(0xffff);", FENCED + " __syncwarp();"),
        "fence",
    ),
    "by half of the lanes": (
        between_blocks(WRITE, "if (lane < 16) { __threadfence(); atomicExch(flag, 1); }"),
        "fence",
    ),
    "of an update": (between_blocks("atomicAdd(data + lane, 1);"), "fence"),
    "an overwrite": (between_blocks(WRITE, reads="data[lane] = 70 + lane;"), "fence"),
    "in shared memory": (between_warps(WRITE), "fence"),
    "in a block's global memory": (between_warps(WRITE, where=IN_GLOBAL), "fence"),
    "by an mbarrier": (ON_MBARRIER.format(WRITE), "line"),
}


@pytest.mark.many(5)
@pytest.mark.parametrize("case", FAULTY)
def test_what_other_lanes_write_is_not_published(case):
    code, where = FAULTY[case]
    grid = 2 if "blockIdx" in code else 1
    found = emulated(code, grid).findings
    assert {one.kind for one in found} == {"race"}
    for one in found:
        assert "another lane of its warp publishes it at kernel.cu:" in one.message
        assert one.message.endswith(f"put __syncwarp() before {'that line' if where == 'line' else 'the fence there'}")


def test_the_finding_names_its_three_lines():
    (found,) = emulated(between_blocks(WRITE)).findings
    assert (found.line.number, found.other.number) == (10, 5)
    assert "thread 1 of block 1 reads address 0x1004 (argument 0, byte 4)" in found.message
    assert "which thread 1 of block 0 writes at kernel.cu:5; another lane of its warp publishes it at kernel.cu:7" in (
        found.message
    )


TICKET = """__device__ int ticket;
__global__ void f(int* parts, int* flag, int* out) {
  __shared__ bool last;
  int t = threadIdx.x, i = blockIdx.x * 64 + t;
  parts[i] = i;
  __threadfence();
  __syncthreads();
  if (t == THREAD) last = atomicInc((unsigned*)&ticket, gridDim.x) == gridDim.x - 1;
  __syncthreads();
  if (last) out[t] = parts[t] + parts[64 + t];
}"""
TWICE = f"""{WRITE} {FENCE_OF_ALL.replace("flag", "flag + 1")} __syncthreads();
    if (lane == 32) atomicExch(flag, 1);"""
GRID = """namespace cg = cooperative_groups;
__global__ void f(int* data, int* flag, int* out) {
  int i = blockIdx.x * 64 + threadIdx.x;
  data[i] = i;
  cg::this_grid().sync();
  out[i] = data[127 - i];
}"""
RIGHT = {
    "__syncwarp()": between_blocks(f"{WRITE} __syncwarp();"),
    "__syncwarp() with masks": between_blocks(
        f"{WRITE} if (lane < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000); __syncwarp();"
    ),
    "__syncwarp() of those that write": between_blocks(
        "if (lane < 16) { data[lane] = 1; __syncwarp(0xffff); " + FENCED + " } __syncwarp();",
        "",
        "if (lane < 16) out[lane] = data[lane];",
    ),
    "__shfl_sync()": between_blocks(f"{WRITE} __shfl_sync(~0u, lane, 0);"),
    "__ballot_sync()": between_blocks(f"{WRITE} out[40] = __ballot_sync(~0u, lane > 3);"),
    "__syncwarp() after a shuffle's store": between_blocks(
        f"{WRITE} data[lane] += __shfl_sync(~0u, lane, 1); __syncwarp();"
    ),
    "a write that nobody reads": between_blocks(
        "out[64 + lane] = 1; if (lane == 0) data[0] = 1;", reads="out[lane] = data[0];"
    ),
    "a write of the lane itself": between_blocks("if (lane == 0) data[0] = 1;", reads="out[lane] = data[0];"),
    "each lane publishes its own": between_blocks(
        WRITE,
        "__threadfence(); atomicAdd(flag, 1);",
        "while (atomicAdd(flag, 0) < 32) { } __threadfence(); out[lane] = data[lane];",
    ),
    "lanes that have published before": between_blocks(
        WRITE, f"__threadfence(); atomicAdd(flag + 1, 1); if (lane == 0) data[40] = 1; {FENCED}"
    ),
    "release of cuda::atomic_ref": between_blocks(f"{WRITE} __syncwarp();", RELEASED),
    "shared memory": between_warps(f"{WRITE} __syncwarp();"),
    "a block's global memory": between_warps(f"{WRITE} __syncwarp();", where=IN_GLOBAL),
    "a shuffle in shared memory": between_warps(f"{WRITE} __shfl_sync(~0u, lane, 0);"),
    "arrivals of whole warps": between_warps(
        f'{WRITE} asm volatile("bar.arrive 1, 64;" ::: "memory"); if (lane == 0) {{ data[40] = 1; }} {FENCED}'
    ).replace(WAIT, f'asm volatile("bar.sync 1, 64;" ::: "memory"); {WAIT}'),
    "an mbarrier": ON_MBARRIER.format(f"{WRITE} __syncwarp();"),
    "a barrier of all lanes": ON_BARRIER.format(f"{WRITE} (void)barrier.arrive();").replace("33", "64"),
    "a ticket of this warp": TICKET.replace("THREAD", "0"),
    "a ticket of another warp": TICKET.replace("THREAD", "32"),
    "a warp that publishes what another has before": between_blocks(TWICE).replace("if (lane >= 32) return;", ""),
    "a warp that publishes after a barrier what one lane has before": between_blocks(
        f"if (lane < 32) {{ {WRITE} {FENCED.replace('flag', 'flag + 1')} }} __syncthreads();",
        "if (lane == 32) { __threadfence(); atomicExch(flag, 1); }",
    ).replace("if (lane >= 32) return;", ""),
    "grid.sync()": GRID,
}


@pytest.mark.many(5)
@pytest.mark.parametrize("case", RIGHT)
def test_lanes_that_meet_publish_together(case):
    code = RIGHT[case]
    run = emulated(code, 2 if "blockIdx" in code else 1)
    assert run.findings == ()


def test_a_lane_has_to_wait_at_a_barrier_too():
    code = ON_BARRIER.format(f"{WRITE} SYNC {ARRIVES}")
    assert emulated(code.replace("SYNC", "__syncwarp();"), 1).findings == ()
    (found,) = emulated(code.replace("SYNC", ""), 1).findings
    assert found.kind == "race"


def test_without_any_order_the_advice_is_another():
    """The reader does not wait, so that __syncwarp() would not help."""
    found = emulated(between_blocks(WRITE).replace(WAIT, "")).findings
    assert found
    assert all("__syncwarp()" not in one.message for one in found)


class Publishers(Pairs):
    """The oracle with releases; what a thread passes on includes what lanes did that it has met at a shuffle."""

    def __init__(self):
        super().__init__()
        self.passed_on, self.at_fence, self.released = self.clocks.copy(), self.clocks.copy(), {}

    def ends(self, threads):
        """The epochs of these threads end."""
        self.clocks[threads, threads] += 1
        self.passed_on = np.maximum(self.passed_on, self.clocks)

    def meet(self, threads):
        super().meet(threads)
        self.converge(threads)

    def converge(self, threads):
        """These threads meet without an order of memory."""
        self.ends(threads)
        self.passed_on[threads] = self.passed_on[threads].max(axis=0)

    def fence(self, threads):
        """These threads execute a fence."""
        self.ends(threads)
        self.at_fence[threads] = self.passed_on[threads]

    def release(self, key, clocks):
        """Threads with these rows of clocks write to the key."""
        self.released[key] = np.maximum(self.released.get(key, 0), clocks.max(axis=0))

    def acquire(self, key, threads):
        """These threads see what was released to the key."""
        self.clocks[threads] = np.maximum(self.clocks[threads], self.released.get(key, 0))
        self.ends(threads)


LANES = st.sets(st.sampled_from((0, 1, 2, 31)), min_size=1, max_size=4)
ORDERS = st.one_of(
    st.tuples(st.sampled_from(("release", "fence", "flag", "fence and flag")), LANES),
    st.tuples(st.sampled_from(("acquire", "meet", "shuffle", "block")), st.just({0})),
)


@settings(max_examples=4 * settings().max_examples // 3)
@given(traces(("read", "write", "write", "update"), ("block",)), st.data())
def test_nothing_is_found_that_has_been_published(steps, data):
    """Every reported race is one, whatever lanes release, with a fence or without, and whoever acquires it."""
    told, oracle, clocks = [], Publishers(), Clocks(1, THREADS // 32)
    accesses = History(clocks, THREADS, 32, lambda *what: told.append(what))
    for kind, *rest in steps:
        for what, lanes in data.draw(st.lists(ORDERS, max_size=3)):
            warp, key = data.draw(st.integers(0, 1)), data.draw(st.sampled_from("ab"))
            threads = [32 * warp + lane for lane in sorted(lanes)]
            follow(what, oracle, clocks, warp, threads, key)
        if kind == "barrier":
            continue
        index, _, threads, _ = rest
        true, found = oracle.access(kind, *rest), detected(accesses, told, kind, *rest)
        assert found <= true, found - true
        if kind != "read":
            clocks.publishing.write(index, np.isin(np.arange(THREADS), threads), clocks.clock)


def follow(what, oracle, clocks, warp, threads, key):
    """Tell the oracle and the clocks of what orders threads of a warp."""
    warps, all_lanes = np.arange(2)[None] == warp, list(range(32 * warp, 32 * warp + 32))
    if what == "block":
        oracle.meet(list(range(THREADS)))
        clocks.meets(np.ones((1, 2), bool))
    elif what == "meet":
        oracle.meet(all_lanes)
        clocks.publishing.meet(warps, clocks.clock)
        clocks.meets_itself(warps)
    elif what == "shuffle":
        oracle.converge(all_lanes)
        clocks.converge(np.repeat(warps[..., None], 32, axis=2))
    elif what == "acquire":
        oracle.acquire(key, all_lanes)
        clocks.acquire(warps, key)
    elif what == "release":
        oracle.ends(threads)
        oracle.release(key, oracle.passed_on[threads])
        clocks.lanes_publish(0, np.array(threads))
        clocks.release(warps, key)
    if "fence" in what:
        oracle.fence(threads)
        clocks.orders(warps)
    if "flag" in what:
        oracle.release(key, oracle.at_fence[threads])
        clocks.lanes_publish(0, np.array(threads), at_fence=True)
        clocks.publish(warps, key, at_fence=True)
