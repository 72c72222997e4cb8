"""mbarriers: states and counts, what is out of order, and what they put in order."""

from __future__ import annotations

import numpy as np
import pytest

import hopper
from gemmery.errors import EmulationError
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")
SHARED = hopper.HEAD + "__device__ void pass(u32 barrier, u32 parity) { wait(barrier, parity); }\n"
INIT = 'asm volatile("mbarrier.init.shared::cta.b64 [%0], {count};" ::"r"(barrier) : "memory");'
ARRIVE = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");'
INVAL = 'asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");'


def launched(body, out, threads=64, blocks=3):
    """A kernel with a tile and a barrier; what is found in it."""
    code = f"""{SHARED}
extern "C" __global__ void f(float* out) {{
  __shared__ float tile[64];
  __shared__ __align__(8) u64 memory;
  u32 barrier = place(&memory), i = threadIdx.x, at = blockIdx.x * blockDim.x + i;
  {body}
}}"""
    return emulate(code, "f", blocks, threads, [out], arch="sm_90a").findings


def initialized(count):
    """Thread 0 initializes; all see it."""
    return f"if (i == 0) {{ {INIT.format(count=count)} }} __syncthreads();"


def kinds(found):
    """What was found, without the words."""
    return {one.kind for one in found}


def test_states_and_counts_are_those_of_the_isa():
    """Pending arrivals before each arrival, phases that are over, dropped arrivals, bytes, and cp.async's arrivals."""
    case = hopper.CASES["barriers"]
    run = emulate(case.source, case.kernel, 1, 32, case.args, arch="sm_90a")
    assert case.written[:8].tolist() == [5, 4, 1, 3, 2, 1, 1, 1]
    assert case.written[32:].tolist() == [*range(31, -1, -1), *range(63, 31, -1)]
    assert run.findings == ()


def test_an_mbarrier_orders_what_is_stored_before_and_loaded_behind():
    """Without a __syncthreads, in several blocks."""
    out = np.zeros(192, np.float32)
    body = f"{initialized(64)} tile[i] = at; {ARRIVE} pass(barrier, 0); out[at] = tile[63 - i];"
    assert launched(body, out) == ()
    assert out.tolist() == [64 * block + 63 - i for block in range(3) for i in range(64)]


def test_a_wait_that_is_missing_is_a_race():
    """The same without the wait."""
    body = f"{initialized(64)} tile[i] = at; {ARRIVE} out[at] = tile[63 - i];"
    assert "race" in kinds(launched(body, np.zeros(192, np.float32)))


def test_an_mbarrier_that_not_all_see_initialized_is_a_race():
    """Without a barrier of the block between."""
    body = f"if (i == 0) {{ {INIT.format(count=64)} }} {ARRIVE}"
    found = launched(body, np.zeros(192, np.float32))
    assert kinds(found) == {"race"}
    assert "thread 0 writes" in found[0].message


def test_a_wait_for_the_other_parity_is_found():
    """It passes at once where the phase is not over, and waits for ever where it is."""
    body = f"{initialized(64)} tile[i] = at; {ARRIVE} pass(barrier, 1); out[at] = tile[63 - i];"
    assert kinds(launched(body, np.zeros(192, np.float32))) == {"deadlock"}
    body = f"{initialized(64)} tile[i] = at; pass(barrier, 1); {ARRIVE} out[at] = tile[63 - i];"
    assert "race" in kinds(launched(body, np.zeros(192, np.float32)))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"if (i == 0) {{ {ARRIVE} }}", "not initialized"),
        (f"{initialized(32)} {ARRIVE}", "expects no more arrivals"),
        (f"{initialized(64)} if (i == 0) {{ {INVAL} {ARRIVE} }}", "not initialized: execute mbarrier.init first"),
        (f"{initialized(0)}", "0 arrivals"),
        (f"barrier += 4; {initialized(1)}", "multiple of 8"),
    ],
)
def test_misuse_is_found(body, words):
    """In words."""
    found = launched(body, np.zeros(192, np.float32))
    assert "misuse" in kinds(found)
    assert words in next(one.message for one in found if one.kind == "misuse")


def test_an_arrival_that_does_not_complete_is_refused():
    """.noComplete is of sm_80 and not modeled."""
    body = 'u64 s; asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], 1;" : "=l"(s) : "r"(barrier));'
    with pytest.raises(EmulationError, match="noComplete"):
        launched(body, np.zeros(192, np.float32))


def test_many_blocks_wait_on_their_own():
    """Each block's threads go through as many phases as the block's number says."""
    out = np.zeros(64 * 40, np.float32)
    body = f"""{initialized(64)}
  for (u32 round = 0; round <= blockIdx.x; ++round) {{
    {ARRIVE} pass(barrier, round & 1);
    out[at] += 1;
  }}"""
    assert launched(body, out, blocks=40) == ()
    assert out.reshape(40, 64).tolist() == [[block + 1] * 64 for block in range(40)]


@pytest.mark.parametrize("first", [0, 32])
def test_a_copy_that_begins_wakes_the_threads_that_wait_for_it(first):
    """One stage, many times; the thread that copies comes before or after the others in the order of instructions."""
    out, x = np.zeros(64, np.float32), np.arange(9 * 32, dtype=np.float32)
    code = f"""{hopper.HEAD}
extern "C" __global__ void f(const float* x, float* out) {{
  __shared__ __align__(128) float tile[32];
  __shared__ __align__(8) u64 memory[2];
  u32 full = place(memory), empty = full + 8, i = threadIdx.x;
  if (i == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; mbarrier.init.shared::cta.b64 [%1], 32;"
                           ::"r"(full), "r"(empty) : "memory");
  __syncthreads();
  float sum = 0;
  if (i == {first}) {{
    for (int k = 0; k < 9; ++k) {{
      if (k) wait(empty, k - 1 & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(full) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                   ::"r"(place(tile)), "l"(x + 32 * k), "r"(full) : "memory");
    }}
  }} else if (i / 32 != {first} / 32) {{
    for (int k = 0; k < 9; ++k) {{
      wait(full, k & 1);
      sum += tile[i % 32];
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
    }}
  }}
  out[i] = sum;
}}"""
    assert emulate(code, "f", 1, 64, [x, out], arch="sm_90a").findings == ()
    assert out.reshape(2, 32)[1 - first // 32].tolist() == x.reshape(9, 32).sum(axis=0).tolist()


def test_a_cluster_whose_thread_does_not_come_waits_for_ever():
    """But who has ended is not waited for."""
    arrive, wait = (f'asm volatile("barrier.cluster.{what};" ::: "memory");' for what in ("arrive", "wait"))
    code = (
        SHARED
        + f"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) f(int* out, int last) {{
  if (blockIdx.x == last) return;
  if (blockIdx.x != 3) {{ {arrive} }}
  {wait}
  out[blockIdx.x * 32 + threadIdx.x] = 1;
}}"""
    )
    out = np.zeros(4 * 32, np.int32)
    found = emulate(code, "f", 4, 32, [out, np.int32(1)], arch="sm_90a").findings
    assert kinds(found) == {"deadlock"}
    assert "cluster" in found[0].message
    assert out.reshape(4, 32).any(axis=1).tolist() == [True, False, False, False]
