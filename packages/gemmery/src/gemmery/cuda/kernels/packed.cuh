// Scratch memory of the ring kernels. Operands that cp.async cannot copy in whole pieces are first copied to rows that
// it can: bit 0 of PACKED stands for A, bit 1 for B. Rows keep their direction and are filled with zeros to a multiple
// of 16 bytes. If k is split, the sums of its parts follow.
#pragma once
#include "load.cuh"

template <class T> __device__ __forceinline__ long long packed_row(int elements) {
  constexpr int VEC = 16 / int(sizeof(T));
  return (elements + VEC - 1LL) / VEC * VEC;
}

// A packed operand at `begin` in scratch memory, from side `first` of matrix `batch` on.
template <bool K_ADJACENT, class T>
__device__ __forceinline__ Panel<T> packed_panel(const T* begin, int batch, int sides, int depth, int first) {
  long long row = packed_row<T>(K_ADJACENT ? depth : sides), step = K_ADJACENT ? row : 1;
  const T* matrix = begin + batch * row * (K_ADJACENT ? sides : depth);
  return {matrix + first * step, step, K_ADJACENT ? 1 : row, sides - first, depth};
}

template <Layout A, int PACKED, class T, class Out>
__device__ __forceinline__ Panel<T> a_panel(const Product<T, Out>& p, Tile tile) {
  if constexpr (!(PACKED & 1)) return panel_of_a(p, tile);
  return packed_panel<A != COL>(static_cast<const T*>(p.workspace), tile.batch, p.m, p.k, tile.row);
}

// Size of a packed operand, in elements.
template <Layout A, int PACKED, class T, class Out>
__device__ __forceinline__ long long packed_a(const Product<T, Out>& p) {
  return PACKED & 1 ? p.batch * packed_row<T>(A != COL ? p.k : p.m) * (A != COL ? p.m : p.k) : 0;
}

template <Layout B, int PACKED, class T, class Out>
__device__ __forceinline__ long long packed_b(const Product<T, Out>& p) {
  return PACKED & 2 ? p.batch * packed_row<T>(B == COL ? p.k : p.n) * (B == COL ? p.n : p.k) : 0;
}

template <Layout A, Layout B, int PACKED, class T, class Out>
__device__ __forceinline__ Panel<T> b_panel(const Product<T, Out>& p, Tile tile) {
  if constexpr (!(PACKED & 2)) return panel_of_b(p, tile);
  const T* begin = static_cast<const T*>(p.workspace) + packed_a<A, PACKED>(p);
  return packed_panel<B == COL>(begin, tile.batch, p.n, p.k, tile.col);
}

// `depth` steps of k from `first` on.
template <class T> __device__ __forceinline__ Panel<T> along_k(const Panel<T>& panel, int first, int depth) {
  return {panel.origin + first * panel.k_step, panel.side_step, panel.k_step, panel.sides, depth};
}

// The sums of the parts of k: a matrix for each part of each product.
template <Layout A, Layout B, int PACKED, class T, class Out>
__device__ __forceinline__ Product<T, float> partial_sums(const Product<T, Out>& p) {
  Product<T, float> parts = {};
  parts.c = reinterpret_cast<float*>(static_cast<T*>(p.workspace) + packed_a<A, PACKED>(p) + packed_b<B, PACKED>(p));
  parts.c_batch = (long long)p.m * p.n;
  parts.c_row = p.n;
  parts.c_col = 1;
  parts.m = p.m;
  parts.n = p.n;
  return parts;
}

// Number of blocks of 32 rows by 32 pieces of 16 bytes in a matrix.
template <bool K_ADJACENT, class T> __device__ __forceinline__ unsigned pack_blocks(int sides, int depth) {
  unsigned columns = (K_ADJACENT ? depth : sides) + 512 / int(sizeof(T)) - 1;
  return ((K_ADJACENT ? sides : depth) + 31) / 32 * (columns / (512 / int(sizeof(T))));
}

// Copies block `index` of a matrix; the threads of a warp follow a row.
template <bool K_ADJACENT, class T>
__device__ __forceinline__ void pack(const Panel<T>& from, const Panel<T>& to, unsigned index) {
  constexpr int VEC = 16 / int(sizeof(T));
  int rows = K_ADJACENT ? from.sides : from.depth, columns = K_ADJACENT ? from.depth : from.sides;
  long long row_step = K_ADJACENT ? from.side_step : from.k_step, step = K_ADJACENT ? from.k_step : from.side_step;
  unsigned across = (columns + 32 * VEC - 1) / (32 * VEC);
  int column = (index % across * 32 + threadIdx.x % 32) * VEC, first = index / across * 32;
  if (column >= columns) return;
  for (int row = first + threadIdx.x / 32; row < min(rows, first + 32); row += blockDim.x / 32) {
    Chunk<T, VEC> piece = {};
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
      if (column + v < columns) piece.of[v] = from.origin[row * row_step + (column + v) * step];
    }
    T* target = const_cast<T*>(to.origin) + row * (K_ADJACENT ? to.side_step : to.k_step) + column;
    *reinterpret_cast<Chunk<T, VEC>*>(target) = piece;
  }
}
