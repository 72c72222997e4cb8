// Idea: in both tiles k is the outer dimension, so that a step of k is read 16 bytes at once; an operand contiguous in
// k is transposed when stored. Padding of 4 elements per step keeps those stores on different banks. A thread's rows
// and columns are in strips of 16 bytes, so that adjacent lanes read adjacent strips.
// Parent: simt_vectorized, whose lanes have bank conflicts when they read either tile.
// Measured on an H200 at n = 4096: 1.34 times as fast in f32, 1.6 in f64. The reads of a warp for one step of k
// take 12 wavefronts instead of 24, in f64 24 instead of 72: now the arithmetic takes longer than the reads.
#include "registers.cuh"

// Padded only if the stores transpose.
template <int SIDE, int BK, Layout OPERAND> using PaddedTile = KMajor<OPERAND == ROW ? SIDE + 4 : SIDE, BK>;

// Threads are numbered along the rows of the block's tile; adjacent threads of a row have adjacent strips.
template <class Tiles, class S> struct StripTiling {
  static constexpr int TALL = strip<S, Tiles::TM>(), WIDE = strip<S, Tiles::TN>();  // rows and columns of a strip
  static constexpr int ROWS_APART = Tiles::DOWN * TALL, COLUMNS_APART = Tiles::ACROSS * WIDE;
  int row = threadIdx.x / Tiles::ACROSS * TALL, column = threadIdx.x % Tiles::ACROSS * WIDE;
};

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int BLOCKS>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) simt_padded(const Product<T, Out> p) {
  using TileA = PaddedTile<Tiles::BM, Tiles::BK, Access::A>;
  using TileB = PaddedTile<Tiles::BN, Tiles::BK, transposed(Access::B)>;
  multiply_in_registers<EPILOGUE, Access, Tiles, TileA, TileB, StripTiling<Tiles, Sum<T, Out>>>(p);
}
