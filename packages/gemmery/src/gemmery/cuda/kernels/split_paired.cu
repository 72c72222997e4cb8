// Idea: sums in two numbers each. What an addition rounds off is known exactly, and is summed beside it: the error no
// longer grows with k, only with the DEPTH of k that tensor cores sum. That takes 1/3 as many registers again, so
// the tile has 96 columns; and it takes time, so one warpgroup multiplies while the other adds.
// Parent: split_bf16x6, whose sums round once for every 64 of k.
// Measured on an H200: 88 TFLOP/s at n = 4096 and 94 at 8192, 1.7 and 1.9 times cuBLAS in float32.
#include "split_bf16x6.cu"

// The error of an addition, exact for any order of magnitude: Knuth, The Art of Computer Programming 2, 4.2.2.
template <int SUMS> struct Paired {
  float low[SUMS];
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) low[i] = 0;
  }
  __device__ __forceinline__ void add(float (&sums)[SUMS], const float (&part)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
      const float sum = __fadd_rn(sums[i], part[i]), added = __fsub_rn(sum, sums[i]);
      const float error = __fadd_rn(__fsub_rn(sums[i], __fsub_rn(sum, added)), __fsub_rn(part[i], added));
      low[i] = __fadd_rn(low[i], error);
      sums[i] = sum;
    }
  }
  // Rounded once: a sum of two float32 and its scale are exact in float64, or the lower one no longer counts.
  __device__ __forceinline__ float scaled(const float (&sums)[SUMS], int i, int e) const {
    return float((double(sums[i]) + double(low[i])) * __longlong_as_double((e + 1023LL) << 52));
  }
};

template <class Tiles, int DEPTH> using PairedConsumer = ThreePartsConsumer<Tiles, DEPTH, Paired, true>;

template <class T, class Out, int EPILOGUE, class Tiles, int DEPTH>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_paired(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  multiply_three_parts<EPILOGUE, PairedConsumer<Tiles, DEPTH>, Tiles>(p, shared);
}

template <class T, class Out, int EPILOGUE, class Tiles, int DEPTH>
__global__ void __cluster_dims__(Tiles::CM * Tiles::CN, 1, 1) __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    split_paired_cluster(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  multiply_three_parts<EPILOGUE, PairedConsumer<Tiles, DEPTH>, Tiles>(p, shared);
}
