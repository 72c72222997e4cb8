"""Loads by way of the read-only cache of what the kernel stored, and flags of too small a scope between blocks."""

from __future__ import annotations

import numpy as np
import pytest

from gemmery_emulator.findings.global_races import ReadOnlyLoads
from gemmery_emulator.kernels.kernel import emulate

pytest.importorskip("cuda.bindings")
KERNEL = """__global__ void f(float* x, float* y) {
  int t = threadIdx.x;
  x[t] = t;
  __syncthreads();
  y[t] = LOAD;
  MORE
}"""


def findings(load, more="", kind="float"):
    """The findings of a store, a barrier and a load."""
    code = KERNEL.replace("LOAD", load).replace("MORE", more).replace("float*", f"{kind}*")
    dtype = np.uint8 if kind == "unsigned char" else np.float32
    return emulate(code, "f", 1, 64, [np.zeros(64, dtype), np.zeros(64, dtype)]).findings


@pytest.mark.parametrize("kind", ["float", "unsigned char"])
def test_a_read_only_load_after_a_store_is_reported_whatever_orders_the_two(kind):
    (finding,) = findings("__ldg(x + 63 - t)", kind=kind)
    assert (finding.kind, finding.line.number, finding.other.number, finding.count) == ("misuse", 5, 3, 64)
    assert "read-only cache, after the store at kernel.cu:3; it may get the value from before" in finding.message


def test_a_plain_load_and_a_read_only_load_before_the_store_are_not_reported():
    assert findings("x[63 - t]") == ()
    assert findings("__ldg(y + t)", "__syncthreads(); y[t] = 1;") == ()


def test_bytes_beside_a_stored_one_are_not_reported():
    code = """__global__ void f(unsigned char* x, int* y) {
      x[2 * threadIdx.x] = 1;
      __syncthreads();
      y[threadIdx.x] = __ldg(x + 2 * threadIdx.x + 1);
    }"""
    assert emulate(code, "f", 1, 32, [np.zeros(64, np.uint8), np.zeros(32, np.int32)]).findings == ()


BULK = """__global__ void f(float* x, float* y) {
  __shared__ alignas(128) float s[64];
  int t = threadIdx.x;
  s[t] = t;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (t == 0)
    asm volatile("COPY [%0], [%1], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
                 ::"l"(x + FIRST), "r"((unsigned)__cvta_generic_to_shared(s)) : "memory");
  __syncthreads();
  y[t] = LOAD(x + t / 2);
}"""
COPIES = ("cp.async.bulk.global.shared::cta.bulk_group", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32")


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize(
    ("load", "first", "count"), [("__ldg", 0, 64), ("__ldg", 16, 32), ("__ldg", 32, 0), ("*", 0, 0)]
)
def test_a_read_only_load_after_a_bulk_copy_is_reported(copy, load, first, count):
    """A copy of 32 elements, of which the threads load some by way of the cache."""
    code = BULK.replace("COPY", copy).replace("FIRST", str(first)).replace("LOAD", load)
    found = emulate(code, "f", 1, 64, [np.zeros(64, np.float32), np.zeros(64, np.float32)]).findings
    assert [(one.kind, one.count) for one in found] == ([("misuse", count)] if count else [])


def stored_by(stores, monkeypatch):
    """The table of a kernel with many stores, whose last one is loaded."""
    tables = []
    access = ReadOnlyLoads.access
    monkeypatch.setattr(
        ReadOnlyLoads, "access", lambda self, *event: (tables.append(self._stored), access(self, *event))[1]
    )
    lines = "\n".join(f"x[{32 * turn} + threadIdx.x] = {turn};" for turn in range(stores))
    code = f"""__global__ void f(volatile float* x, float* y) {{
{lines}
__syncthreads();
y[threadIdx.x] = __ldg((float*)x + {32 * (stores - 1)} + threadIdx.x);
}}"""
    found = emulate(code, "f", 1, 32, [np.zeros(32 * stores, np.float32), np.zeros(32, np.float32)]).findings
    return tables[-1], found


@pytest.mark.parametrize(("stores", "size"), [(3, 1), (300, 2)])
def test_the_last_store_of_each_place_takes_as_few_bytes_as_number_the_stores(stores, size, monkeypatch):
    table, (finding,) = stored_by(stores, monkeypatch)
    assert table.itemsize == size
    assert (finding.kind, finding.other.number) == ("misuse", 1 + stores)


@pytest.mark.parametrize(
    ("releases", "acquires", "kinds"),
    [
        ("gpu", "gpu", set()),
        ("cluster", "cluster", set()),
        ("cta", "cta", {"race"}),
        ("gpu", "cta", {"race"}),
        ("cta", "gpu", {"race"}),
    ],
)
def test_a_flag_between_blocks_of_a_cluster_has_at_least_its_scope(releases, acquires, kinds):
    code = f"""__global__ void __cluster_dims__(2) f(int* flag, int* data, int* y) {{
      if (threadIdx.x != 0) return;
      if (blockIdx.x == 0) {{
        *data = 42;
        asm volatile("st.release.{releases}.global.u32 [%0], 1;" ::"l"(flag) : "memory");
      }} else {{
        int raised;
        do asm volatile("ld.acquire.{acquires}.global.u32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
        while (!raised);
        *y = *data;
      }}
    }}"""
    arrays = [np.zeros(1, np.int32) for _ in range(3)]
    run = emulate(code, "f", 2, 32, arrays)
    assert {finding.kind for finding in run.findings} == kinds
    assert arrays[2][0] == 42
