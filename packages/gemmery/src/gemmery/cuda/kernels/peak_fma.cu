// Peak of the CUDA cores: chains of multiply-adds in registers, enough of them to hide their latency. One factor is a
// constant in the instruction: three register operands would conflict in the register banks.
#include "types.cuh"

template <class S, int CHAINS> __global__ void peak_fma(S* to, long long steps) {
  S y = S(threadIdx.x % 32) + S(0.1), sums[CHAINS], total = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sums[c] = S(c);
#pragma unroll 16
  for (long long step = 0; step < steps; ++step) {
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sums[c] = multiply_add(sums[c], S(-0.75), y);
  }
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) total += sums[c];
  to[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
