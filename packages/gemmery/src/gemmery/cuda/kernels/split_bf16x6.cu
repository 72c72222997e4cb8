// Idea: float32 as three bfloat16 is exact: of nine products, the six that count, smallest first, are summed by tensor
// cores over DEPTH of k, then on CUDA cores. Nothing depends on the elements' values, so no element changes another
// row's bits. While the sums of one part of k are added, the products of the next are under way.
// Parent: split_fp16x3, with half as many products, whose two halves have too small a range for some operands.
// Measured on an H200: 99 TFLOP/s at n = 4096 and 108 at 8192, 2.0 and 2.2 times cuBLAS in float32.
#include "wgmma_epilogue.cu"
#include "parts.cuh"

// Sums of all k, to which those of a part of k are added.
template <int SUMS> struct Plain {
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void add(float (&sums)[SUMS], const float (&part)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] += part[i];
  }
  __device__ __forceinline__ float scaled(const float (&sums)[SUMS], int i, int e) const {
    return scaled_by(sums[i], e);
  }
};

// Turns of two warpgroups: each begins its products when the first of the other's have ended, so that it multiplies
// while the other adds. Named barriers from 2 on: each counts the threads that wait and those that let them go on.
template <bool TAKEN> struct WarpgroupTurns {
  int own, other;
  __device__ __forceinline__ explicit WarpgroupTurns(int warpgroup) : own(2 + warpgroup), other(3 - warpgroup) {
    if (TAKEN && warpgroup == 1) ptx::bar_arrive(other, 256);  // the first turn
  }
  __device__ __forceinline__ void begin() const { if (TAKEN) ptx::bar_sync(own, 256); }
  __device__ __forceinline__ void pass() const { if (TAKEN) ptx::bar_arrive(other, 256); }
  __device__ __forceinline__ void end() const { if (TAKEN && own == 2) ptx::bar_sync(own, 256); }
};

template <class Tiles, int DEPTH, template <int> class Adding = Plain, bool TURNS = false>
struct ThreePartsConsumer : PartsConsumer<Tiles, 3> {
  using Base = PartsConsumer<Tiles, 3>;
  using Sums = typename Base::Sums;
  Adding<Base::SUMS> adding;
  WarpgroupTurns<TURNS && Tiles::WARPGROUPS == 2> turns;
  static constexpr int COUNT = DEPTH / 16, UNITS = 64 / DEPTH;  // products of 16 of k, and parts of k in a step

  template <class Pipe>
  __device__ __forceinline__ explicit ThreePartsConsumer(const Pipe& pipe) : Base(pipe), turns(pipe.warpgroup - 1) {}

  static constexpr int TOGETHER = UNITS > 2 ? UNITS : 2;  // units of a turn, an even number

  // A whole number of turns: beyond the end of k there are zeros.
  static __device__ __forceinline__ int steps(int k) {
    constexpr int DEEP = TOGETHER * DEPTH;
    return (k + DEEP - 1) / DEEP * (DEEP / Tiles::BK);
  }

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

  // Two sets of sums take turns: while one is added, the products of the other are under way. Before and after all,
  // none is.
  __device__ __forceinline__ void multiply_together(Sums (&parts)[2]) {
#pragma unroll
    for (int unit = 0; unit < TOGETHER; ++unit) {
      if (unit % UNITS == 0) wait_for_all();
      if (unit == 0) turns.begin();
      multiply_unit(parts[unit % 2], unit % UNITS);
      if (unit > 0) {
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_read_anew(parts[(unit - 1) % 2]);
        if (unit == 1) turns.pass();
        if (unit == UNITS) this->release_all(this->before);
        adding.add(this->sums[0], parts[(unit - 1) % 2]);
      }
      if (unit % UNITS == UNITS - 1) this->next_step();
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_read_anew(parts[1]);
    this->release_all(this->before);
    adding.add(this->sums[0], parts[1]);
  }

  __device__ __forceinline__ void multiply_tile(int steps) {
    this->clear();
    adding.begin();
    Sums parts[2];
#pragma unroll 1
    for (int step = 0; step < steps; step += TOGETHER / UNITS) multiply_together(parts);
  }

  __device__ __forceinline__ void end() const { turns.end(); }

  __device__ __forceinline__ void unscale(const SplitWork& work, Where at, int top) {
    this->unscale_by(work, at, top, [&](int i, int e) { return adding.scaled(this->sums[0], i, e); });
  }
};

template <int EPILOGUE, class Consumer, class Tiles, class P>
__device__ __forceinline__ void multiply_three_parts(const P& p, const char* shared) {
  split_product<Tiles>(p, shared, [&](const SplitWork& work, auto& pipe, auto& order, unsigned) {
    multiply_tiles<EPILOGUE, Tiles, ThreeParts, Consumer>(p, work, pipe, order, shared);
  });
}

template <class T, class Out, int EPILOGUE, class Tiles, int DEPTH>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_bf16x6(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  multiply_three_parts<EPILOGUE, ThreePartsConsumer<Tiles, DEPTH>, Tiles>(p, shared);
}

template <class T, class Out, int EPILOGUE, class Tiles, int DEPTH>
__global__ void __cluster_dims__(Tiles::CM * Tiles::CN, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_bf16x6_cluster(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  multiply_three_parts<EPILOGUE, ThreePartsConsumer<Tiles, DEPTH>, Tiles>(p, shared);
}
