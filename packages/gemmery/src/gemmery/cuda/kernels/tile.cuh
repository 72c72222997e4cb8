// The tile of C that a block computes, and elements of A and B that may be beyond the edges.
#pragma once
#include "product.cuh"

struct Tile { int batch, row, col; };  // the tile's first row and column of C

// Tiles in a one-dimensional grid, batch after batch. Blocks that run together take GROUP rows of tiles by as many
// columns, so that they share their parts of A and B in L2.
// SPLITS blocks after each other have the same tile.
template <int BM, int BN, int GROUP = 8, int SPLITS = 1, class T, class Out>
__device__ __forceinline__ Tile tile_of_block(const Product<T, Out>& p) {
  unsigned rows = (p.m + BM - 1) / BM, columns = (p.n + BN - 1) / BN, each = rows * columns;
  unsigned batch = blockIdx.x / SPLITS / each, index = blockIdx.x / SPLITS % each;
  unsigned first = index / (GROUP * columns) * GROUP, height = min(rows - first, unsigned(GROUP));
  unsigned within = index % (GROUP * columns);
  return {int(batch), int((first + within % height) * BM), int(within / height * BN)};
}

// Element (i, k) of A, and (k, j) of B; zero beyond the edges.
template <class To, class T, class Out>
__device__ __forceinline__ To a_or_zero(const Product<T, Out>& p, int batch, int i, int k) {
  return i < p.m && k < p.k ? widen<To>(*p.a_at(batch, i, k)) : ZeroOf<To>::value();
}

template <class To, class T, class Out>
__device__ __forceinline__ To b_or_zero(const Product<T, Out>& p, int batch, int k, int j) {
  return k < p.k && j < p.n ? widen<To>(*p.b_at(batch, k, j)) : ZeroOf<To>::value();
}
