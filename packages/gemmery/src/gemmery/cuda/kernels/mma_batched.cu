// Idea: a warp multiplies a whole small product on tensor cores, from a block's part of the batch in shared memory.
// Parents: simt_batched, for how matrices come and go, and mma_ldmatrix, for fragments. Lines are padded, not swizzled:
// those of so small matrices are shorter than the 128 bytes that an XOR needs.
#include "batched.cuh"
#include "mma.cuh"

// Four 8 x 8 matrices of 16 sides by 16 of k, in the order that mma expects: the second is 8 sides further in A, and 8
// of k in B. Lines are sides where k is adjacent, else steps of k.
template <bool IS_A, bool K_ADJACENT, int PITCH>
__device__ __forceinline__ void batch_fragment(unsigned (&x)[4], const char* matrix, int side, int k) {
  constexpr bool BY_LINES = IS_A == K_ADJACENT;  // true if the second matrix is 8 lines further, else one piece
  int lane = threadIdx.x % 32, line = K_ADJACENT ? side : k, piece = (K_ADJACENT ? k : side) * 2;
  line += BY_LINES ? lane % 16 : lane % 8 + lane / 16 * 8;
  unsigned from = ptx::shared_address(matrix) + line * PITCH + piece + (BY_LINES ? lane / 16 : lane / 8 % 2) * 16;
  if constexpr (K_ADJACENT) {
    ptx::ldmatrix_x4(x, from);
  } else {
    ptx::ldmatrix_x4_trans(x, from);
  }
}

template <class T, class Out, int EPILOGUE, Layout A_LAYOUT, Layout B_LAYOUT, class Sides, int PRODUCTS>
__global__ void __launch_bounds__(32 * PRODUCTS) mma_batched(const Product<T, Out> p) {
  constexpr int M = Sides::M, N = Sides::N, K = Sides::K;
  using Block = BatchBlock<T, Out, A_LAYOUT, B_LAYOUT, Sides, PRODUCTS, 32 * PRODUCTS, 32>;
  extern __shared__ __align__(128) char shared[];
  Block block(p, shared);
  block.load(p);

  int product = threadIdx.x / 32, row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  if (product < block.products) {
    const char *a_tile = block.a(product), *b_tile = block.b(product);
    float sums[M / 16][N / 8][4] = {};
#pragma unroll
    for (int k = 0; k < K; k += 16) {
      unsigned a[M / 16][4], b[N / 16][4];
#pragma unroll
      for (int i = 0; i < M / 16; ++i) batch_fragment<true, A_LAYOUT != COL, Block::A::PITCH>(a[i], a_tile, 16 * i, k);
#pragma unroll
      for (int j = 0; j < N / 16; ++j) batch_fragment<false, B_LAYOUT == COL, Block::B::PITCH>(b[j], b_tile, 16 * j, k);
#pragma unroll
      for (int i = 0; i < M / 16; ++i) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) mma(T(), sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
    char* c_tile = block.c(product);
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        Out out[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          out[v] = block.template finish<EPILOGUE>(p, product, 8 * i + row, 8 * j + column + v, sums[i / 2][j][i % 2 * 2 + v]);
        }
        Block::C::write(c_tile, 8 * i + row, 8 * j + column, out);
      }
    }
  }
  block.store(p);
}
