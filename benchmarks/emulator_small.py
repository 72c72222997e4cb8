"""Measure what the emulator takes for launches of few threads, in milliseconds for a million thread instructions.

    python benchmarks/emulator_small.py [KERNEL ...]

Each kernel runs with blocks of 64 threads, 1, 16 and 256 of them, with all findings on. A first launch compiles it; the
figure is the fastest of five others. A launch of few threads costs the time of Python and of NumPy's calls, about the
same for each instruction, so the figure falls as the launch grows.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import gemmery as gm

THREADS = 64
BLOCKS = (1, 16, 256)
KERNELS = {
    "arithmetic": """extern "C" __global__ void f(float* x, int n)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; float s = i, t = 1;
  for (int j = 0; j < n; j++) { s = s * 1.0001f + t; t = t * 0.999f - s; }
  x[i] = s + t; }""",
    "loads": """extern "C" __global__ void f(float* x, int n)
{ int i = blockIdx.x * blockDim.x + threadIdx.x; float s = 0;
  #pragma unroll 1
  for (int j = 0; j < n; j++) { s += x[(i + j) & 63]; }
  x[64 + i] = s; }""",
    "loads and stores": """extern "C" __global__ void f(float* x, int n)
{ int i = blockIdx.x * blockDim.x + threadIdx.x;
  #pragma unroll 1
  for (int j = 0; j < n; j++) x[64 + i] = x[64 + i] * 0.5f + j; }""",
    "shared": """extern "C" __global__ void f(float* x, int n)
{ __shared__ float s[64]; int t = threadIdx.x; s[t] = t;
  #pragma unroll 1
  for (int j = 0; j < n; j++) {
    __syncthreads(); float v = s[(t + 1) & 63]; __syncthreads(); s[t] = v + 1; }
  x[64 + blockIdx.x * 64 + t] = s[t]; }""",
    "divergent": """extern "C" __global__ void f(float* x, int n)
{ int t = threadIdx.x; float s = t;
  #pragma unroll 1
  for (int j = 0; j < n; j++) {
    if ((t + j) & 1) s = s * 1.5f + x[t & 63]; else s = x[(t + j) & 63] - s; }
  x[64 + blockIdx.x * 64 + t] = s; }""",
    "shuffles": """extern "C" __global__ void f(float* x, int n)
{ int t = threadIdx.x; float s = t;
  #pragma unroll 1
  for (int j = 0; j < n; j++) s += __shfl_xor_sync(~0u, s, 1 + (j & 15)) * 0.5f;
  x[64 + blockIdx.x * 64 + t] = s; }""",
    "atomics": """extern "C" __global__ void f(int* x, int n)
{ int t = threadIdx.x;
  #pragma unroll 1
  for (int j = 0; j < n; j++) {
    atomicAdd(&x[(t * 7 + j) % 61], j);
    int old = atomicAdd(&x[64 + (t + j) % 32], 1);
    if (old == -5) x[100] = old; } }""",
    "reduction": """extern "C" __global__ void f(float* x, int n)
{ __shared__ float s[64]; int t = threadIdx.x; float sum = 0;
  #pragma unroll 1
  for (int j = 0; j < n; j++) {
    s[t] = x[(t + j) & 63];
    for (int h = 32; h > 0; h /= 2) { __syncthreads(); if (t < h) s[t] += s[t + h]; }
    __syncthreads(); sum += s[0]; __syncthreads(); }
  x[64 + blockIdx.x * 64 + t] = sum; }""",
}


def milliseconds(name: str, blocks: int) -> float:
    """Return the milliseconds of a launch for a million instructions of one thread."""
    steps = 400 if blocks == 1 else 100 if blocks == 16 else 20
    kind = np.int32 if name == "atomics" else np.float32
    x = np.ones(64 + blocks * THREADS, kind)
    fastest = np.inf
    for _ in range(6):
        begin = time.perf_counter()
        run = gm.emulate(KERNELS[name], "f", blocks, THREADS, [x, np.int32(steps)])
        fastest = min(fastest, time.perf_counter() - begin)
        assert not run.findings, run.findings
    return fastest * 1e9 / run.counts.thread_instructions


def main() -> None:
    """Print a row for each kernel."""
    chosen = sys.argv[1:] or list(KERNELS)
    print(f"{'kernel':18}", *(f"{blocks:>6} blocks" for blocks in BLOCKS))  # noqa: T201
    for name in chosen:
        print(f"{name:18}", *(f"{milliseconds(name, blocks):13.1f}" for blocks in BLOCKS), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
