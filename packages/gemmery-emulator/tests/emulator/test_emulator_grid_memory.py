"""What races in global memory cost in memory: one stamp for a read and the write after it, none for atomics alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gemmery as gm
from gemmery_emulator import memory

pytestmark = pytest.mark.sampled(3)

pytest.importorskip("cuda.bindings")

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "emulator_memory.py"

# The stores of both blocks are equal, which is no race; the read of one and the store of the other are one.
READ_THEN_WRITTEN = """extern "C" __global__ void f(int* y, int* x) {
  int t = threadIdx.x, read;
  if (blockIdx.x == BLOCK) {
    read = x[t];
    x[t] = 7;
    y[t] = read;
    AFTER
  } else if (blockIdx.x == LAST - BLOCK) {
    x[t] = 7;
  }
}"""
LAST = 299  # a block that runs after the first one has ended
AFTER = {
    "nothing": "",
    "another store of the thread": "__syncthreads(); x[t] = 7;",
    "a store of another thread": "__syncthreads(); x[t ^ 32] = 7;",
    "both once more": "__syncthreads(); read = x[t ^ 32]; x[t ^ 32] = 7; y[t] = read;",
}


@pytest.mark.parametrize("block", [0, LAST])
@pytest.mark.parametrize("after", AFTER)
def test_a_read_is_known_after_writes_of_the_same_place(after, block):
    """Where the thread that reads also writes, and other threads of its block write later."""
    code = READ_THEN_WRITTEN.replace("BLOCK", str(block)).replace("LAST", str(LAST)).replace("AFTER", AFTER[after])
    run = gm.emulate(code, "f", LAST + 1, 256, [np.zeros(256, np.int32), np.zeros(256, np.int32)])
    read = next(number for number, line in enumerate(code.splitlines(), 1) if "read = x[t];" in line)
    pairs = {frozenset((one.line.number, one.other.number)) for one in run.findings if one.kind == "race"}
    assert any(read in pair for pair in pairs), run.findings


def test_a_read_is_known_after_another_thread_has_read():
    """Thread 0 has read before the barrier, so it differs from thread 32 alone."""
    code = """extern "C" __global__ void f(int* y, int* x) {
      int t = threadIdx.x;
      if (t == 0) y[1] = x[0];
      __syncthreads();
      if (t == 32) {
        int read = x[0];
        x[0] = 7;
        y[2] = read;
        asm volatile("" ::: "memory");
        x[0] = 7;
      }
      if (t == 0) x[0] = 7;
    }"""
    run = gm.emulate(code, "f", 1, 64, [np.zeros(64, np.int32), np.zeros(64, np.int32)])
    assert [(one.kind, one.line.number, one.other.number) for one in run.findings] == [("race", 12, 6)]


ONLY_ATOMICS = """extern "C" __global__ void f(unsigned* bins, const int* x, int* y) {
  int i = blockIdx.x * 64 + threadIdx.x;
  ACCESS
}"""
ACCESSES = {
    "atomics alone": ("atomicAdd(&bins[x[i]], 1);", False),
    "updates of two kinds": ("if (i & 1) atomicMax(&bins[x[i]], 1); else atomicAdd(&bins[x[i]], 1);", False),
    "a read as well": ("atomicAdd(&bins[x[i]], 1); y[i] = bins[5];", True),
    "a store as well": ("if (i == 3) bins[5] = 0; else atomicAdd(&bins[x[i]], 1);", True),
    "a store by a pointer of unknown origin": (
        "unsigned* p = (unsigned*)((size_t)bins ^ y[0]); if (i == 3) *p = 2; else atomicAdd(&bins[x[i]], 1);",
        True,
    ),
    "atomics of a block's scope": ("atomicAdd_block(&bins[x[i]], 1);", True),
}


@pytest.mark.parametrize("case", ACCESSES)
def test_atomics_race_with_plain_accesses_alone(case):
    """And with those of a block's scope in another block."""
    access, races = ACCESSES[case]
    arrays = [np.zeros(8, np.uint32), np.arange(256, dtype=np.int32) % 8, np.zeros(256, np.int32)]
    run = gm.emulate(ONLY_ATOMICS.replace("ACCESS", access), "f", 4, 64, arrays)
    assert bool(run.findings) == races


def test_a_flag_that_only_atomics_access_hands_over():
    """What is stored before it is raised is seen by those who see it raised."""
    code = """extern "C" __global__ void f(int* flag, int* x) {
      if (blockIdx.x == 0) {
        x[threadIdx.x] = 5;
        __syncthreads();
        if (threadIdx.x == 0) { __threadfence(); atomicExch(flag, 1); }
      } else {
        if (threadIdx.x == 0) { while (atomicAdd(flag, 0) == 0) { } __threadfence(); }
        __syncthreads();
        x[threadIdx.x] += 1;
      }
    }"""
    x = np.zeros(64, np.int32)
    assert not gm.emulate(code, "f", 2, 64, [np.zeros(1, np.int32), x]).findings
    assert x.tolist() == [6] * 64
    assert gm.emulate(code.replace("__threadfence();", ""), "f", 2, 64, [np.zeros(1, np.int32), x]).findings


BETWEEN_CHUNKS = """extern "C" __global__ void f(int* flag, int* own, int* x) {
  int t = threadIdx.x;
  if (blockIdx.x == 0) {
    if (t == 32) {
      x[0] = 5;
      __threadfence_block();
      atomicExch_block(own, 1);
    }
    __syncwarp();
    if (t == 0) {
      while (atomicAdd_block(own, 0) == 0) __nanosleep(8);
      FENCE
      atomicExch(flag, 1);
    }
  } else if (blockIdx.x == 1023 && t == 0) {
    while (atomicAdd(flag, 0) == 0) __nanosleep(8);
    __threadfence();
    x[0] += 1;
  }
}"""


@pytest.mark.parametrize("fence", ["__threadfence();", ""])
def test_what_a_block_has_handed_over_is_known_to_blocks_of_a_later_chunk(fence):
    """Also what another warp of that block handed over within the block."""
    x = np.zeros(1, np.int32)
    arrays = [np.zeros(1, np.int32), np.zeros(1, np.int32), x]
    run = gm.emulate(BETWEEN_CHUNKS.replace("FENCE", fence), "f", 1024, 256, arrays)
    assert x[0] == 6
    assert bool(run.findings) == (not fence)


@pytest.mark.process
@pytest.mark.many
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and stamps are packed on Linux alone")
@pytest.mark.parametrize("kernel", ["permutation", "histogram, as many bins", "in place"])
def test_a_run_takes_less_than_twice_its_arrays(kernel):
    """With all that the emulator needs besides the caller's arrays, at 64 MiB, as docs/emulator.md says.

    The first run, of fewer blocks, compiles them, which takes some 64 MiB once; the second reads them from the cache.
    """
    for mib in ("16", "64"):
        said = subprocess.check_output([sys.executable, str(BENCHMARK), "--mib", mib, kernel], text=True)
    assert float(said.splitlines()[-1].split()[-3]) < 2


@pytest.mark.parametrize("hashed", [0, 1 << 30])
def test_bytes_are_told_from_others_by_a_copy_or_a_hash(hashed, monkeypatch):
    monkeypatch.setattr(memory, "HASHED", hashed)
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)
    before = memory.remembered(data)
    assert isinstance(before, bytes) == (hashed == 0)
    assert memory.is_as_remembered(data, before)
    for place in (0, 1 << 20, len(data) - 1):
        data[place] ^= 128
        assert not memory.is_as_remembered(data, before)
        data[place] ^= 128
    assert memory.is_as_remembered(data, before)


@pytest.mark.parametrize("hashed", [0, 1 << 30])
def test_loops_that_wait_end_or_are_told_also_where_memory_is_hashed(hashed, monkeypatch):
    monkeypatch.setattr(memory, "HASHED", hashed)
    code = """extern "C" __global__ void f(volatile int* x) {
      if (threadIdx.x < 32) { while (x[0] != 1) { } x[1] = 2; }
      else { WORK; if (threadIdx.x == 32) x[0] = VALUE; }
    }"""
    work = "for (int i = 0; i < 3000; i++) x[2 + threadIdx.x] += 1"
    x = np.zeros(66, np.int32)
    gm.emulate(code.replace("WORK", work).replace("VALUE", "1"), "f", 1, 64, [x])
    assert x[:2].tolist() == [1, 2]
    assert (x[34:] == 3000).all()
    with pytest.raises(gm.EmulationError, match=r"threads loop forever at kernel\.cu:2"):
        gm.emulate(code.replace("WORK", work).replace("VALUE", "3"), "f", 1, 64, [x * 0])
