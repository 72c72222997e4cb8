// The effect: the lanes of one warp take two ways, and the warp walks both, one after the other.
// A block is one warp; its upper half goes another way than its lower. Each way is STEPS dependent multiply-adds, so
// that arithmetic is all the time there is.
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
