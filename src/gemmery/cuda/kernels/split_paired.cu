// Idea: sums in two numbers each. What an addition rounds off is known exactly, and is summed beside it: the error no
// longer grows with k, only with the DEPTH of k that tensor cores sum. A thread has no registers for a second set of
// their sums then; while one warpgroup adds, the other multiplies.
// Parent: split_bf16x6, whose sums round once for every 64 of k.
#include "split_bf16x6.cu"

template <class Tiles, int DEPTH> struct PairedConsumer : ThreePartsConsumer<Tiles, DEPTH> {
  using Base = ThreePartsConsumer<Tiles, DEPTH>;
  using Base::Base;
  typename Base::Sums low;

  static __device__ __forceinline__ int steps(int k) { return (k + Tiles::BK - 1) / Tiles::BK; }

  // The error of an addition, exact for any order of magnitude: Knuth, The Art of Computer Programming 2, 4.2.2.
  __device__ __forceinline__ void add_pair(const typename Base::Sums& part) {
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) {
      float& high = this->sums[0][i];
      const float sum = __fadd_rn(high, part[i]), added = __fsub_rn(sum, high);
      low[i] = __fadd_rn(low[i], __fadd_rn(__fsub_rn(high, __fsub_rn(sum, added)), __fsub_rn(part[i], added)));
      high = sum;
      ptx::computed_here(high);  // one after the other: many at a time would have no registers
      ptx::computed_here(low[i]);
    }
  }

  __device__ __forceinline__ void multiply_tile(int steps) {
    this->clear();
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) low[i] = 0;
    typename Base::Sums part;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      this->wait_for_all();
#pragma unroll 1
      for (int unit = 0; unit < Base::UNITS; ++unit) {
        this->multiply_unit(part, unit);
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_read_anew(part);
        if (unit + 1 == Base::UNITS) this->release_all(this->now.stage);
        add_pair(part);
      }
      this->next_step();
    }
#pragma unroll
    for (int i = 0; i < Base::SUMS; ++i) this->sums[0][i] += low[i];
  }
};

template <class T, class Out, int EPILOGUE, class Tiles, int DEPTH>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_paired(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  split_product<EPILOGUE, Tiles, ThreeParts, PairedConsumer<Tiles, DEPTH>>(p, shared, false, 0);
}
