// Idea: any function of a product's sums, as a launch of its own: a block has a row, so that the function may ask for
// numbers of whole rows, such as their sum or largest element, and for those of what these give. Such numbers are added
// in one order: by a thread along its columns, by lanes in pairs, by warps one after the other.
// Parent: quantize_rows, whose function is fixed. It serves until the kernel with the function in its epilogue is
// there, and what no epilogue does. A and B are the sums with one weight, and with two.
#include "epilogue.cuh"
#include "statistics.cuh"

// That of all threads of a block, which all get.
template <int OPERATION, int THREADS, class S> __device__ __forceinline__ S of_block(Partial<S> mine) {
  __shared__ Partial<S> of_warp[THREADS / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Partial<S> other = {__shfl_xor_sync(~0u, mine.value, offset), __shfl_xor_sync(~0u, mine.sum, offset)};
    mine = threadIdx.x & offset ? together<OPERATION>(other, mine) : together<OPERATION>(mine, other);
  }
  __syncthreads();  // the numbers before have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = of_warp[0];
#pragma unroll
  for (int warp = 1; warp < THREADS / 32; ++warp) mine = together<OPERATION>(mine, of_warp[warp]);
  return OPERATION == ROW_LOG_SUM_EXP ? mine.value + Precise::log(mine.sum) : mine.value;
}

template <int VECTOR, int WIDTH, class T, class S>
__device__ __forceinline__ void load_sums(S (&sum)[WIDTH], S (&second)[WIDTH], const Product<T, S>& p, Spot at) {
  if constexpr (Function::SUMS > 0) load_row<VECTOR>(sum, p.a + at.i * p.a_row, 1, at.j, at.n);
  if constexpr (Function::SUMS == 2) load_row<VECTOR>(second, p.b + at.i * p.b_row, 1, at.j, at.n);
}

// For each statistic of a level, from I on: a partial of none, a number more, and what all threads have together.
template <int LEVEL, int I, class S, int COUNT> __device__ __forceinline__ void begin_level(Partial<S> (&all)[COUNT]) {
  if constexpr (I < Function::STATISTICS) {
    if constexpr (Function::level(I) == LEVEL) all[I] = partial_of_none<Function::operation(I), S>();
    begin_level<LEVEL, I + 1>(all);
  }
}
template <int LEVEL, int I, class S, int COUNT>
__device__ __forceinline__ void add_terms(Partial<S> (&all)[COUNT], const S (&term)[COUNT]) {
  if constexpr (I < Function::STATISTICS) {
    constexpr int OPERATION = Function::operation(I);
    if constexpr (Function::level(I) == LEVEL) all[I] = together<OPERATION>(all[I], partial_of<OPERATION>(term[I]));
    add_terms<LEVEL, I + 1>(all, term);
  }
}
template <int LEVEL, int I, int THREADS, class S, int COUNT>
__device__ __forceinline__ void end_level(S (&statistics)[COUNT], const Partial<S> (&all)[COUNT]) {
  if constexpr (I < Function::STATISTICS) {
    if constexpr (Function::level(I) == LEVEL) statistics[I] = of_block<Function::operation(I), THREADS>(all[I]);
    end_level<LEVEL, I + 1, THREADS>(statistics, all);
  }
}

// The statistics of one level after the other.
template <int LEVEL, int THREADS, int VECTOR, int WIDTH, class T, class S, int COUNT>
__device__ __forceinline__ void take_statistics(S (&statistics)[COUNT], const Product<T, S>& p, int row) {
  if constexpr (LEVEL < Function::LEVELS) {
    Partial<S> partial[COUNT];
    begin_level<LEVEL, 0>(partial);
    for (int j = threadIdx.x * WIDTH; j < p.n; j += THREADS * WIDTH) {
      S sum[WIDTH], second[WIDTH], term[WIDTH][COUNT];
      const Spot at = {row, j, p.m, p.n};
      load_sums<VECTOR, WIDTH, T, S>(sum, second, p, at);
      Function::terms<LEVEL, Precise>(term, sum, second, statistics, operands_of(p), at);
#pragma unroll
      for (int x = 0; x < WIDTH; ++x) {
        if (j + x < p.n) add_terms<LEVEL, 0>(partial, term[x]);
      }
    }
    end_level<LEVEL, 0, THREADS>(statistics, partial);
    take_statistics<LEVEL + 1, THREADS, VECTOR, WIDTH, T, S>(statistics, p, row);
  }
}

template <class T, class S, int EPILOGUE, int THREADS, int WIDTH, int VECTOR>
__global__ void __launch_bounds__(THREADS) traced_rows(const Traced<Product<T, S>> p) {
  constexpr int COUNT = Function::STATISTICS > 0 ? Function::STATISTICS : 1;
  for (int row = blockIdx.x; row < p.m; row += gridDim.x) {
    S statistics[COUNT] = {};
    take_statistics<0, THREADS, VECTOR, WIDTH, T, S>(statistics, p, row);
    for (int j = threadIdx.x * WIDTH; j < p.n; j += THREADS * WIDTH) {
      S sum[WIDTH], second[WIDTH];
      const Spot at = {row, j, p.m, p.n};
      load_sums<VECTOR, WIDTH, T, S>(sum, second, p, at);
      Function::finish<Precise>(sum, second, statistics, operands_of<Product<T, S>>(p), at);
    }
  }
}
