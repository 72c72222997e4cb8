// A thread's part of a tile of C, in registers.
#pragma once
#include "epilogue.cuh"
#include "load.cuh"
#include "tiling.cuh"

// Elements of S in one 16-byte access, if COUNT of them can be split into such accesses.
template <class S, int COUNT> constexpr int strip() {
  int most = 16 / int(sizeof(S));
  while (COUNT % most) most /= 2;
  return most;
}

// COUNT sides of step k of a tile: strips of adjacent sides, APART sides from one to the next, the first at `side`.
template <class Arrangement, int APART, int COUNT, class S>
__device__ __forceinline__ void fragment(S (&x)[COUNT], const S* tile, int side, int k) {
  constexpr int STRIP = strip<S, COUNT>();
#pragma unroll
  for (int s = 0; s < COUNT / STRIP; ++s) {
    if constexpr (Arrangement::ORDER == COL) {
      constexpr bool EVEN = APART % Arrangement::SPAN == 0;
      const S* from = EVEN ? tile + Arrangement::at(side, k) + s * APART : tile + Arrangement::at(side + s * APART, k);
      auto read = *reinterpret_cast<const Chunk<S, STRIP>*>(from);
#pragma unroll
      for (int v = 0; v < STRIP; ++v) x[s * STRIP + v] = read.of[v];
    } else {
#pragma unroll
      for (int v = 0; v < STRIP; ++v) x[s * STRIP + v] = tile[Arrangement::at(side + s * APART + v, k)];
    }
  }
}

template <int TM, int TN, class S> __device__ __forceinline__ void clear(S (&sums)[TM][TN]) {
#pragma unroll
  for (int i = 0; i < TM * TN; ++i) sums[i / TN][i % TN] = ZeroOf<S>::value();
}

// Rows are walked in pairs, down one column and up the next, and every other pair from right to left: each multiply-add
// then shares a factor with the previous one, which is still in the register file's reuse cache. A tall tile is walked
// likewise by columns, and f64, whose operands fill both register banks, one column at a time.
template <int TM, int TN, class S>
__device__ __forceinline__ void outer_product(const S (&a)[TM], const S (&b)[TN], S (&sums)[TM][TN]) {
  constexpr bool DOWN = TM > TN || sizeof(S) == 8;
  constexpr int ALONG = DOWN ? TM : TN, ACROSS = DOWN ? TN : TM, LINES = sizeof(S) == 8 || ACROSS % 2 ? 1 : 2;
#pragma unroll
  for (int step = 0; step < TM * TN; ++step) {
    int band = step / (LINES * ALONG), forth = step / LINES % ALONG;
    int along = band % 2 ? ALONG - 1 - forth : forth, across = band * LINES + (step + forth) % LINES;
    int i = DOWN ? along : across, j = DOWN ? across : along;
    sums[i][j] = multiply_add(a[i], b[j], sums[i][j]);
  }
}

// Adds the BK outer products of two tiles in shared memory, from the thread's first row and column on.
template <class TileA, class TileB, int ROWS_APART, int COLUMNS_APART, int BK, int TM, int TN, class S>
__device__ __forceinline__ void multiply_tiles(const S* a_tile, const S* b_tile, int row, int column,
                                               S (&sums)[TM][TN]) {
  // Reading a tile element by element keeps more values in registers than two blocks of 256 threads have.
  constexpr int UNROLL = TileA::ORDER == COL ? BK : 2;
#pragma unroll UNROLL
  for (int k = 0; k < BK; ++k) {
    S a[TM], b[TN];
    fragment<TileA, ROWS_APART>(a, a_tile, row, k);
    fragment<TileB, COLUMNS_APART>(b, b_tile, column, k);
    outer_product(a, b, sums);
  }
}

// Stores the sums of a thread in C: rows and columns in strips as above, or `SINGLE`, from (i, j) on, VEC elements at a
// time.
template <int EPILOGUE, int ROWS_APART, int COLUMNS_APART, int VEC, bool SINGLE = false, int TM, int TN, class S,
          class T, class Out>
__device__ __forceinline__ void store_registers(const Product<T, Out>& p, int batch, int i, int j,
                                                const S (&sums)[TM][TN]) {
  constexpr int TALL = SINGLE ? 1 : strip<S, TM>(), WIDE = SINGLE ? 1 : strip<S, TN>(), STEP = VEC < WIDE ? VEC : WIDE;
#pragma unroll
  for (int y = 0; y < TM; ++y) {
    int row = i + y / TALL * ROWS_APART + y % TALL;
    if (row >= p.m) continue;
#pragma unroll
    for (int x = 0; x < TN; x += STEP) {
      int column = j + x / WIDE * COLUMNS_APART + x % WIDE;
      if (column >= p.n) continue;
      Out* c = p.c_at(batch, row, column);
      Chunk<Out, STEP> out;
#pragma unroll
      for (int v = 0; v < STEP; ++v) out.of[v] = finished<EPILOGUE>(p, c + v, row, column + v, sums[y][x + v]);
      *reinterpret_cast<Chunk<Out, STEP>*>(c) = out;
    }
  }
}

// How a block's threads load the tiles of A and of B.
template <class T, class Access, class Tiles>
using LoadA = Load<typename OperandsOf<T>::A, Access::A, Access::A_VEC, Tiles::BM, Tiles::BK, Tiles::THREADS>;
template <class T, class Access, class Tiles>
using LoadB = Load<typename OperandsOf<T>::B, transposed(Access::B), Access::B_VEC, Tiles::BN, Tiles::BK,
                   Tiles::THREADS>;

// Computes a tile of C with sums in registers: tiles of A and B are loaded into shared memory and multiplied in turn.
// The rungs choose the layout of the tiles (TileA, TileB), and which elements of C a thread computes (Tiling).
template <int EPILOGUE, class Access, class Tiles, class TileA, class TileB, class Tiling, class T, class Out>
__device__ __forceinline__ void multiply_in_registers(const Product<T, Out>& p) {
  using S = Sum<T, Out>;
  constexpr int ROWS_APART = Tiling::ROWS_APART, COLUMNS_APART = Tiling::COLUMNS_APART;
  __shared__ alignas(16) S a_tile[TileA::SIZE], b_tile[TileB::SIZE];
  Tile tile = tile_of_block<Tiles::BM, Tiles::BN>(p);
  auto a_panel = panel_of_a(p, tile);
  auto b_panel = panel_of_b(p, tile);
  LoadA<T, Access, Tiles> a_load(a_panel);
  LoadB<T, Access, Tiles> b_load(b_panel);
  Tiling at;
  S sums[Tiles::TM][Tiles::TN] = {};
  for (int k0 = 0; k0 < p.k; k0 += Tiles::BK) {
    a_load.fetch(a_panel);
    b_load.fetch(b_panel);
    a_load.template put<TileA>(a_tile);
    b_load.template put<TileB>(b_tile);
    __syncthreads();
    multiply_tiles<TileA, TileB, ROWS_APART, COLUMNS_APART, Tiles::BK>(a_tile, b_tile, at.row, at.column, sums);
    __syncthreads();
  }
  store_registers<EPILOGUE, ROWS_APART, COLUMNS_APART, Access::C_VEC>(p, tile.batch, tile.row + at.row,
                                                                      tile.col + at.column, sums);
}
