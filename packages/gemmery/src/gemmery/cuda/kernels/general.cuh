// Writes C with alpha, beta and bias that are known when a kernel runs; an activation has an image of its own.
#pragma once
#include "epilogue.cuh"
#include "load.cuh"

// The steps of `finished` in epilogue.cuh, with the same bits: an alpha of 1 changes none.
template <int EPILOGUE, int COUNT, class T, class Out>
__device__ __forceinline__ void finish_general(const Product<T, Out>& p, const Out* c, int i, int j,
                                               Sum<T, Out> (&sums)[COUNT]) {
  using S = Sum<T, Out>;
#pragma unroll
  for (int v = 0; v < COUNT; ++v) sums[v] *= p.alpha;
  if (p.beta != 0) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      if (j + v < p.n) sums[v] = multiply_add(p.beta, widen<S>(c[v * p.c_col]), sums[v]);
    }
  }
  if (p.bias) {
    const S* bias = p.bias + i * p.bias_row + j * p.bias_col;
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      if (j + v < p.n) sums[v] += bias[v * p.bias_col];
    }
  }
#pragma unroll
  for (int v = 0; v < COUNT; ++v) sums[v] = activate<EPILOGUE>(sums[v]);
  if constexpr (EPILOGUE & TRACED) Function::apply<Precise>(sums, sums, operands_of(p), {i, j, p.m, p.n});
}

// Stores a block's BM x BN sums, which are in shared memory in rows of PITCH: 16 bytes at a time where C allows it.
template <int EPILOGUE, int BM, int BN, int PITCH, int THREADS, class S, class T, class Out>
__device__ __forceinline__ void store_general(const Product<T, Out>& p, Tile tile, const S* sums) {
  constexpr int VEC = 16 / int(sizeof(Out)), ACROSS = BN / VEC;
  static_assert(BM * ACROSS % THREADS == 0 && THREADS % ACROSS == 0, "all threads store as much");
  int row = threadIdx.x / ACROSS, column = threadIdx.x % ACROSS * VEC, j = tile.col + column;
  if (j >= p.n) return;
  Out* c = p.c_at(tile.batch, tile.row + row, j);
  unsigned odd = unsigned(reinterpret_cast<unsigned long long>(c)) | unsigned(p.c_row) * sizeof(Out);
  bool whole = p.c_col == 1 && odd % 16 == 0 && j + VEC <= p.n;
  const S* from = sums + row * PITCH + column;
  int rows = p.m - tile.row - row;
#pragma unroll 1
  for (int y = 0; y < BM && y < rows; y += THREADS / ACROSS) {
    S results[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) results[v] = from[v];
    finish_general<EPILOGUE>(p, c, tile.row + row + y, j, results);
    Chunk<Out, VEC> out;
#pragma unroll
    for (int v = 0; v < VEC; ++v) out.of[v] = narrow<Out>(results[v]);
    if (whole) {
      *reinterpret_cast<Chunk<Out, VEC>*>(c) = out;
    } else {
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        if (j + v < p.n) c[v * p.c_col] = out.of[v];
      }
    }
    from += THREADS / ACROSS * PITCH;
    c += THREADS / ACROSS * p.c_row;
  }
}
