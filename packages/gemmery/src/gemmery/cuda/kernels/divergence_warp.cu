// Effect: when two warps take one branch each, neither waits for the other.
// Parent: divergence_split. The same two branches for the same number of threads, but split between warps.
// Measured on an H200: half the time.
#include "ways.cuh"

template <int STEPS>
__global__ void divergence_warp(const float* x, float* y, int n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (threadIdx.x > warpSize - 1) {
    y[i] = falling<STEPS>(x[i]);
  } else {
    y[i] = rising<STEPS>(x[i]);
  }
}
