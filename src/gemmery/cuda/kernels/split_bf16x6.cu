// Idea: float32 as three bfloat16 is exact: of nine products, the six that count, smallest first, are summed by tensor
// cores over DEPTH of k, then on CUDA cores. Nothing depends on the elements' values, so no element changes another
// row's bits. While the sums of one part of k are added, the products of the next are under way.
// Parent: split_fp16x3, with half as many products, whose two halves have too small a range for some operands.
#include "split_fp16x3.cu"

template <class Tiles, int DEPTH> struct ThreePartsConsumer : PartsConsumer<Tiles, 3> {
  using Base = PartsConsumer<Tiles, 3>;
  using Base::Base;
  using Sums = typename Base::Sums;
  static constexpr int COUNT = DEPTH / 16, UNITS = 64 / DEPTH;  // products of 16 of k, and parts of k in a step

  // Two steps at a time: beyond the end of k there are zeros.
  static __device__ __forceinline__ int steps(int k) { return (k + 2 * Tiles::BK - 1) / (2 * Tiles::BK) * 2; }

  __device__ __forceinline__ void wait_for_all() {
#pragma unroll
    for (int part = 0; part < 3; ++part) this->wait_for(part);
  }

  __device__ __forceinline__ void multiply_unit(Sums& part, int unit) {
    ptx::wgmma_fence();
    this->template multiply_parts<COUNT>(part, 0, 2, unit * COUNT, false);
    this->template multiply_parts<COUNT>(part, 1, 1, unit * COUNT, true);
    this->template multiply_parts<COUNT>(part, 2, 0, unit * COUNT, true);
    this->template multiply_parts<COUNT>(part, 0, 1, unit * COUNT, true);
    this->template multiply_parts<COUNT>(part, 1, 0, unit * COUNT, true);
    this->template multiply_parts<COUNT>(part, 0, 0, unit * COUNT, true);
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void add(const Sums& part, bool begins) {
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) this->sums[0][i] = begins ? part[i] : this->sums[0][i] + part[i];
  }

  // Two steps, so that two sets of sums take turns. No product is under way before and after.
  __device__ __forceinline__ void multiply_steps(bool begins) {
    Sums parts[2];
#pragma unroll
    for (int unit = 0; unit < 2 * UNITS; ++unit) {
      if (unit % UNITS == 0) wait_for_all();
      multiply_unit(parts[unit % 2], unit % UNITS);
      if (unit > 0) {
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_read_anew(parts[(unit - 1) % 2]);
        if (unit == UNITS) this->release_all(this->before);
        add(parts[(unit - 1) % 2], begins && unit == 1);
      }
      if (unit % UNITS == UNITS - 1) this->next_step();
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_read_anew(parts[1]);
    this->release_all(this->before);
    add(parts[1], false);
  }

  __device__ __forceinline__ void multiply_tile(int steps) {
    multiply_steps(true);
#pragma unroll 1
    for (int step = 2; step < steps; step += 2) multiply_steps(false);
  }
};

// With ALWAYS it does not ask whether two parts would do.
template <class T, class Out, int EPILOGUE, class Tiles, int DEPTH, bool ALWAYS>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_bf16x6(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  split_product<EPILOGUE, Tiles, ThreeParts, ThreePartsConsumer<Tiles, DEPTH>>(p, shared, false,
                                                                                         ALWAYS ? 0 : INEXACT);
}
