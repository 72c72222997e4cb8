"""The order that tensor copies and blocks of a cluster need, and what is found where it is missing."""

from __future__ import annotations

import numpy as np
import pytest

import hopper
from gemmery_emulator.hopper.tensormap import tensor_map
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")
MEET = 'asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");'
COPY_OUT = (
    'asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128; cp.async.bulk.commit_group;"'
    ' ::"l"(out + 32 * {row}), "r"(place(tile)) : "memory");'
)
FENCE = 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'
WAIT_READ = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'
WAIT_READ_BUT_ONE = WAIT_READ.replace("read 0", "read 1")


def findings(body, out, blocks=1, threads=32, cluster=1, seed=None, device=""):
    """What is found in a kernel with a tile of 32 words and an mbarrier, `done`; each block has a `rank`."""
    code = f"""{hopper.HEAD}
{device}
extern "C" __global__ void f(u32* out) {{
  __shared__ __align__(128) u32 tile[32];
  __shared__ __align__(8) u64 memory;
  u32 done = place(&memory), i = threadIdx.x, rank = blockIdx.x % {cluster}, there = 0;
  {body}
}}"""
    return emulate(code, "f", blocks, threads, [out], arch="sm_90a", cluster=cluster, seed=seed).findings


def kinds(found):
    return {one.kind for one in found}


# ---- copies out of shared memory ----


def stored_rows(after_fence="__syncwarp();", before_next="", last=WAIT_READ):
    """Two rows through one tile: written by a warp, copied out by its first lane."""
    first, second = (
        f"tile[i] = {row} + i; {FENCE} {after_fence} if (i == 0) {{ {COPY_OUT.format(row=row)} }}" for row in range(2)
    )
    return f"{first} if (i == 0) {{ {before_next} }} __syncwarp(); {second} if (i == 0) {{ {last} }}"


@pytest.mark.parametrize("seed", [None, 1])
def test_rows_that_a_warp_writes_and_a_lane_copies_out(seed):
    out = np.zeros(64, np.uint32)
    assert findings(stored_rows(before_next=WAIT_READ), out, seed=seed) == ()
    assert out.tolist() == [row + i for row in range(2) for i in range(32)]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_fence_does_not_order_the_lanes_of_a_warp(seed):
    """Without __syncwarp() the copy may read before the other lanes have written."""
    body = stored_rows(after_fence="", before_next=WAIT_READ)
    found = findings(body, np.zeros(64, np.uint32), seed=seed)
    assert kinds(found) == {"race"}
    assert all("put __syncwarp() between the two" in one.message for one in found)


@pytest.mark.parametrize("meet", ["", "__syncwarp();"])
def test_a_matrix_that_a_warp_stores_and_an_elected_lane_copies_out(meet):
    """stmatrix is of the whole warp, and yet the lane that copies has not seen the other lanes' rows."""
    elected = """u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));"""
    store = (
        'asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(place(tile) + 16 * (i % 8)), "r"(i)'
        ' : "memory");'
    )
    body = f"{store} {FENCE} {meet} {elected} if (elected) {{ {COPY_OUT.format(row=0)} {WAIT_READ} }}"
    found = findings(body, np.zeros(32, np.uint32))
    assert kinds(found) == (set() if meet else {"race"})
    assert all("put __syncwarp() between the two" in one.message for one in found)


@pytest.mark.parametrize("before_next", ["", WAIT_READ_BUT_ONE])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_tile_that_is_overwritten_under_a_copy_out_is_a_race(before_next, seed):
    """A second row is written while the first one may still be read."""
    found = findings(stored_rows(before_next=before_next), np.zeros(64, np.uint32), seed=seed)
    told = [one for one in found if "may still read" in one.message]
    assert [one.kind for one in told] == ["race"]
    assert "wait with cp.async.bulk.wait_group.read first" in told[0].message


REMOTE = f"""asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place(tile + i)), "r"(rank ^ 1));
{MEET} asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(i) : "memory");"""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("cluster", "write"), [(1, "atomicAdd(tile + i, 1);"), (2, REMOTE)])
def test_a_tile_that_is_updated_or_written_by_another_block_under_a_copy_out(cluster, write, late):
    first, last = (WAIT_READ, "") if late else ("", WAIT_READ)
    copy = f"if (i == 0) {{ {COPY_OUT.format(row='blockIdx.x')} {first} }} __syncwarp();"
    meet = MEET if cluster > 1 else ""
    body = f"tile[i] = i; {FENCE} __syncwarp(); {copy} {write} {meet} if (i == 0) {{ {last} }}"
    found = findings(body, np.zeros(64, np.uint32), cluster, cluster=cluster)
    assert bool(found) != late
    assert late or any("which the bulk copy" in one.message and "may still read" in one.message for one in found)


def test_a_block_that_ends_under_its_copy_out_is_found():
    """Its shared memory may be another block's by the time the copy reads it."""
    found = findings(stored_rows(before_next=WAIT_READ, last=""), np.zeros(64, np.uint32))
    assert [one.kind for one in found] == ["misuse"]
    assert "ends while its bulk copy may still read" in found[0].message


# ---- blocks of a cluster ----

INIT = 'asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(done) : "memory");'
MAP = 'asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"({what}), "r"(rank ^ 1));'
ARRIVE = 'asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");'
LOAD = 'asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(there) : "r"(there) : "memory");'
STORE = 'asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(100 * rank + i) : "memory");'


def handed_over(first=MEET, wait="wait(done, 0);", last=""):
    """Each block arrives at the other's mbarrier, and waits at its own."""
    return f"if (i == 0) {{ {INIT} }} {first} {MAP.format(what='done')} if (i == 0) {{ {ARRIVE} }} {wait} {last}"


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize(("wait", "last"), [("wait(done, 0);", ""), ("", MEET)])
def test_an_arrival_that_its_block_waits_for_or_that_all_meet_after(wait, last, seed):
    body = handed_over(wait=wait, last=last)
    assert findings(body, np.zeros(64, np.uint32), blocks=4, cluster=2, seed=seed) == ()


@pytest.mark.parametrize("seed", [None, 1])
def test_an_mbarrier_of_another_block_that_may_not_be_initialized(seed):
    """A barrier of the own block says nothing about the other one's."""
    found = findings(handed_over(first="__syncthreads();"), np.zeros(64, np.uint32), blocks=4, cluster=2, seed=seed)
    assert kinds(found) == {"misuse"}
    told = [one.message for one in found]
    assert any("may not have initialized it yet" in one or "not initialized" in one for one in told)


def test_an_mbarrier_that_is_initialized_after_the_block_arrived_at_the_barrier():
    """Others pass the cluster's barrier, and yet may be too early."""
    arrive, wait = (f'asm volatile("barrier.cluster.{what}.aligned;" ::: "memory");' for what in ("arrive", "wait"))
    body = f"{arrive} if (i == 0) {{ {INIT} }} __syncthreads(); {wait} {MAP.format(what='done')}"
    found = findings(f"{body} if (i == 0) {{ {ARRIVE} }} wait(done, 0);", np.zeros(64, np.uint32), 4, cluster=2)
    assert kinds(found) == {"misuse"}
    assert "may not have initialized it yet" in found[0].message


@pytest.mark.parametrize("seed", [None, 1])
def test_an_arrival_at_a_block_that_may_have_ended(seed):
    """Nobody waits for it, and the cluster does not meet afterwards."""
    found = findings(handed_over(wait=""), np.zeros(64, np.uint32), blocks=4, cluster=2, seed=seed)
    assert kinds(found) == {"misuse"}
    assert "which may have ended" in found[0].message


def test_words_that_another_block_stores_count_as_written():
    out = np.zeros(128, np.uint32)
    body = f"{MAP.format(what='place(tile + i)')} {MEET} {STORE} {MEET} out[32 * blockIdx.x + i] = tile[i];"
    assert findings(body, out, blocks=4, cluster=2) == ()
    assert out.reshape(4, 32).tolist() == [[100 * (1 - block % 2) + i for i in range(32)] for block in range(4)]


@pytest.mark.parametrize(("first", "last", "words"), [("", MEET, "may not have begun"), (MEET, "", "may have ended")])
def test_memory_of_another_block_that_may_not_be_there(first, last, words):
    """Before the first barrier of the cluster, and after the last."""
    body = f"tile[i] = i; {first} {MAP.format(what='place(tile + i)')} {LOAD} out[32 * blockIdx.x + i] = there; {last}"
    found = findings(body, np.zeros(128, np.uint32), blocks=4, cluster=2)
    assert [one.kind for one in found] == ["misuse"]
    assert words in found[0].message


RING = f"""
  if (i == 0) {{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; mbarrier.init.shared::cta.b64 [%1], @count;"
                 ::"r"(done), "r"(place(&free)) : "memory");
  }}
  {MEET}
  for (int k = 0; k < 5; ++k) {{
    if (i == 32) {{
      if (k && (rank == 0 || @count == 1)) wait(place(&free), k - 1 & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" ::"r"(done) : "memory");
      if (rank == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1], 128, [%2], %3;" ::"r"(place(tile)), "l"(out + 32 * k), "r"(done),
                     "h"((unsigned short)3) : "memory");
    }}
    wait(done, k & 1);
    if (i < 32) there += tile[i];
    __syncwarp();
    if (i == 0) {{
      u32 to = place(&free);
      if (@count > 1) asm volatile("mapa.shared::cluster.u32 %0, %0, 0;" : "+r"(to));
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(to) : "memory");
    }}
  }}
  if (i < 32) out[160 + 32 * blockIdx.x + i] = there;
  {MEET}"""


@pytest.mark.parametrize(("count", "order"), [(1, "release"), (2, "relaxed"), (2, "release")])
def test_a_copy_to_both_blocks_that_only_one_has_made_room_for(count, order):
    """Each block tells only itself that it has read the tile; or both tell the block that copies, in order or not."""
    body = "__shared__ __align__(8) u64 free;" + RING.replace("@count", str(count)).replace("release", order)
    for seed in (None, 1, 2):
        found = findings(body, np.zeros(288, np.uint32), 4, 64, cluster=2, seed=seed)
        assert {one.kind for one in found} == (set() if (count, order) == (2, "release") else {"race"})


def test_boxes_of_three_dimensions_come_to_both_blocks_and_leave():
    """Each block copies half of a matrix of a batch to both, and stores what the other one brought."""
    code = f"""{hopper.HEAD}
extern "C" __global__ void __cluster_dims__(2, 1, 1)
f(const __grid_constant__ Map from, const __grid_constant__ Map to) {{
  __shared__ __align__(1024) char tile[8192];
  __shared__ __align__(8) u64 memory;
  u32 rank = blockIdx.x % 2, batch = blockIdx.x / 2, done = place(&memory);
  if (threadIdx.x == 0) {INIT}
  {MEET}
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) {{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;" ::"r"(done) : "memory");
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {{%2, %3, %4}}], [%5], %6;" ::"r"(place(tile) + rank * 4096), "l"(&from), "r"(0),
                 "r"(rank * 32), "r"(batch), "r"(done), "h"((unsigned short)3) : "memory");
  }}
  wait(done, 0);
  {FENCE}
  __syncthreads();
  if (threadIdx.x == 0) {{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {{%1, %2, %3}}], [%4];" ::"l"(&to),
                 "r"(0), "r"(rank * 32), "r"(batch), "r"(place(tile) + (rank ^ 1) * 4096) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
  }}
  {MEET}
}}"""
    x, y = np.arange(2 * 60 * 64, dtype=np.float16).reshape(2, 60, 64), np.zeros((2, 64, 64), np.float16)
    maps = [tensor_map(array, (1, 32, 64), swizzle=128) for array in (x, y)]
    run = emulate(code, "f", 4, 64, maps, arch="sm_90a")
    assert run.findings == ()
    assert np.array_equal(y[:, :28], x[:, 32:])
    assert not y[:, 28:32].any()
    assert np.array_equal(y[:, 32:], x[:, :32])
    assert run.global_.bulk.used == x.nbytes + y.nbytes


@pytest.mark.parametrize("fence", [FENCE, f"if (i == 0) {{ {FENCE} }}"])
def test_a_fence_is_for_the_stores_of_the_lanes_that_execute_it(fence):
    """The lane that copies fences its own stores alone, if it does so before the lanes meet."""
    body = f"tile[i] = i; {fence} __syncwarp(); if (i == 0) {{ {COPY_OUT.format(row=0)} {WAIT_READ} }}"
    found = findings(body, np.zeros(32, np.uint32))
    assert kinds(found) == (set() if fence == FENCE else {"misuse"})
    after = f"tile[i] = i; __syncwarp(); if (i == 0) {{ {FENCE} {COPY_OUT.format(row=0)} {WAIT_READ} }}"
    assert findings(after, np.zeros(32, np.uint32)) == ()


@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu"])
def test_a_release_reaches_the_blocks_of_its_scope(scope):
    """Blocks that are in no cluster together need the scope of the device."""
    store = f'asm volatile("st.release.{scope}.global.u32 [%0], 1;" ::"l"(out + 1) : "memory");'
    load = f'asm volatile("ld.acquire.{scope}.global.u32 %0, [%1];" : "=r"(there) : "l"(out + 1) : "memory");'
    body = f"if (i == 0 && blockIdx.x == 0) {{ out[0] = 7; {store} }}"
    body += f" if (i == 0 && blockIdx.x == 1) {{ while (!there) {load} out[2] = out[0]; }}"
    assert kinds(findings(body, np.zeros(4, np.uint32), blocks=2)) == (set() if scope == "gpu" else {"race"})
