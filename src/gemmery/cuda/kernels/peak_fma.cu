// The limit of the CUDA cores: chains of multiply-adds in registers, enough of them to hide the latency of each.
#include "types.cuh"

template <class S, int CHAINS> __global__ void peak_fma(S* to, long long steps) {
  S x = S(-0.999) + S(threadIdx.x) * S(1e-6), y = S(threadIdx.x % 32) + S(0.1), sums[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sums[c] = S(c);
  for (long long step = 0; step < steps; ++step) {
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sums[c] = multiply_add(sums[c], x, y);
  }
  S total = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) total += sums[c];
  to[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
