// Idea: a block streams many small products: the adjacent matrices of a batch are one array, which vectors of 16 bytes
// cross without regard to their borders, to shared memory and back. Sides are constants, so that a thread keeps TM x TN
// elements of C in registers, and every offset of its reads is one.
// Parent: simt_smem, which gives each product a block of its own, and waits for memory twice in each.
#include "batched.cuh"

template <class T, class Out, int EPILOGUE, Layout A_LAYOUT, Layout B_LAYOUT, class Sides, int TM, int TN, int PRODUCTS>
__global__ void __launch_bounds__((PRODUCTS * (Sides::M / TM) * (Sides::N / TN) + 31) / 32 * 32)
    simt_batched(const Product<T, Out> p) {
  constexpr int M = Sides::M, N = Sides::N, K = Sides::K, DOWN = M / TM, ACROSS = N / TN;
  constexpr int THREADS = (PRODUCTS * DOWN * ACROSS + 31) / 32 * 32;
  using S = Sum<T, Out>;
  using Block = BatchBlock<T, Out, A_LAYOUT, B_LAYOUT, Sides, PRODUCTS, THREADS>;
  using A = typename Block::A;
  using B = typename Block::B;
  using C = typename Block::C;
  // Steps of k that a thread reads at once: all of a short k, else what 16 bytes hold.
  constexpr int STEP = K <= 8 ? K : K % (16 / sizeof(T)) ? 1 : 16 / sizeof(T);
  extern __shared__ __align__(128) char shared[];
  Block block(p, shared);
  block.load(p);

  int product = threadIdx.x / (DOWN * ACROSS), row = threadIdx.x / ACROSS % DOWN * TM, column = threadIdx.x % ACROSS * TN;
  if (product < block.products) {
    const char *a_tile = block.a(product), *b_tile = block.b(product);
    S sums[TM][TN] = {};
#pragma unroll
    for (int k = 0; k < K; k += STEP) {
      S a[TM][STEP], b[STEP][TN];
      A::template read<A_LAYOUT != COL>(a, a_tile, row, k);
      B::template read<B_LAYOUT != COL>(b, b_tile, k, column);
#pragma unroll
      for (int s = 0; s < STEP; ++s) {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
          for (int j = 0; j < TN; ++j) sums[i][j] = multiply_add(a[i][s], b[s][j], sums[i][j]);
        }
      }
    }
    char* c_tile = block.c(product);
#pragma unroll
    for (int i = 0; i < TM; ++i) {
      Out out[TN];
#pragma unroll
      for (int j = 0; j < TN; ++j) out[j] = block.template finish<EPILOGUE>(p, product, row + i, column + j, sums[i][j]);
      C::write(c_tile, row + i, column, out);
    }
  }
  block.store(p);
}
