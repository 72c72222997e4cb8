// Idea: mma.sync takes its fragments from shared memory by ldmatrix, 16 bytes per lane, from tiles stored so that no
// bank is used twice: lane l of a warp stores its 16 bytes at column (l % 8) ^ (l / 8), where l / 8 is the row, and
// stepping through k in groups of 32 bytes is ^1 ^3 ^1 ^3.
// Parent: wmma_f16, whose fragments are loaded as the compiler chooses.
// Measured on an H200, n = 4096, f16: shared memory takes the fewest wavefronts possible. It is no faster than its
// parent, which meanwhile loads the next tile into registers: here each tile is waited for.
#include "fragments.cuh"

template <class T, class Out, int EPILOGUE, class Access, bool RAGGED, class Tiles>
__global__ void __launch_bounds__(Tiles::THREADS) mma_ldmatrix(const Product<T, Out> p) {
  using Block = MmaBlock<T, Access, Tiles, RAGGED>;
  extern __shared__ __align__(1024) char tiles[];
  Tile tile = tile_of_block<Tiles::BM, Tiles::BN>(p);
  typename Block::CopyA a_copy(panel_of_a(p, tile));
  typename Block::CopyB b_copy(panel_of_b(p, tile));
  typename Block::FragmentsA a;
  typename Block::FragmentsB b;
  typename Block::Sums sums;
  unsigned start = ptx::shared_address(tiles), a_start = start + a.start(Tiles::row()),
           b_start = start + Block::TileA::BYTES + b.start(Tiles::column());
  for (int k0 = 0; k0 < p.k; k0 += Tiles::BK) {
    a_copy.copy(tiles);
    b_copy.copy(tiles + Block::TileA::BYTES);
    a_copy.advance(Tiles::BK);
    b_copy.advance(Tiles::BK);
    __syncthreads();
#pragma unroll
    for (int group = 0; group < Block::GROUPS; ++group) {
      a.read(a_start, 0, group);
      b.read(b_start, 0, group);
      sums.multiply(a, b);
    }
    __syncthreads();
  }
  sums.template store<EPILOGUE, Access::C_VEC>(p, tile.batch, tile.row + Tiles::row(), tile.col + Tiles::column());
}
