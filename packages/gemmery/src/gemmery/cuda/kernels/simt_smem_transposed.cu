// Idea: B's tile is stored transposed, so that consecutive k of a row of A and of a column of B are adjacent and one
// 16-byte load takes CHUNK of them. A warp computes 4 x 8 elements: it needs 4 rows and 8 columns.
// Parent: simt_smem. Rows of a tile are 32 banks apart, so lanes would use the same four banks; the chunks of each row
// are therefore stored in a different order (SWIZZLE), and no two threads of a warp use one bank.
// Measured on an H200, n = 1024: in f32 shared loads take 33,554,432 wavefronts, one per multiply-add of a warp, and
// 50.4 million in the parent; in f64 without SWIZZLE four times as many as with it. The time falls by
// less, because the loop has as many instructions per multiply-add as the parent's.
#include "epilogue.cuh"
#include "load.cuh"

// The position of a chunk, permuted within its row: eight chunks that share 32 banks come from different rows.
template <int CHUNKS, bool SWIZZLE> __device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int ORDERS = CHUNKS < 8 ? CHUNKS : 8;
  return row * CHUNKS + (SWIZZLE ? chunk ^ (row / (8 / ORDERS) % ORDERS) : chunk);
}

template <class T, class Out, int EPILOGUE, int TILE, bool SWIZZLE>
__global__ void __launch_bounds__(TILE * TILE) simt_smem_transposed(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  constexpr int CHUNK = 16 / sizeof(S), CHUNKS = TILE / CHUNK;
  __shared__ Chunk<S, CHUNK> a[TILE * CHUNKS], b[TILE * CHUNKS];
  Tile tile = tile_of_block<TILE, TILE>(p);
  int t = threadIdx.x, warp = t / 32;
  // Lanes n and n ^ 1 share a column, n and n ^ 2 a row: 16-byte loads where such pairs agree take half the time.
  int y = warp / (TILE / 8) * 4 + (t & 1) + (t >> 2 & 2), x = warp % (TILE / 8) * 8 + (t >> 1 & 3) + (t >> 2 & 4);
  int a_row = t / TILE, a_k = t % TILE;
  // Eight adjacent elements of a row of B, times the CHUNK rows that fill a chunk: 32 banks.
  int b_col = t / (8 * CHUNK) % (TILE / 8) * 8 + t % 8, b_k = t / (TILE * CHUNK) * CHUNK + t / 8 % CHUNK;
  S* a_to = &a[swizzled<CHUNKS, SWIZZLE>(a_row, a_k / CHUNK)].of[a_k % CHUNK];
  S* b_to = &b[swizzled<CHUNKS, SWIZZLE>(b_col, b_k / CHUNK)].of[b_k % CHUNK];
  S sum = 0;
  for (int from = 0; from < p.k; from += TILE) {
    *a_to = a_or_zero<S>(p, tile.batch, tile.row + a_row, from + a_k);
    *b_to = b_or_zero<S>(p, tile.batch, from + b_k, tile.col + b_col);
    __syncthreads();
#pragma unroll 1  // else addresses take 64 registers per thread, and one block fills a multiprocessor
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      Chunk<S, CHUNK> of_a = a[swizzled<CHUNKS, SWIZZLE>(y, chunk)], of_b = b[swizzled<CHUNKS, SWIZZLE>(x, chunk)];
#pragma unroll
      for (int k = 0; k < CHUNK; ++k) sum = multiply_add(of_a.of[k], of_b.of[k], sum);
    }
    __syncthreads();
  }
  if (tile.row + y < p.m && tile.col + x < p.n) store<EPILOGUE>(p, tile.batch, tile.row + y, tile.col + x, sum);
}
