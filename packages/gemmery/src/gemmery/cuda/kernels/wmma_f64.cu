// Idea: tensor cores. A warp multiplies fragments of 8 x 4 and 4 x 8 elements in one instruction, and holds several of
// A and several of B, each used with all of the other's. The next tile passes through registers, and the next
// fragments, at the end of a tile those of the next tile, are read while the current ones are multiplied.
// Parent: simt_smem, where a thread reads two elements of a tile for every multiply-add.
// Measured on an H200: half of cuBLAS's speed, because this instruction has half the rate of larger ones on sm_90.
// Without reading ahead into the next tile it is slower.
#include "wmma.cuh"

// The only shape in f64.
template <> struct WmmaFragment<double> {
  using Stored = double;
  using Registers = double[1];
  using Sums = double[2];
  static constexpr int M = 8, N = 8, K = 4;
  struct Shape { static constexpr const char text[] = "m8n8k4"; };
  struct Type { static constexpr const char text[] = "f64"; };
  struct Types { static constexpr const char text[] = "m8n8k4.f64.f64.f64.f64"; };
};

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int BLOCKS>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) wmma_f64(const Product<T, Out> p) {
  WmmaBlock<T, Access, Tiles> block(p);
  auto *now = block.begin(), *next = now + block.SIZE;  // tiles of A and B: to read, and to fill
  block.read(now, 0);
  for (int k0 = 0; k0 < p.k; k0 += Tiles::BK) {
    block.fetch();
#pragma unroll
    for (int step = 0; step < block.STEPS; ++step) {
      if (step == block.STEPS - 1) block.put(now, next);  // every warp has finished reading both
      block.read(now, (step + 1) % block.STEPS);
      block.multiply(step);
    }
  }
  __syncthreads();
  block.template store<EPILOGUE>(p);
}
