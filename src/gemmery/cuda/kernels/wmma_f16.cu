// The idea: the same in half precision and in tf32: a fragment is 16 x 16 x 16, in tf32 16 x 16 x 8, for 8 to 16 times
// the work an instruction. Products are exact, sums are f32. Elements of tf32 are rounded before they are stored.
// Its parent: wmma_f64. A tile is multiplied in less time than the next one takes to arrive, so that two blocks in turn
// gain more than fragments of the next tile in registers.
// Measured on an H200 at n = 4096: a third of cuBLAS's speed in f16, less with such fragments; a quarter in tf32.
#include "wmma.cuh"

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int WM, int WN, int BLOCKS>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32, BLOCKS) wmma_f16(const Product<T, Out> p) {
  using Block = WmmaBlock<T, A, B, A_VEC, B_VEC, BM, BN, BK, WM, WN>;
  using Stored = typename Block::Stored;
  extern __shared__ __align__(128) char memory[];
  Stored *now = reinterpret_cast<Stored*>(memory), *next = now + Block::SIZE;
  Tile tile = tile_of_block<BM, BN>(p);
  Block block(panel_of_a(p, tile), panel_of_b(p, tile));
  typename Block::Warp part;

  block.fetch();
  block.put(now);
  for (int k0 = 0; k0 < p.k; k0 += BK) {
    block.fetch();
    Block::read(part, now, 0);
#pragma unroll
    for (int step = 0; step < Block::STEPS; ++step) {
      if (step + 1 < Block::STEPS) Block::read(part, now, step + 1);
      Block::multiply(part, step);
    }
    block.put(next);
    Stored* done = now;
    now = next;
    next = done;
  }
  part.template store<EPILOGUE, C_VEC>(p, tile.batch, tile.row + Block::row(), tile.col + Block::column(),
                                       reinterpret_cast<float*>(memory) + Block::warp() * Block::Warp::PATCH);
}
