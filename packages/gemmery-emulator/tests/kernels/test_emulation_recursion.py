"""gm.emulate on functions that call themselves, by name, by each other and through pointers."""

import numpy as np
import pytest

import gemmery as gm

pytest.importorskip("cuda.bindings")
N = 64
LANES = np.arange(N)
BOTH_WAYS = pytest.mark.parametrize("seed", [None, 5])  # compiled, and by the interpreter in another order


def test_two_calls_in_one_function():
    code = """__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
    __global__ void f(int* x) { x[threadIdx.x] = fib(x[threadIdx.x]) * 100 + fib(threadIdx.x % 5); }"""
    x = (LANES % 13).astype(np.int32)
    assert gm.emulate(code, "f", 1, N, [x]).findings == ()
    fib = [0, 1]
    while len(fib) < 13:
        fib.append(fib[-1] + fib[-2])
    assert x.tolist() == [fib[i % 13] * 100 + fib[i % 5] for i in range(N)]


@BOTH_WAYS
def test_functions_that_call_each_other(seed):
    code = """__device__ bool odd(int n);
    __device__ __noinline__ bool even(int n) { return n == 0 ? true : odd(n - 1); }
    __device__ __noinline__ bool odd(int n) { return n == 0 ? false : even(n - 1); }
    __device__ __noinline__ int ack(int m, int n) {
      return m == 0 ? n + 1 : n == 0 ? ack(m - 1, 1) : ack(m - 1, ack(m, n - 1));
    }
    __global__ void f(int* x) { int i = threadIdx.x; x[i] = even(i) + 2 * odd(i) + 4 * ack(i % 3, i % 4); }"""

    def ack(m, n):
        return n + 1 if m == 0 else ack(m - 1, ack(m, n - 1) if n else 1)

    x = np.zeros(N, np.int32)
    assert gm.emulate(code, "f", 1, N, [x], seed=seed).findings == ()
    assert x.tolist() == [1 + i % 2 + 4 * ack(i % 3, i % 4) for i in range(N)]


@BOTH_WAYS
def test_each_call_has_local_arrays_and_a_struct_of_its_own(seed):
    code = """struct Row { int a[3]; };
    __device__ __noinline__ void walk(int n, int* out, Row row) {
      int mine[4];
      for (int i = 0; i < 4; ++i) mine[i] = n * 10 + i + row.a[i % 3];
      if (n > 0) {
        int sum = 0;
        row.a[n % 3] += n;
        walk(n - 1, &sum, row);
        walk(n - 2, &mine[n & 3], row);
        *out += sum;
      }
      for (int i = 0; i < 4; ++i) *out += mine[(i + n) & 3] * (i + 1);
    }
    __global__ void f(int* x) {
      int out = 1;
      walk(threadIdx.x % 6, &out, Row{{1, 2, 3}});
      x[threadIdx.x] = out;
    }"""

    def walk(n, row):
        mine, out = [n * 10 + i + row[i % 3] for i in range(4)], 0
        if n > 0:
            row = [each + n * (i == n % 3) for i, each in enumerate(row)]
            out = walk(n - 1, row)
            mine[n & 3] += walk(n - 2, row)
        return out + sum(mine[(i + n) & 3] * (i + 1) for i in range(4))

    x = np.zeros(N, np.int32)
    assert gm.emulate(code, "f", 1, N, [x], seed=seed).findings == ()
    assert x.tolist() == [1 + walk(i % 6, [1, 2, 3]) for i in range(N)]


def test_quicksort_in_global_memory():
    code = """__device__ void sort(float* x, int low, int high) {
      if (low >= high) return;
      float middle = x[(low + high) / 2];
      int i = low, j = high;
      while (i <= j) {
        while (x[i] < middle) ++i;
        while (x[j] > middle) --j;
        if (i <= j) { float t = x[i]; x[i++] = x[j]; x[j--] = t; }
      }
      sort(x, low, j), sort(x, i, high);
    }
    __global__ void rows(float* x) { sort(x + threadIdx.x * 37, 0, 36); }"""
    x = np.random.default_rng(3).standard_normal((N, 37)).astype(np.float32)
    y = x.copy()
    assert gm.emulate(code, "rows", 1, N, [y]).findings == ()
    assert (y == np.sort(x, axis=1)).all()


@pytest.mark.parametrize("check", [True, False])
def test_virtual_functions_of_a_tree(check):
    code = """struct Node { __device__ virtual int sum(int depth) const = 0; };
    struct Leaf : Node {
      int value;
      __device__ Leaf(int v) : value(v) {}
      __device__ int sum(int depth) const override { return value * depth; }
    };
    struct Pair : Node {
      const Node *a, *b;
      __device__ Pair(const Node* a, const Node* b) : a(a), b(b) {}
      __device__ int sum(int depth) const override { return a->sum(depth + 1) + b->sum(depth + 1); }
    };
    __global__ void f(int* x) {
      Leaf a(threadIdx.x), b(2), c(3);
      Pair p(&a, &b), q(&p, &c), root(&q, threadIdx.x & 1 ? (Node*)&p : (Node*)&a);
      x[threadIdx.x] = root.sum(0);
    }"""
    x = np.zeros(N, np.int32)
    assert gm.emulate(code, "f", 1, N, [x], check=check).findings == ()
    assert (x == (LANES + 2) * 3 + 6 + np.where(LANES & 1, (LANES + 2) * 2, LANES)).all()


@pytest.mark.parametrize(("local", "most"), [("", 1024), ("int a[4]; a[n & 3] = n; n += a[x[n & 7] & 3];", 512)])
def test_a_recursion_without_an_end_is_an_error_that_names_its_depth(local, most):
    code = f"""__device__ __noinline__ int down(int n, const int* x) {{ {local} return n % 3 + down(n - 1, x) * n; }}
    __global__ void f(int* x) {{ x[threadIdx.x] = down(threadIdx.x, x); }}"""
    words = rf"down\(.*\) is called at depth {most + 1} by thread 0 of block 0 \(kernel.cu:1\): at most {most} calls"
    with pytest.raises(gm.EmulationError, match=words):
        gm.emulate(code, "f", 1, N, [np.zeros(N, np.int32)])
