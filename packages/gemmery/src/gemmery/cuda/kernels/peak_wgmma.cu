// Peak of the tensor cores by wgmma: two warpgroups multiply the same tile in shared memory, sums in registers.
#include "wgmma.cuh"

template <class T> __global__ __launch_bounds__(256, 1) void peak_wgmma(double* to, long long steps) {
  using Tiles = WgmmaTiles<T, ROW, COL, 128, 256, 1, Consumers<2>>;
  alignas(1024) __shared__ unsigned ring[Tiles::RING / 4];
  for (int i = threadIdx.x; i < Tiles::RING / 4; i += blockDim.x) ring[i] = i % 32 * 0x10001;  // tiny numbers
  ptx::fence_proxy_async();
  __syncthreads();
  Warpgroup<Tiles> products(ptx::shared_address(ring), threadIdx.x / 128);
  products.clear();
#pragma unroll 1
  for (long long step = 0; step < steps; ++step) {
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < Tiles::PRODUCTS; ++part) products.multiply(0, part, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();  // the other warpgroup multiplies meanwhile
  }
  typename Tiles::S total = 0;
#pragma unroll
  for (int i = 0; i < Tiles::BN / 2; ++i) total += products.sums[0][i];
  to[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
