// Idea: the hardware moves tiles and multiplies them from shared memory. One thread asks for a whole box of A or B by
// one instruction, which swizzles it on the way and counts its bytes at an mbarrier; wgmma reads both operands where
// they lie, 64 x BN x 16 per instruction of 128 threads. No thread computes an address of an element or holds one.
// Parent: mma_pipelined, whose threads copy pieces by cp.async, and read fragments into registers for mma.sync.
// Measured on an H200, bf16, n = 4096: 458 TFLOP/s, 1.09 times its parent.
#include "wgmma.cuh"

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Tiles::WARPGROUPS * 128, 1)
    wgmma_tma(const __grid_constant__ TmaProduct<T, Out> p) {
  constexpr int STAGES = Tiles::STAGES;
  extern __shared__ __align__(1024) char shared[];
  const unsigned ring = ptx::shared_address(shared), full = ring + Tiles::RING;
  const int warpgroup = threadIdx.x / 128, steps = (p.product.k + Tiles::BK - 1) / Tiles::BK;
  const Tile tile = tile_of_block<Tiles::BM, Tiles::BN>(p.product);

  auto bring_stage = [&](int step) {
    unsigned to = ring + step % STAGES * Tiles::STAGE, barrier = full + step % STAGES * 8;
    ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes<Tiles>(p));
    bring_a<Tiles>(p, to, tile, step, barrier);
    bring_b<Tiles>(p, to, tile, step, barrier);
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) ptx::mbarrier_init(full + 8 * stage, 1);
    ptx::fence_mbarrier_init();
    for (int step = 0; step < min(STAGES, steps); ++step) bring_stage(step);
  }
  clear_absent<Tiles>(p, ring, warpgroup);
  __syncthreads();

  Warpgroup<Tiles> products(ring, warpgroup);
  products.clear();
  Ring<STAGES> now;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::mbarrier_try_wait_parity(full + 8 * now.stage, now.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < Tiles::PRODUCTS; ++part) products.multiply(now.stage, part, true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    __syncthreads();  // both warpgroups have read the stage
    if (threadIdx.x == 0 && step + STAGES < steps) bring_stage(step + STAGES);
    now.next();
  }
  products.template store<EPILOGUE>(p.product, tile.batch, tile.row + Tiles::row_of(warpgroup),
                                    tile.col + Tiles::column_of(warpgroup));
}
