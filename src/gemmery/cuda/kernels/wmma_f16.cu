// Idea: wmma_f64 in half precision and in tf32: a fragment is 16 x 16 x 16, in tf32 16 x 16 x 8, with 8 to 16 times
// the work per instruction. Products are exact, sums are f32. tf32 elements are rounded before they are stored.
// Parent: wmma_f64. Multiplying a tile takes less time than loading the next one, so two blocks in turn gain more than
// reading fragments of the next tile ahead.
// Measured on an H200 at n = 4096: a third of cuBLAS's speed in f16, less when reading ahead; a quarter in tf32.
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
