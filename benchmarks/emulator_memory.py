"""Measure the memory that a run of the emulator needs, as a multiple of the kernel's arrays.

    python benchmarks/emulator_memory.py [--mib 256] [KERNEL ...]

Each kernel runs in a process of its own, after a small launch that loads the compiler. What counts is the peak of
resident memory during the launch, less what was resident before it: the caller's arrays and Python are not in it, the
emulator's copy of the arrays is. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import gemmery as gm

COPY = """extern "C" __global__ void f(const float* x, float* y)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i]; }"""
COPY4 = """extern "C" __global__ void f(const float4* x, float4* y)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i]; }"""
IN_PLACE = """extern "C" __global__ void f(float* x)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] *= 2; }"""
TWICE = """extern "C" __global__ void f(float* x, int n)
{ for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += blockDim.x * gridDim.x) x[i] *= 2;
  for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += blockDim.x * gridDim.x) x[i] += 1; }"""
AXPY = """extern "C" __global__ void f(float a, const float* x, float* y)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] += a * x[i]; }"""
BYTES = """extern "C" __global__ void f(unsigned char* x)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] ^= 255; }"""
TRANSPOSE = """extern "C" __global__ void f(const float* x, float* y, int n)
{ __shared__ float tile[32][33];
  int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) tile[threadIdx.y + j][threadIdx.x] = x[(row + j) * n + column];
  __syncthreads();
  column = blockIdx.y * 32 + threadIdx.x; row = blockIdx.x * 32 + threadIdx.y;
  for (int j = 0; j < 32; j += 8) y[(row + j) * n + column] = tile[threadIdx.x][threadIdx.y + j]; }"""
BY_COLUMNS = """extern "C" __global__ void f(const float* x, float* y, int n)
{ int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 8 + threadIdx.y;
  y[column * n + row] = x[row * n + column]; }"""
SUM = """extern "C" __global__ void f(const float* x, float* y)
{ __shared__ float s[256];
  int i = blockIdx.x * 256 + threadIdx.x;
  s[threadIdx.x] = x[i];
  for (int j = 128; j > 0; j /= 2) { __syncthreads(); if (threadIdx.x < j) s[threadIdx.x] += s[threadIdx.x + j]; }
  if (threadIdx.x == 0) atomicAdd(y, s[0]); }"""
HISTOGRAM = """extern "C" __global__ void f(const int* x, int* bins)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; atomicAdd(&bins[x[i]], 1); }"""
SCATTER = """extern "C" __global__ void f(const int* x, float* y)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; y[x[i]] *= 2; }"""
STORE = """extern "C" __global__ void f(const int* x, float* y)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; y[x[i]] = i; }"""
SWAP = """extern "C" __global__ void f(const int* x, float* y, float* z)
{ int i = blockIdx.x * blockDim.x + threadIdx.x, j = x[i]; float t = y[j]; y[j] = z[j]; z[j] = t; }"""
LAST_BLOCK = """__device__ unsigned ticket;
extern "C" __global__ void f(const int* x, int* bins)
{ __shared__ bool last;
  atomicAdd(&bins[x[blockIdx.x * blockDim.x + threadIdx.x]], 1);
  __syncthreads();
  if (threadIdx.x == 0) { __threadfence(); last = atomicAdd(&ticket, 1) == gridDim.x - 1; }
  __syncthreads();
  if (last) { __threadfence(); for (int i = threadIdx.x; i < 4096; i += blockDim.x) bins[i] *= 2; } }"""
MATMUL = """extern "C" __global__ void f(const float* a, const float* b, float* c, int n, int k)
{ __shared__ float s[16][16], t[16][16];
  int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  float sum = 0;
  for (int i = 0; i < k; i += 16) {
    s[y][x] = a[row * k + i + x]; t[y][x] = b[(i + y) * n + column];
    __syncthreads();
    for (int j = 0; j < 16; j++) sum += s[y][j] * t[j][x];
    __syncthreads(); }
  c[row * n + column] = sum; }"""


def launch(kernel: str, size: int) -> list[float]:
    """Run a kernel whose arrays have about `size` bytes; returns their bytes, the peak, seconds, and findings."""
    random = np.random.default_rng(0)
    n = size // 8
    side = int(n**0.5) // 32 * 32
    # Ones, because zeros have no memory before they are written.
    half, full = np.ones(n, np.float32), np.ones(2 * n, np.float32)
    square = np.ones((side, side), np.float32)
    by_name = {
        "copy": (COPY, n // 256, 256, lambda: [half, half.copy()]),
        "copy, blocks of 192": (COPY, n // 192, 192, lambda: [half, half.copy()]),
        "copy by float4": (COPY4, n // 1024, 256, lambda: [half, half.copy()]),
        "in place": (IN_PLACE, n // 128, 256, lambda: [full]),
        "in place, blocks of 1000": (IN_PLACE, 2 * n // 1000, 1000, lambda: [full]),
        "two passes in place": (TWICE, 256, 256, lambda: [full, np.int32(2 * n)]),
        "axpy": (AXPY, n // 256, 256, lambda: [np.float32(2), half, half.copy()]),
        "bytes in place": (BYTES, n // 32, 256, lambda: [np.ones(8 * n, np.uint8)]),
        "transpose by tiles": (
            TRANSPOSE,
            (side // 32, side // 32),
            (32, 8),
            lambda: [square, square.copy(), np.int32(side)],
        ),
        "transpose by columns": (
            BY_COLUMNS,
            (side // 32, side // 8),
            (32, 8),
            lambda: [square, square.copy(), np.int32(side)],
        ),
        "sum": (SUM, n // 128, 256, lambda: [full, np.zeros(1, np.float32)]),
        "histogram, 1000 bins": (
            HISTOGRAM,
            n // 128,
            256,
            lambda: [random.integers(0, 1000, 2 * n, np.int32), np.zeros(1000, np.int32)],
        ),
        "histogram, as many bins": (
            HISTOGRAM,
            n // 256,
            256,
            lambda: [random.integers(0, n, n, np.int32), np.ones(n, np.int32)],
        ),
        "permutation": (SCATTER, n // 256, 256, lambda: [random.permutation(n).astype(np.int32), half]),
        "stores to a permutation": (STORE, n // 256, 256, lambda: [random.permutation(n).astype(np.int32), half]),
        "exchange by a permutation": (
            SWAP,
            2 * n // 3 // 256,
            256,
            lambda: [random.permutation(2 * n // 3).astype(np.int32), half[: 2 * n // 3], half[: 2 * n // 3].copy()],
        ),
        "histogram that is read": (
            LAST_BLOCK,
            n // 256,
            256,
            lambda: [random.integers(0, n, n, np.int32), np.ones(n, np.int32)],
        ),
        "matmul, k = 16": (
            MATMUL,
            (side // 16, side // 16),
            (16, 16),
            lambda: [square[:, :16].copy(), square[:16].copy(), square, np.int32(side), np.int32(16)],
        ),
    }
    code, grid, block, arguments = by_name[kernel]
    values = arguments()
    before, since = _reset_peak(), time.perf_counter()
    run = gm.emulate(code, "f", grid, block, values)
    seconds = time.perf_counter() - since
    arrays = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
    return [arrays, _resident("VmHWM") - before, seconds, len(run.findings)]


def _reset_peak() -> int:
    """Forget the peak so far; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


KERNELS = (
    "copy", "copy, blocks of 192", "copy by float4", "in place", "in place, blocks of 1000", "two passes in place",
    "axpy", "bytes in place", "transpose by tiles", "transpose by columns", "sum", "histogram, 1000 bins",
    "histogram, as many bins", "histogram that is read", "permutation", "stores to a permutation",
    "exchange by a permutation", "matmul, k = 16",
)  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help="all by default")
    parser.add_argument("--mib", type=int, default=256, help="of the arrays together (256)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        launch(options.kernels[0], 1 << 16)
        print(*launch(options.kernels[0], options.mib << 20))  # noqa: T201
        return
    print(f"{'kernel':26} {'arrays MiB':>10} {'peak / arrays':>13} {'seconds':>8} findings")  # noqa: T201
    for kernel in options.kernels or KERNELS:
        command = [sys.executable, __file__, "--alone", "--mib", str(options.mib), kernel]
        arrays, peak, seconds, count = map(float, subprocess.check_output(command, text=True).split())
        row = f"{kernel:26} {arrays / 2**20:10.0f} {peak / arrays:13.2f} {seconds:8.2f} {int(count)}"
        print(row, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
