"""Measure what the emulator takes, by NumPy alone and with compiled basic blocks, one after the other in turn.

    python benchmarks/emulator_speed.py [KERNEL ...]

Small kernels run with blocks of 64 threads, 1, 16 and 256 of them: milliseconds for a million instructions of one
thread. Rungs run products of 256 x 256 x 256 in float32: milliseconds. All findings are on. The first call with
compiled blocks is `cold` where nothing is in the cache on disk; figures are the least processor time of several calls.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

import gemmery as gm
from gemmery.ladder.cuda import CUDA
from gemmery_lab import asked
from gemmery_lab.emulated_product import Gemm, problem_of, run_rung
from gemmery_lab.measure.work import Work, operands
from gemmery_lab.session import entrant

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


RUNGS = (
    "simt_naive", "simt_smem", "simt_threadtile", "simt_vectorized", "simt_padded", "simt_warptile", "simt_pipelined",
)  # fmt: skip
SIDE = 256
WAYS = ("numpy", "auto")


def small(name: str, blocks: int) -> tuple[Callable[[], object], float]:
    """Return a launch of a kernel, and the factor from its seconds to the figure."""
    steps = 400 if blocks == 1 else 100 if blocks == 16 else 20
    x = np.ones(64 + blocks * THREADS, np.int32 if name == "atomics" else np.float32)

    def launch() -> object:
        run = gm.emulate(KERNELS[name], "f", blocks, THREADS, [x, np.int32(steps)])
        assert not run.findings, run.findings
        return run

    return launch, 1e9 / launch().counts.thread_instructions


def rung(name: str) -> tuple[Callable[[], object], float]:
    """Return a product by a rung."""
    work = Work(SIDE, SIDE, SIDE, "f32", "f32")
    gemm = Gemm(*(x[None] for x in operands(work)))
    problem, contender = problem_of(gemm, "f32", "f32", asked.emulated_card("").name), entrant(name, CUDA).rung
    return (lambda: run_rung(contender, problem, contender.default, gemm)), 1e3


def fastest(launch: Callable[[], object], factor: float, rounds: int = 8) -> dict[str, float]:
    """Return the fastest call of each way, and the first one with compiled blocks."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            os.environ["GEMMERY_EMULATOR"] = way
            begin = time.process_time()
            launch()
            times[way].append((time.process_time() - begin) * factor)
    return {way: min(each) for way, each in times.items()} | {"first": times["auto"][0]}


def main() -> None:
    """Print a row for each kernel."""
    chosen = sys.argv[1:] or [*KERNELS, *RUNGS]
    print(f"{'kernel':18} {'blocks':>7} {'NumPy':>9} {'compiled':>9} {'gain':>6} {'first':>9}")  # noqa: T201
    for name in chosen:
        os.environ["GEMMERY_EMULATOR"] = "numpy"
        cases = [(blocks, *small(name, blocks)) for blocks in BLOCKS] if name in KERNELS else [("", *rung(name))]
        for blocks, launch, factor in cases:
            row = fastest(launch, factor)
            gain = row["numpy"] / row["auto"]
            figures = f"{row['numpy']:9.1f} {row['auto']:9.1f} {gain:6.1f} {row['first']:9.1f}"
            print(f"{name:18} {blocks:>7} {figures}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
