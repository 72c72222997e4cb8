"""gm.emulate on kernels that launch kernels (dynamic parallelism)."""

import numpy as np
import pytest

import gemmery as gm

pytest.importorskip("cuda.bindings")
BOTH_WAYS = pytest.mark.parametrize("seed", [None, 5])
CHILD = """__global__ void child(float* x, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * factor + i;
}
"""


@BOTH_WAYS
def test_a_child_of_each_block_sees_what_its_parent_stored(seed):
    code = (
        CHILD
        + """__global__ void parent(float* x, int n) {
      x[blockIdx.x * n + threadIdx.x] = blockIdx.x + 1;
      __syncthreads();
      if (threadIdx.x == 0) child<<<2, 32>>>(x + blockIdx.x * n, n, 2.5f);
    }"""
    )
    x = np.full((3, 50), -1, np.float32)
    run = gm.emulate(code, "parent", 3, 50, [x, 50], seed=seed)
    assert run.findings == ()
    assert (x == np.arange(1, 4)[:, None] * np.float32(2.5) + np.arange(50)).all()
    assert run.kernel == "parent"
    assert run.lines["kernel.cu:3"].global_.loads.requests == 3 * 2  # two warps of each child


def test_launches_of_a_tail_come_last_and_others_in_order():
    code = """__global__ void note(int* x, int what) { x[atomicAdd(x, 1) + 1] = what; }
    __global__ void parent(int* x) {
      note<<<1, 1, 0, cudaStreamTailLaunch>>>(x, 30 + blockIdx.x);
      note<<<1, 1, 0, cudaStreamFireAndForget>>>(x, 10 + blockIdx.x);
      note<<<1, 1>>>(x, 20 + blockIdx.x);
      if (cudaGetLastError() != cudaSuccess) x[0] = 100;
    }"""
    x = np.zeros(7, np.int32)
    gm.emulate(code, "parent", 2, 1, [x])
    assert x.tolist()[0] == 6
    assert sorted(x.tolist()[1:5]) == [10, 11, 20, 21]
    assert x.tolist()[5:] == [30, 31]


def test_shared_memory_of_a_child_and_a_struct_passed_to_it():
    code = """struct Pair { double a; short b; };
    __global__ void child(float* x, Pair pair, char c) {
      extern __shared__ float tile[];
      tile[threadIdx.x] = x[threadIdx.x];
      __syncthreads();
      x[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x] + pair.a * pair.b + c;
    }
    __global__ void parent(float* x) { child<<<dim3(1, 1, 1), dim3(64, 1), 256>>>(x, Pair{0.5, -7}, 9); }"""
    x = np.arange(64, dtype=np.float32)
    assert gm.emulate(code, "parent", 1, 1, [x]).findings == ()
    assert (x == np.arange(64)[::-1] - 3.5 + 9).all()


SORT = """__global__ void sort(int* x, int low, int high) {
  if (low >= high) return;
  int middle = x[(low + high) / 2], i = low, j = high;
  while (i <= j) {
    while (x[i] < middle) ++i;
    while (x[j] > middle) --j;
    if (i <= j) { int t = x[i]; x[i++] = x[j]; x[j--] = t; }
  }
  if (low < j) sort<<<1, 1, 0, cudaStreamFireAndForget>>>(x, low, j);
  if (i < high) sort<<<1, 1, 0, cudaStreamFireAndForget>>>(x, i, high);
}"""


def test_a_kernel_that_launches_itself_sorts():
    x = np.random.default_rng(4).permutation(60).astype(np.int32)
    run = gm.emulate(SORT, "sort", 1, 1, [x, 0, 59])
    assert (x == np.arange(60)).all()
    assert run.findings == ()


def test_a_fault_of_a_child_has_its_line_once():
    code = CHILD + "__global__ void parent(float* x) { child<<<1, 32>>>(x + threadIdx.x, 32, 1.0f); }"
    (fault, *others) = gm.emulate(code, "parent", 1, 2, [np.zeros(31, np.float32)]).findings
    assert (fault.kind, fault.line.number) == ("out of bounds", 3)
    assert all(each.line.number == 3 for each in others)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ("<<<1, 1025>>>", r"with grid (1, 1, 1) and block (1025, 1, 1): 1 to 1024 threads"),
        ("<<<0, 32>>>", "no side of 0"),
    ],
)
def test_a_launch_that_a_device_refuses_is_a_finding(launch, words):
    x = np.ones(32, np.float32)
    code = CHILD + f"__global__ void parent(float* x) {{ child{launch}(x, 32, 2.0f); }}"
    (finding,) = gm.emulate(code, "parent", 1, 1, [x]).findings
    assert finding.kind == "misuse"
    assert words in finding.message
    assert (x == 1).all()


def test_launches_end_at_the_limits_of_a_device():
    code = "__global__ void f(int* x) { x[0] += 1; f<<<1, 1>>>(x); }"
    with pytest.raises(gm.EmulationError, match=r"is launched at depth 25: at most 24, as on a device"):
        gm.emulate(code, "f", 1, 1, [np.zeros(1, np.int32)])
    code = CHILD + "__global__ void parent(float* x) { child<<<1, 1>>>(x, 0, 1.0f); }"
    with pytest.raises(gm.EmulationError, match=r"more than 2048 launches from kernels wait at kernel.cu:5"):
        gm.emulate(code, "parent", 3, 1024, [np.zeros(1, np.float32)])
