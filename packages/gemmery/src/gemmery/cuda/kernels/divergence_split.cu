// Effect: when the lanes of a warp take two branches, the warp executes both, one after the other.
// A block is one warp, and its upper half takes another branch than its lower half. Each branch is STEPS dependent
// multiply-adds, so that all the time is arithmetic.
#include "ways.cuh"

template <int STEPS>
__global__ void divergence_split(const float* x, float* y, int n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if (threadIdx.x > 15) {
    y[i] = falling<STEPS>(x[i]);
  } else {
    y[i] = rising<STEPS>(x[i]);
  }
}
