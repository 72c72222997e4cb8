// Idea: tensor cores. A warp multiplies fragments of 8 x 4 and 4 x 8 elements in one instruction, and holds several of
// A and several of B, each used with all of the other's. The next tile passes through registers, and the next
// fragments, at the end of a tile those of the next tile, are read while the current ones are multiplied.
// Parent: simt_smem, where a thread reads two elements of a tile for every multiply-add.
// Measured on an H200: half of cuBLAS's speed, because this instruction has half the rate of larger ones on sm_90.
// Without reading ahead into the next tile it is a tenth slower.
#include "wmma.cuh"

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int WM, int WN, int BLOCKS>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32, BLOCKS) wmma_f64(const Product<T, Out> p) {
  using Block = WmmaBlock<T, A, B, A_VEC, B_VEC, BM, BN, BK, WM, WN>;
  using Stored = typename Block::Stored;
  extern __shared__ __align__(128) char memory[];
  Stored *now = reinterpret_cast<Stored*>(memory), *next = now + Block::SIZE;
  Tile tile = tile_of_block<BM, BN>(p);
  Block block(panel_of_a(p, tile), panel_of_b(p, tile));
  typename Block::Warp part;

  block.fetch();
  block.put(now);
  Block::read(part, now, 0);
  for (int k0 = 0; k0 < p.k; k0 += BK) {
    block.fetch();
#pragma unroll
    for (int step = 0; step < Block::STEPS; ++step) {
      if (step == Block::STEPS - 1) {  // every warp has finished reading this tile, and the place of the next one
        block.put(next);
        Stored* done = now;
        now = next;
        next = done;
      }
      Block::read(part, now, (step + 1) % Block::STEPS);
      Block::multiply(part, step);
    }
  }
  __syncthreads();
  part.template store<EPILOGUE, C_VEC>(p, tile.batch, tile.row + Block::row(), tile.col + Block::column(),
                                       reinterpret_cast<double*>(memory) + Block::warp() * Block::Warp::PATCH);
}
