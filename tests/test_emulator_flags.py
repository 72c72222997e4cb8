"""Blocks that hand sums to each other by flags in global memory: in any order, and as many as a device runs."""

from __future__ import annotations

import numpy as np
import pytest

import hopper
from gemmery.lab.kernel import emulate

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


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("owner", [0, 3])
@pytest.mark.parametrize("way", RAISING)
def test_the_owner_of_a_sum_waits_for_the_others(way, owner, seed):
    """It may run before all of them, and lowers the flags that it has seen."""
    handing_over(way, 4, 64, owner, seed)


def test_blocks_that_a_device_runs_together_wait_for_each_other():
    """More threads than run in lock step otherwise: the first block waits for the last."""
    handing_over("release", 132, 384, 0, rounds=1)
