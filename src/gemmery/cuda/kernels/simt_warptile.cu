// The idea: three levels, block tile -> warp tile -> thread tile. The lanes of a warp sit close together, so that a
// warp reads WM + WN elements of shared memory a step of k, and pairs of lanes that read the same share a wavefront.
// Its parent: simt_padded, where a warp spans the whole width of the block's tile.
// Measured on an H200 at n = 4096: a little faster in f32; a tie in f64, where one block has the multiprocessor's
// registers and waits for each tile. A 16-byte read alone takes 2 cycles when pairs of lanes agree, and 4 when they do
// not.
#include "registers.cuh"

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int WM, int WN, int TM, int TN, int BLOCKS>
__global__ void __launch_bounds__(BM / TM * (BN / TN), BLOCKS) simt_warptile(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  using TileA = KMajor<BM, BK, A == ROW ? 4 : 0>;
  using TileB = KMajor<BN, BK, B == COL ? 4 : 0>;
  using Place = Seat<BN, WM, WN, TM, TN, strip<S, TM>(), strip<S, TN>()>;
  constexpr int THREADS = BM / TM * (BN / TN), ROWS_APART = Place::ROWS_APART, COLUMNS_APART = Place::COLUMNS_APART;
  __shared__ alignas(16) S a_tile[TileA::SIZE], b_tile[TileB::SIZE];

  Tile tile = tile_of_block<BM, BN>(p);
  auto a_panel = panel_of_a(p, tile);
  auto b_panel = panel_of_b(p, tile);
  Load<T, A, A_VEC, BM, BK, THREADS> a_load(a_panel);
  Load<T, transposed(B), B_VEC, BN, BK, THREADS> b_load(b_panel);
  Place at;
  S sums[TM][TN] = {};
  for (int k0 = 0; k0 < p.k; k0 += BK) {
    a_load.fetch(a_panel);
    b_load.fetch(b_panel);
    a_load.template put<TileA>(a_tile);
    b_load.template put<TileB>(b_tile);
    __syncthreads();
    multiply_tiles<TileA, TileB, ROWS_APART, COLUMNS_APART, BK>(a_tile, b_tile, at.row, at.column, sums);
    __syncthreads();
  }
  store_registers<EPILOGUE, ROWS_APART, COLUMNS_APART, C_VEC>(p, tile.batch, tile.row + at.row, tile.col + at.column,
                                                              sums);
}
