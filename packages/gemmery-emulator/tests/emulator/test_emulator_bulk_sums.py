"""cp.reduce.async.bulk without a tensor: rows of shared memory that are added to rows of global memory."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery.errors import EmulationError
from gemmery_emulator.exact import from_bf16, to_bf16
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")
KERNEL = """__global__ void f(const TYPE* x, TYPE* y) {
  __shared__ alignas(128) TYPE s[64];
  s[threadIdx.x] = x[threadIdx.x];
  FENCE
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.OP [%0], [%1], %2;"
                 " cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
                 ::"l"(y), "r"((unsigned)__cvta_generic_to_shared(s)), "n"(BYTES) : "memory");
}"""
FENCE = 'asm volatile("fence.proxy.async;" ::: "memory");'


def summed(x, y, kind, operation, fence=FENCE, blocks=2):
    """Add x to y in each block."""
    code = KERNEL.replace("TYPE", kind).replace("OP", operation).replace("FENCE", fence)
    return emulate(code.replace("BYTES", str(x.nbytes)), "f", blocks, 64, [x, y])


@pytest.mark.parametrize(
    ("kind", "operation", "dtype"),
    [
        ("float", "add.f32", np.float32),
        ("double", "add.f64", np.float64),
        ("int", "add.s32", np.int32),
        ("unsigned", "add.u32", np.uint32),
        ("unsigned long long", "add.u64", np.uint64),
    ],
)
def test_each_block_adds_its_row(kind, operation, dtype):
    x, y = np.arange(64).astype(dtype), np.arange(0, 640, 10).astype(dtype)
    assert summed(x, y, kind, operation).findings == ()
    assert y.tolist() == list(range(0, 768, 12))


def test_half_precision_rounds_each_sum():
    x, y = np.full(64, 1, np.float16), np.full(64, 2048, np.float16)
    bits = to_bf16(np.full(64, 1, np.float32)), to_bf16(np.full(64, 255, np.float32))
    assert summed(*bits, "unsigned short", "add.noftz.bf16").findings == ()
    assert from_bf16(bits[1]).tolist() == [256] * 64  # 255 + 1, and 256 + 1 to even
    halves = x.view(np.uint16), y.view(np.uint16)
    assert summed(*halves, "unsigned short", "add.noftz.f16").findings == ()
    assert y.tolist() == [2048] * 64  # 2048 + 1 to even, twice


def test_a_missing_fence_and_another_operation_are_told():
    x, y = np.ones((2, 64), np.float32)
    assert [each.kind for each in summed(x, y, "float", "add.f32", fence="").findings] == ["misuse"]
    with pytest.raises(EmulationError, match=r"min.*is not modeled"):
        summed(x.view(np.int32), y.view(np.int32), "int", "min.s32")
