// Peak of the tensor cores by mma.sync: chains of products in registers. (Hopper's wgmma is faster.)
#include "types.cuh"

// One product of a warp: sums += a b. In f64, one of 16 rows where available, or two of 8.
__device__ __forceinline__ void multiply(f16, float (&sums)[4], const unsigned (&a)[4]) {
  ptx::mma_m16n8k16_f16(sums, a, a[2], a[3]);
}
__device__ __forceinline__ void multiply(bf16, float (&sums)[4], const unsigned (&a)[4]) {
  ptx::mma_m16n8k16_bf16(sums, a, a[2], a[3]);
}
__device__ __forceinline__ void multiply(tf32, float (&sums)[4], const unsigned (&a)[4]) {
  ptx::mma_m16n8k8_tf32(sums, a, a[2], a[3]);
}
__device__ __forceinline__ void multiply(double, double (&sums)[4], const double (&a)[4]) {
#if __CUDA_ARCH__ >= 900
  ptx::mma_m16n8k4_f64(sums, {a[0], a[1]}, a[2]);
#else
  ptx::mma_m8n8k4_f64(sums[0], sums[1], a[0], a[2]);
  ptx::mma_m8n8k4_f64(sums[2], sums[3], a[1], a[2]);
#endif
}

template <class T> struct Registers { using operand = unsigned; using sum = float; };
template <> struct Registers<double> { using operand = double; using sum = double; };

template <class T, int CHAINS> __global__ void peak_mma(double* to, long long steps) {
  typename Registers<T>::operand a[4];
  typename Registers<T>::sum sums[CHAINS][4] = {}, total = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = threadIdx.x % 32 * 0x10001 + i;  // tiny numbers, so that no sum overflows
#pragma unroll 2
  for (long long step = 0; step < steps; ++step) {
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) multiply(T(), sums[c], a);
  }
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) total += sums[c][0] + sums[c][1] + sums[c][2] + sums[c][3];
  to[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
