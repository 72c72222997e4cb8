// Idea: a block streams many small products: the adjacent matrices of a batch are one array, which vectors of 16 bytes
// cross without regard to their borders, to shared memory and back. Sides are constants, so that a thread keeps TM x TN
// elements of C in registers, and every offset of its reads is one. Its rows or columns are apart where they are lines,
// so that lanes next to each other read lines next to each other.
// Parent: simt_smem, which gives each product a block of its own, and waits for memory twice in each.
// Measured on an H200: 200,000 of 2 x 2 to 8 x 8 in f16, f32 and f64 take 0.7 to 1.1 of the time of a copy of their
// bytes.
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

  constexpr bool BY_ROWS = A_LAYOUT != COL, BY_COLUMNS = B_LAYOUT == COL;
  constexpr int ROWS_APART = BY_ROWS ? DOWN : 1, COLUMNS_APART = BY_COLUMNS ? ACROSS : 1;
  int product = threadIdx.x / (DOWN * ACROSS);
  int row = threadIdx.x / ACROSS % DOWN * (BY_ROWS ? 1 : TM), column = threadIdx.x % ACROSS * (BY_COLUMNS ? 1 : TN);
  if (product < block.products) {
    const char *a_tile = block.a(product), *b_tile = block.b(product);
    S sums[TM][TN] = {};
#pragma unroll(K <= 8 ? K : 2)
    for (int k = 0; k < K; k += STEP) {
      S a[TM][STEP], b[STEP][TN];
      A::template read<BY_ROWS, ROWS_APART>(a, a_tile, row, k);
      B::template read<!BY_COLUMNS, COLUMNS_APART>(b, b_tile, k, column);
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
      int y = row + i * ROWS_APART;
      Out out[TN];
#pragma unroll
      for (int j = 0; j < TN; ++j) {
        out[j] = block.template finish<EPILOGUE>(p, product, y, column + j * COLUMNS_APART, sums[i][j]);
        if (COLUMNS_APART > 1) C::write(c_tile, y, column + j * COLUMNS_APART, {out[j]});
      }
      if (COLUMNS_APART == 1) C::write(c_tile, y, column, out);
    }
  }
  block.store(p);
}
