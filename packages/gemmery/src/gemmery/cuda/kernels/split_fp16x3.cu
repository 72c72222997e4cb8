// Idea: float32 on tensor cores, as two halves: three products with the accuracy of float32, where one of tf32 is wrong
// from the fourth digit. High times high is summed on CUDA cores every 64 of k; the two corrections, 2^-11 of it, stay
// in tensor cores to the end. Tensor cores cut sums toward zero: over a long k that becomes a bias, which ends with
// every sum that CUDA cores take over and round.
// Parent: wgmma_epilogue, whose sums tensor cores keep to the end.
// Measured on an H200: 206 TFLOP/s at n = 4096 and 230 at 8192 with the pre-pass, 4.0 and 4.5 times cuBLAS in float32.
#include "split_bf16x6.cu"

template <class Tiles> struct TwoPartsConsumer : PartsConsumer<Tiles, 2> {
  using Base = PartsConsumer<Tiles, 2>;
  using Base::Base;
  typename Base::Sums corrections;

  static __device__ __forceinline__ int steps(int k) { return (k + Tiles::BK - 1) / Tiles::BK; }

  // While the corrections of a step are under way, its high products are added.
  __device__ __forceinline__ void multiply_step(typename Base::Sums& high, bool begins) {
    this->wait_for(0);
    ptx::wgmma_fence();
    this->template multiply_parts<4>(high, 0, 0, 0, false);
    ptx::wgmma_commit_group();
    this->wait_for(1);
    ptx::wgmma_fence();
    this->template multiply_parts<4>(corrections, 0, 1, 0, !begins);
    this->template multiply_parts<4>(corrections, 1, 0, 0, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_read_anew(high);
    if (!begins) this->release_all(this->before);
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) this->sums[0][i] = begins ? high[i] : this->sums[0][i] + high[i];
    this->next_step();
  }

  __device__ __forceinline__ void multiply_tile(int steps) {
    typename Base::Sums high;
    multiply_step(high, true);
#pragma unroll 1
    for (int step = 1; step < steps; ++step) multiply_step(high, false);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_read_anew(corrections);
    this->release_all(this->before);
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) this->sums[0][i] = multiply_add(corrections[i], 0x1p-11f, this->sums[0][i]);
  }
};

template <class T, class Out, int EPILOGUE, class Tiles, class OtherTiles, int DEPTH>
__device__ __forceinline__ void split_fp16x3_tiles(const TmaProduct<T, Out>& p, const char* shared) {
  split_product<Tiles>(p, shared, [&](const SplitWork& work, auto& pipe, auto& order, unsigned status) {
    if (status & INEXACT) {
      multiply_tiles<EPILOGUE, OtherTiles, ThreeParts, ThreePartsConsumer<OtherTiles, DEPTH>>(p, work, pipe, order,
                                                                                              shared);
    } else {
      multiply_tiles<EPILOGUE, Tiles, TwoParts, TwoPartsConsumer<Tiles>>(p, work, pipe, order, shared);
    }
  });
}

template <class T, class Out, int EPILOGUE, class Tiles, class OtherTiles, int DEPTH>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_fp16x3(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  split_fp16x3_tiles<T, Out, EPILOGUE, Tiles, OtherTiles, DEPTH>(p, shared);
}

template <class T, class Out, int EPILOGUE, class Tiles, class OtherTiles, int DEPTH>
__global__ void __cluster_dims__(Tiles::CM * Tiles::CN, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_fp16x3_cluster(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  split_fp16x3_tiles<T, Out, EPILOGUE, Tiles, OtherTiles, DEPTH>(p, shared);
}
