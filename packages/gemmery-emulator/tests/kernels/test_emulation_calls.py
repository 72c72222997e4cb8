"""gm.emulate on calls through a pointer: tables of functions, virtual functions, targets by name."""

import numpy as np
import pytest

import gemmery as gm

N = 64
X = np.arange(N, dtype=np.float32)
WHICH = np.arange(N, dtype=np.int32) % 3
TABLES = """
typedef float (*Op)(float, float);
__device__ float add(float a, float b) { return a + b; }
__device__ float times(float a, float b) { return a * b; }
__device__ float last(float a, float b) { return __shfl_sync(0xffffffff, a, 31) + b; }
__device__ float loop(float a, float b) { for (int n = int(a) % 5; n > 0; n--) a += b; return a; }
__device__ double other(double a, double b) { return a - b; }
__device__ Op table[4] = {add, times, loop, last};
__constant__ Op second[3] = {times, loop, add};
__device__ double (*wide)(double, double) = other;
__global__ void tables(float* x, const int* which) {
  int i = threadIdx.x;
  float first = table[which[i]](x[i], 3);
  x[i] = first + second[which[i]](x[i], 0.5f) + float(wide(i, 1));
}
__global__ void guarded(float* x, const int* which, int from) {
  int i = threadIdx.x;
  Op op = i < from ? nullptr : table[which[i]];  // beyond its end there is a null pointer
  if (i >= from) x[i] = op(x[i], 2);
}
__global__ void addresses(Op* out) { out[threadIdx.x] = table[threadIdx.x]; }"""


def loop(a, b):
    return a + b * (a.astype(int) % 5)


def chosen(which, *ways):
    return np.choose(which, [way.astype(np.float32) for way in ways])


def test_threads_of_a_warp_call_different_functions_of_a_table():
    x = X.copy()
    run = gm.emulate(TABLES, "tables", 1, N, [x, WHICH])
    assert run.findings == ()
    first = chosen(WHICH, X + 3, X * 3, loop(X, 3))
    assert np.array_equal(x, first + chosen(WHICH, X * 0.5, loop(X, 0.5), X + 0.5) + (X - 1))


def test_a_whole_warp_may_shuffle_in_the_function_that_it_calls():
    x = X.copy()
    run = gm.emulate(TABLES, "guarded", 1, N, [x, np.full(N, 3, np.int32), 32])
    assert run.findings == ()
    assert np.array_equal(x, np.where(X < 32, X, 65))


def test_a_pointer_that_holds_no_function_is_a_finding():
    x, which = X.copy(), np.where(X == 5, 4, 0).astype(np.int32)
    run = gm.emulate(TABLES, "guarded", 1, N, [x, which, 0])
    calls, outside = sorted(run.findings, key=lambda finding: finding.kind)
    assert (calls.kind, calls.count, calls.thread) == ("misuse", 1, (5, 0, 0))
    assert "calls through a pointer that holds the address of no function of its prototype" in calls.message
    assert (outside.kind, outside.thread) == ("out of bounds", (5, 0, 0))
    assert np.array_equal(x, np.where(X == 5, X, X + 2))


def test_functions_have_different_addresses_in_no_memory():
    out = np.zeros(4, np.uint64)
    gm.emulate(TABLES, "addresses", 1, 4, [out])
    assert np.unique(out).size == 4
    assert out.min() > 1 << 42


def test_virtual_functions():
    code = """
    struct Shape { __device__ virtual float area(float x) const = 0; };
    struct Square : Shape { __device__ float area(float x) const override { return x * x; } };
    struct Row : Shape {
      float height; __device__ Row(float h) : height(h) {}
      __device__ float area(float x) const override { return x * height; }
    };
    struct Twice : Shape {
      const Shape* inner; __device__ Twice(const Shape* s) : inner(s) {}
      __device__ float area(float x) const override { return 2 * inner->area(x); }
    };
    __global__ void areas(float* x, const int* which) {
      int i = threadIdx.x;
      Square square; Row row(3); Twice twice(NESTED);
      const Shape* shapes[3] = {&square, &row, &twice};
      x[i] = shapes[which[i]]->area(x[i]);
    }"""
    x = X.copy()
    which = WHICH % 2
    assert gm.emulate(code.replace("NESTED", "&row"), "areas", 1, N, [x, which]).findings == ()
    assert np.array_equal(x, np.where(which == 0, X * X, X * 3))
    x = X.copy()
    with pytest.raises(
        gm.EmulationError,
        match=r"area\(float\) const is called at depth 1025 by thread \d+ of block 0 \(kernel.cu:\d+\)",
    ):
        gm.emulate(code.replace("NESTED", "which[i] == 2 ? (Shape*)&twice : &row"), "areas", 1, N, [x, WHICH])


PTX = """.version 8.0
.target sm_90
.address_size 64
.func (.reg .u32 r) up(.reg .u32 a) { add.u32 r, a, 1; ret; }
.func (.reg .u32 r) down(.reg .u32 a) { sub.u32 r, a, 1; ret; }
.func (.reg .u32 r) never(.reg .u32 a) { mov.u32 r, 77; ret; }
.visible .entry f(.param .u64 x) {
  .reg .u32 %r<4>; .reg .u64 %rd<6>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  setp.lt.u32 %p1, %r1, 8;
  mov.u64 %rd3, up;
  mov.u64 %rd4, down;
  mov.u64 %rd5, never;
  selp.u64 %rd3, %rd3, %rd4, %p1;
  mov.u32 %r2, 5;
  LIST
  @%p0 call (%r2), %rd5, (%r1), list;
  call (%r2), %rd3, (%r1), list;
  st.global.u32 [%rd1], %r2;
  ret;
}"""


@pytest.mark.parametrize("listed", [".calltargets up, down", ".callprototype (.reg .u32 _) _ (.reg .u32 _)"])
def test_targets_by_name_and_by_prototype(listed):
    x = np.zeros(32, np.uint32)
    run = gm.emulate(PTX.replace("LIST", f"list: {listed};"), "f", 1, 32, [x])
    lanes = np.arange(32, dtype=np.uint32)
    assert run.findings == ()
    assert np.array_equal(x, np.where(lanes < 8, lanes + 1, lanes - 1))


def test_a_function_that_the_list_of_targets_leaves_out_is_not_called():
    run = gm.emulate(PTX.replace("LIST", "list: .calltargets up;"), "f", 1, 32, [np.zeros(32, np.uint32)])
    assert [(finding.kind, finding.count) for finding in run.findings] == [("misuse", 24)]
