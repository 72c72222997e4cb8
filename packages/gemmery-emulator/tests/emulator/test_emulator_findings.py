"""Each kernel of tests/faults has findings at its marked lines, and its repaired twin has none."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gemmery.cuda import include, nvrtc
from gemmery_emulator.arguments import bound
from gemmery_emulator.kernels.kernel import SOURCE, emulate
from gemmery_emulator.kernels.programs import prepared
from gemmery_emulator.machine import LaunchConfig
from gemmery_emulator.run import emulated

pytest.importorskip("cuda.bindings")

FOLDER = Path(__file__).parents[1] / "faults"
ONE, SIDE = (128, 1, 1), (32, 32, 1)


def floats(count):
    """1, 2, 3, ..."""
    return np.arange(1, count + 1, dtype=np.float32)


# What is found; the grid, the block and the arguments; bytes of dynamic shared memory.
FAULTS = {
    "missing_barrier": ("race", 3, ONE, [floats(384), floats(384)]),
    "missing_second_barrier": ("race", 1, ONE, [floats(128), floats(512), np.int32(4)]),
    "wrong_stage": ("race", 1, ONE, [floats(128), floats(512), np.int32(4)]),
    "ring_overwritten": ("race", 1, ONE, [floats(128), floats(512), np.int32(4)]),
    "wait_without_barrier": ("race", 1, ONE, [floats(128), floats(128)]),
    "warps_race": ("race", 1, ONE, [floats(1), floats(128)]),
    "narrow_neighbors": ("race", 1, ONE, [np.zeros(128, np.uint8), np.arange(128, dtype=np.uint8)]),
    "missing_syncwarp": ("race", 1, ONE, [floats(128), floats(128)]),
    "atomic_and_store": ("race", 1, ONE, [np.zeros(128, np.int32)]),
    "producer_consumer": ("race", 1, ONE, [floats(128), floats(128), np.int32(1)]),
    "same_value": ("race", 2, ONE, [np.zeros(128, np.int32), floats(128)]),
    "blocks_race": ("race", 3, (129, 1, 1), [floats(384), floats(384)]),
    "global_histogram": ("race", 3, ONE, [np.zeros(7, np.int32), floats(384)]),
    "blocks_update": ("race", 3, ONE, [floats(128), floats(384)]),
    "global_missing_barrier": ("race", 3, ONE, [floats(384), floats(384)]),
    "global_in_place": ("race", 1, ONE, [floats(128)]),
    "blocks_read": ("race", 3, ONE, [floats(384), floats(384)]),
    "ticket_without_fence": ("race", 70, ONE, [np.zeros(1, np.float32), floats(70), floats(70)]),
    "ticket_without_barrier": ("race", 140, ONE, [np.zeros(128, np.float32), floats(17920), floats(17920)]),
    "lock_without_fence": ("race", 3, ONE, [floats(1), floats(128)]),
    "block_scope": ("race", 3, ONE, [np.zeros(1, np.int32)]),
    "shared_increment": ("race", 1, ONE, [np.zeros(8, np.int32), floats(128)]),
    "warp_through_global": ("race", 1, ONE, [floats(128), floats(128)]),
    "plain_poll": ("race", 3, ONE, [np.zeros(384, np.int32), np.zeros(1, np.int32)]),
    "lax_wait": ("not landed", 1, ONE, [floats(128), floats(256)]),
    "uninitialized": ("uninitialized", 1, SIDE, [floats(1024), floats(1024)]),
    "off_by_one_global": ("out of bounds", 2, ONE, [floats(200), np.int32(200)]),
    "off_by_one_shared": ("out of bounds", 1, ONE, [floats(128), floats(128)]),
    "off_by_one_local": ("out of bounds", 1, ONE, [floats(128), np.arange(8, dtype=np.int32)]),
    "wrong_swizzle": ("out of bounds", 1, ONE, [floats(512), floats(512)]),
    "null_pointer": ("out of bounds", 1, ONE, [floats(128), None]),
    "dynamic_shared": ("out of bounds", 1, ONE, [floats(128), floats(128)], 1024),
    "misaligned": ("misaligned", 1, ONE, [floats(128), floats(1280), np.int32(9)]),
    "divergent_barrier": ("divergent barrier", 1, ONE, [floats(128), floats(128)]),
    "barrier_in_branch": ("divergent barrier", 1, ONE, [floats(128), floats(128)]),
    "warp_shuffle_in_branch": ("warp mask", 1, ONE, [floats(128)]),
    "warp_shuffle_after_return": ("warp mask", 2, ONE, [floats(1), floats(200), np.int32(200)]),
    "warp_vote_in_branch": ("warp mask", 1, ONE, [np.zeros(128, np.uint32), floats(128)]),
    "warp_vote_after_return": ("warp mask", 2, ONE, [np.zeros(200, np.uint32), floats(200), np.int32(200)]),
    "warp_match_in_branch": ("warp mask", 1, ONE, [np.zeros(128, np.uint32), np.arange(128, dtype=np.int32)]),
    "warp_reduce_in_branch": ("warp mask", 1, ONE, [np.zeros(1, np.int32), np.arange(128, dtype=np.int32)]),
    "warp_own_lane": ("warp mask", 1, ONE, [floats(128)]),
    "warp_reads_outside": ("warp mask", 1, ONE, [floats(128)]),
    "warp_partial": ("warp mask", 1, (48, 1, 1), [floats(1), floats(48)]),
    "warp_masks_differ": ("warp mask", 1, ONE, [floats(128)]),
    "warp_loop": ("warp mask", 1, ONE, [floats(128), np.arange(128, dtype=np.int32) % 5]),
    "warp_two_shuffles": ("warp mask", 1, ONE, [floats(256)]),
    "warp_softmax": ("warp mask", 1, ONE, [floats(128), np.int32(20)]),
    "warp_sync_never": ("warp mask", 1, ONE, [floats(128), floats(128)]),
    "warp_sync_own_lane": ("warp mask", 1, ONE, [floats(128)]),
    "warp_matrix": ("warp mask", 1, ONE, [np.zeros(128, np.uint32), np.arange(32, dtype=np.uint32)]),
    "mbarrier_count": ("deadlock", 1, ONE, [floats(128)]),
    "mbarrier_parity": ("deadlock", 1, ONE, [floats(128)]),
}


def found(name, fixed=False, seed=None):
    """The findings of one of the kernels."""
    _, blocks, block, args, *shared = FAULTS[name]
    code = (FOLDER / f"{name}.cu").read_text()
    if fixed:
        code = code.replace(code.partition("\n")[0], "#define FIXED", 1)
    return emulate(
        code, name, blocks, block, [np.copy(x) if np.ndim(x) else x for x in args], *shared, seed=seed
    ).findings


def marked(name, word):
    """The lines with this word in a comment after the code."""
    lines = (FOLDER / f"{name}.cu").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if re.search(rf";.*// .*\b{word}\b|\)  // {word}$", line)}


def test_every_kernel_of_the_folder_is_launched():
    """A new kernel is tested."""
    assert set(FAULTS) == {path.stem for path in FOLDER.glob("*.cu")}


@pytest.mark.many(5)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_its_line(name):
    """The kind, the line, and for a race the other line; nothing else is found."""
    others = marked(name, "OTHER") or {None}
    told = {(one.kind, one.line.number, one.other and one.other.number) for one in found(name)}
    assert told == {(FAULTS[name][0], line, other) for line in marked(name, "FAULT") for other in others}


@pytest.mark.many(5)
@pytest.mark.parametrize("name", FAULTS)
def test_nothing_is_found_in_the_repaired_kernel(name):
    """The same kernel without its fault."""
    assert found(name, fixed=True) == ()


@pytest.mark.many(7)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_the_order_of_warps_hides_nothing(name, seed):
    """Every fault is found in any order of blocks and warps, and no repaired kernel has a finding."""
    assert FAULTS[name][0] in {one.kind for one in found(name, seed=seed)}
    assert found(name, fixed=True, seed=seed) == ()


@pytest.mark.parametrize("name", ["divergent_barrier", "barrier_in_branch", "mbarrier_count", "mbarrier_parity"])
def test_who_waits_in_vain_is_found_in_any_order(name):
    """One finding, whatever the order: the same kind, at the same line, of as many threads."""
    usual = [(one.kind, one.line, one.count) for one in found(name)]
    for seed in range(5):
        assert [(one.kind, one.line, one.count) for one in found(name, seed=seed)] == usual, seed


def message(name):
    """The text of the first finding."""
    return str(found(name)[0])


def test_a_message_says_who_where_and_what_to_do():
    """Thread, block, address in the array, both lines, and the remedy."""
    assert message("missing_barrier") == (
        f"{SOURCE}:9: race: thread 0 of block 0 reads byte 508 of shared memory (tile, byte 508), which "
        f"thread 127 writes at {SOURCE}:5; no barrier in between: put __syncthreads() there"
    )
    assert message("off_by_one_global") == (
        f"{SOURCE}:9: out of bounds: thread 72 of block 1 writes 4 bytes at address 0x1320, ending 4 bytes "
        "beyond the 800 of argument 0; bound the index, or allocate more"
    )
    assert message("uninitialized").startswith(
        f"{SOURCE}:10: uninitialized: thread (31, 0, 0) of block 0 reads byte 128 of shared memory (tile, "
    )
    assert "__syncwarp()" in message("missing_syncwarp")
    assert "null pointer" in message("null_pointer")


BEYOND = {
    "x[-1] = 1;": "writes 4 bytes at address 0xffc, 4 bytes before argument 0; bound the index",
    "x[0] = y[int(threadIdx.x) - 3];": "reads 4 bytes at address 0x13f4, 12 bytes before argument 1; bound the index",
    "x[0] = y[16 + threadIdx.x];": "ending 4 bytes beyond the 64 of argument 1; bound the index, or allocate more",
    "z[1000] = 1;": "at address 0xfa0, which is in no array: a null pointer? Pass an array, or check the pointer",
    "z[-1] = 1;": "at address -0x4, which is in no array: a null pointer? Pass an array, or check the pointer",
}


@pytest.mark.parametrize("body", BEYOND)
def test_an_access_outside_names_the_array_that_it_was_meant_for(body):
    """By the parameter that its address is computed from, not by the nearest array."""
    code = f"__global__ void f(float* x, float* y, float* z) {{ {body} }}"
    (one,) = emulate(code, "f", 1, 1, [floats(16), floats(16), None]).findings
    assert one.kind == "out of bounds"
    assert one.message.endswith(BEYOND[body])


def test_a_missing_barrier_shows_where_all_values_are_the_same():
    """Equal stores pass, but not a store over what another thread reads."""
    _, blocks, block, _ = FAULTS["missing_second_barrier"]
    code = (FOLDER / "missing_second_barrier.cu").read_text()
    args = [floats(128), np.ones(512, np.float32), np.int32(4)]
    (one,) = emulate(code, "missing_second_barrier", blocks, block, args).findings
    assert one.kind == "race"


@pytest.mark.parametrize(("barrier", "diverged"), [("bar.sync 1;", True), ("barrier.sync 1;", False)])
def test_warps_may_meet_from_two_places_at_a_barrier_that_is_not_aligned(barrier, diverged):
    meet = f'asm volatile("{barrier}" ::: "memory");'
    code = f"__global__ void f() {{ if (threadIdx.x < 32) {{ {meet} }} else {{ {meet} }} }}"
    assert [one.kind for one in emulate(code, "f", 1, 64, []).findings] == ["divergent barrier"] * diverged


def test_faults_are_counted_over_all_blocks():
    """One finding for a pair of lines, however many threads and blocks commit it."""
    (one,) = found("missing_barrier")
    assert one.count == 3 * 128
    (one,) = found("off_by_one_global")
    assert (one.count, one.block, one.thread) == (1, (1, 0, 0), (72, 0, 0))


INLINED = """#line 3 "ptx.cuh"
__device__ void put(unsigned place, float value) { asm volatile("st.shared.f32 [%0], %1;" :: "r"(place), "f"(value)); }
#line 7 "tile.cuh"
__device__ void fill(float* tile, float value) { put(__cvta_generic_to_shared(tile + threadIdx.x), value); }
#line 20 "kernel.cu"
__global__ void f(float* x) {
  __shared__ float s[32];
  fill(s + 1, x[threadIdx.x]);
}"""


def test_a_function_that_is_one_instruction_stands_for_the_line_that_calls_it():
    """The innermost of three lines, a wrapper of one instruction, is left out."""
    made = nvrtc.ptx_alone(INLINED, SOURCE, "f", "sm_90")
    program = prepared(made.text, made.entry)
    given = bound(program.kernel, [floats(32)])
    (one,) = emulated(program, LaunchConfig((1, 1, 1), (32, 1, 1), given.parameters), given.memory).findings
    assert (str(one.line), str(one.inner)) == (f"{SOURCE}:22", "tile.cuh:7")
    assert str(one).startswith(f"{SOURCE}:22 (tile.cuh:7): out of bounds: thread 31 ")


ATOMIC = """#include <cuda/atomic>
__device__ int at(int& s, int what) {
  cuda::atomic_ref<int, cuda::thread_scope_block> all(s);
  switch (what) {
    case 0: return atomicAdd(&s, 1);
    case 1: return all.load(cuda::memory_order_relaxed);
    case 2: all.store(threadIdx.x, cuda::memory_order_relaxed); return 0;
    case 3: return all.load();
    case 4: all.store(threadIdx.x); return 0;
    case 5: return *(volatile int*)&s;
    case 6: *(volatile int*)&s = threadIdx.x; return 0;
    case 7: return s;
    default: s = threadIdx.x; return 0;
  }
}
__global__ void f(int* x, int writer, int first, int reader, int second) {
  __shared__ int s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  if (writer < 0 || threadIdx.x == writer) x[threadIdx.x] = at(s, first);
  asm volatile("" ::: "memory");
  if (reader < 0 || threadIdx.x == reader) x[threadIdx.x] += at(s, second);
}"""
ADD, LOAD, STORE, ORDERED_LOAD, ORDERED_STORE, SEEN, SET, PLAIN_LOAD, PLAIN_STORE = range(9)
EVERY = -1


@cache
def compiled():
    """The kernel as PTX: a second each time otherwise."""
    folders = tuple(f"-I{folder}" for folder in include.folders())
    return nvrtc.ptx_alone(ATOMIC, SOURCE, "f", "sm_90", folders, include.STANDARD).text


def kinds(first, second, writer=EVERY, reader=EVERY):
    """The findings for two accesses to one place of shared memory, each by one thread or by all."""
    args = [np.zeros(64, np.int32), *map(np.int32, (writer, first, reader, second))]
    return {one.kind for one in emulate(compiled(), "f", 1, 64, args).findings}


@pytest.mark.parametrize(("load", "store"), [(LOAD, STORE), (ORDERED_LOAD, ORDERED_STORE)])
def test_atomic_loads_and_stores_do_not_race(load, store):
    """Neither with updates nor with each other."""
    for pair in [(ADD, load), (load, ADD), (ADD, store), (load, store), (store, load), (ADD, SEEN), (SEEN, ADD)]:
        assert kinds(*pair) == set(), pair


def test_a_plain_access_races_with_an_atomic_one():
    """In either order."""
    for pair in [(ADD, PLAIN_LOAD), (PLAIN_LOAD, ADD), (STORE, PLAIN_LOAD)]:
        assert kinds(*pair) == {"race"}, pair
    for load in (LOAD, SEEN):
        assert kinds(PLAIN_STORE, load, writer=40) == {"race"}, load


def test_volatile_accesses_race_within_a_warp_alone():
    """A flag between warps passes; lanes of one warp that rely on lock step do not."""
    assert kinds(SET, SEEN, writer=5, reader=40) == set()
    assert kinds(SET, SEEN, writer=5, reader=6) == {"race"}
    assert kinds(SET, LOAD, writer=5, reader=6) == set()


HANDED = """
__global__ void f(int* x) {
  __shared__ int data[32], flag, other;
  int seen = 0, one = 1;
  unsigned at = __cvta_generic_to_shared(&flag);
  if (threadIdx.x == 0) flag = other = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    data[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    if (threadIdx.x == 0) { STORE; }
  }
  __syncwarp();
  if (threadIdx.x >= 32) {
    LOAD;
    x[threadIdx.x] = data[threadIdx.x - 32] + seen;
  }
}"""


def assembled(opcode, operands):
    """An instruction in C++."""
    return f'asm volatile("{opcode} {operands};" : "+r"(seen) : "r"(at), "r"(one) : "memory")'


VOLATILE, FENCE = "*(volatile int*)&flag = 1", "__threadfence_block();"
STORES = {
    "release": assembled("st.release.cta.shared.s32", "[%1], %2"),
    "update": assembled("red.release.cta.shared.add.s32", "[%1], %2"),
    "fence": FENCE + VOLATILE,
    "volatile": VOLATILE,
    "late": VOLATILE + ";" + FENCE,
}
SEES = "while (!*(volatile int*)&flag);"
LOADS = {
    "acquire": assembled("ld.acquire.cta.shared.s32", "%0, [%1]"),
    "update": assembled("atom.acq_rel.cta.shared.add.s32", "%0, [%1], %2"),
    "fence": SEES + FENCE,
    "volatile": SEES,
    "early": FENCE + SEES,
    "elsewhere": "at = __cvta_generic_to_shared(&other);" + assembled("ld.acquire.cta.shared.s32", "%0, [%1]"),
}


def handed_over(store, load):
    """The findings for a warp that hands data to another by a flag."""
    source = HANDED.replace("STORE", STORES[store]).replace("LOAD", LOADS[load])
    run = emulate(source, "f", 2, 64, [np.arange(64, dtype=np.int32)])
    return {one.kind for one in run.findings}


@pytest.mark.parametrize("store", ["release", "update", "fence"])
@pytest.mark.parametrize("load", ["acquire", "update", "fence"])
def test_a_flag_hands_data_to_another_warp(store, load):
    """By release and acquire, by fences and volatile accesses, and by one of each."""
    assert handed_over(store, load) == set()


@pytest.mark.parametrize(
    ("store", "load"),
    [
        ("volatile", "volatile"),
        ("volatile", "fence"),
        ("fence", "volatile"),
        ("volatile", "acquire"),
        ("late", "fence"),
        ("fence", "early"),
        ("release", "volatile"),
        ("release", "elsewhere"),
    ],
)
def test_a_flag_without_order_hands_nothing_over(store, load):
    """One side alone orders nothing, nor does a fence on the wrong side of the access, nor another flag."""
    assert handed_over(store, load) == {"race"}
