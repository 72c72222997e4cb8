"""Kernels that are objects of Numba and CuPy: values, counters, lines of Python, and refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from gemmery.errors import ArgumentError, InstallError
from gemmery_emulator.kernels.kernel import emulate

SCALED = r"""
template <int N> __global__ void scaled(float* x, float by) { x[threadIdx.x] *= by * N * FACTOR; }
extern "C" __global__ void plain(const float* x, float* y, int n) {
  extern __shared__ float s[];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  s[threadIdx.x] = i < n ? x[i] : 0;
  __syncthreads();
  if (i < n) y[i] = s[blockDim.x - 1 - threadIdx.x];
}"""


@pytest.fixture(scope="module")
def cuda():
    numba = pytest.importorskip("numba.cuda", reason="Numba is not installed")

    @numba.jit
    def nothing(x):
        x[0] = 1

    try:
        emulate(nothing, 1, 32, [np.zeros(1, np.float32)], check=False)
    except InstallError as error:
        pytest.skip(str(error))
    return numba


@pytest.mark.parametrize("n", [1, 97, 1000])
def test_a_sum_of_numba(cuda, n):
    @cuda.jit
    def added(x, y, out, n):
        i = cuda.grid(1)
        if i < n:
            out[i] = x[i] + y[i]

    x, y = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
    out = np.zeros_like(x)
    run = emulate(added, -(-n // 256), 256, [x, y, out, n])
    assert (out == x + y).all()
    assert run.findings == ()
    assert (run.kernel, run.flops, run.global_.loads.used) == ("added", n, 8 * n)
    assert emulate(added, grid=4, block=(256,), args={"x": x, "y": y, "out": out, "n": n}).flops == n


def test_a_product_of_numba_in_shared_memory(cuda):
    from numba import float32

    @cuda.jit(fastmath=True)
    def product(a, b, c):
        left, right = cuda.shared.array((16, 16), float32), cuda.shared.array((16, 16), float32)
        i, j = cuda.grid(2)
        x, y = cuda.threadIdx.x, cuda.threadIdx.y
        total = float32(0)
        for k in range(0, a.shape[1], 16):
            left[x, y], right[x, y] = a[i, y + k], b[x + k, j]
            cuda.syncthreads()
            for inner in range(16):
                total += left[x, inner] * right[inner, y]
            cuda.syncthreads()
        c[i, j] = total

    a, b = np.random.default_rng(0).standard_normal((2, 32, 32)).astype(np.float32)
    c = np.zeros_like(a)
    run = emulate(product, (2, 2), (16, 16), [np.asfortranarray(a), b, c])
    exact = a.astype("f8") @ b.astype("f8")
    assert (abs(c - exact) <= 2.0**-18 * (abs(a) @ abs(b))).all()
    assert run.findings == ()
    assert run.shared.bank_conflicts > 0


def test_functions_and_values_of_numba(cuda):
    @cuda.jit
    def total(x, out):
        value = x[cuda.grid(1)]
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
        if cuda.laneid == 0:
            cuda.atomic.add(out, 0, value)

    @cuda.jit
    def mixed(x, by, number, pair, flag, offset):
        i = cuda.grid(1)
        if flag:
            x[i] = math.exp(x[i]) * by + pair[0] + pair[1] * number.real + offset

    x = np.arange(64, dtype=np.float32)
    out = np.zeros(1, np.float32)
    emulate(total, 2, 32, [x, out])
    assert out[0] == x.sum()
    y = x.astype("f8") / 64
    emulate(mixed, 1, 64, [y, 2.0, 1 + 2j, (3, 4.5), True, np.int16(7)])
    assert (abs(y - (2 * np.exp(x.astype("f8") / 64) + 14.5)) <= 1e-14).all()


def test_blocks_of_numba_meet_at_the_grid(cuda):
    @cuda.jit
    def rotated(x, y):
        i = cuda.grid(1)
        y[i] = 2 * x[i]
        cuda.cg.this_grid().sync()
        x[i] = y[(i + 64) % x.size]

    x = np.arange(256, dtype=np.float32)
    expected = 2 * np.roll(x, -64)
    run = emulate(rotated, 4, 64, [x, np.zeros_like(x)])
    assert (x == expected).all()
    assert run.findings == ()


def test_a_finding_of_numba_has_its_line(cuda):
    @cuda.jit
    def beyond(x):
        x[cuda.grid(1) + 1] = 1

    finding = emulate(beyond, 1, 64, [np.zeros(64, np.float32)]).findings[0]
    assert finding.kind == "out of bounds"
    assert f"test_emulation_objects.py:{beyond.py_func.__code__.co_firstlineno + 2}" in str(finding)


def test_refusals_of_numba(cuda):
    @cuda.jit
    def kernel(x):
        x[0] = 1

    for call, words in (
        (lambda: emulate(kernel, 1, [np.zeros(1)]), "emulate.kernel, grid, block, args"),
        (lambda: emulate(kernel, 1, 32, ["text"]), "argument 0 is 'text'"),
        (lambda: emulate(kernel, 1, 32, {"y": np.zeros(1)}), "takes x"),
        (lambda: emulate(kernel, 1, 32, [np.zeros(1)], num_warps=4), "num_warps=4"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()


def raw_kernel(code, name, options=()):
    """CuPy's own class where CuPy is installed; it compiles nothing before the first launch. Else one like it."""
    try:
        from cupy import RawKernel
    except ImportError:
        return SimpleNamespace(code=code, name=name, options=options)
    return RawKernel(code, name, options)


def test_a_raw_kernel():
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    run = emulate(raw_kernel(SCALED.replace("FACTOR", "1"), "plain"), (2,), (64,), (x, y, np.int32(100)), shared=256)
    assert (y[:64] == x[:64][::-1]).all()
    assert (run.kernel, run.findings) == ("plain", ())
    emulate(raw_kernel(SCALED, "scaled<3>", ("-DFACTOR=2",)), 1, 32, [x, np.float32(0.5)])
    assert (x[:33] == [*(3.0 * np.arange(32)), 32]).all()
    with pytest.raises(ArgumentError, match="num_warps=2"):
        emulate(raw_kernel(SCALED, "plain"), 1, 32, [x], num_warps=2)


def test_what_is_no_kernel():
    for source in (3, print, SimpleNamespace(code=b"", name="x")):
        with pytest.raises(ArgumentError, match="RawKernel"):
            emulate(source, 1, 32, [])
