// Idea: a first kernel copies A and B into square blocks that are contiguous in memory and padded with zeros; the
// product reads blocks, so every address is at a constant offset from the last.
// Parent: simt_naive. COLUMNS: the blocks of B and their elements are stored column by column.
// Measured on an H200, n = 2048, f64, including packing: half the parent's time, with less than half the instructions.
// With COLUMNS it takes eight times as long: the lanes of a warp read 32 sectors per load.
#include "epilogue.cuh"
#include "tile.cuh"

// The blocks in the workspace: those of A, row by row, then those of B.
template <int BLOCK, class T, class Out> struct Blocks {
  long long rows, columns, depth;  // of C and of the sums, in blocks
  T *a, *b;
  __device__ __forceinline__ Blocks(const Product<T, Out>& p)
      : rows((p.m + BLOCK - 1) / BLOCK), columns((p.n + BLOCK - 1) / BLOCK), depth((p.k + BLOCK - 1) / BLOCK),
        a(static_cast<T*>(p.workspace)), b(a + p.batch * rows * depth * BLOCK * BLOCK) {}
};

// Each thread copies one element of a block.
template <class T, class Out, int EPILOGUE, int BLOCK, bool COLUMNS>
__global__ void simt_packed_blocks(const Product<T, Out> p) {
  Blocks<BLOCK, T, Out> to(p);
  long long of_a = p.batch * to.rows * to.depth, block = blockIdx.x;
  int y = threadIdx.y, x = threadIdx.x, within = y * BLOCK + x;
  if (block < of_a) {
    int k = block % to.depth * BLOCK + x, i = block / to.depth % to.rows * BLOCK + y;
    int batch = block / (to.rows * to.depth);
    to.a[block * BLOCK * BLOCK + within] = i < p.m && k < p.k ? *p.a_at(batch, i, k) : T{0};
    return;
  }
  block -= of_a;
  int batch = block / (to.columns * to.depth);
  int k = COLUMNS ? block % to.depth * BLOCK + x : block / to.columns % to.depth * BLOCK + y;
  int j = COLUMNS ? block / to.depth % to.columns * BLOCK + y : block % to.columns * BLOCK + x;
  to.b[block * BLOCK * BLOCK + within] = k < p.k && j < p.n ? *p.b_at(batch, k, j) : T{0};
}

template <class T, class Out, int EPILOGUE, int BLOCK, bool COLUMNS>
__global__ void __launch_bounds__(BLOCK * BLOCK) simt_packed(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  constexpr int SIZE = BLOCK * BLOCK;
  Blocks<BLOCK, T, Out> of(p);
  Tile tile = tile_of_block<BLOCK, BLOCK>(p);
  int y = threadIdx.y, x = threadIdx.x, i = tile.row + y, j = tile.col + x;
  const T* a = of.a + (tile.batch * of.rows + tile.row / BLOCK) * of.depth * SIZE + y * BLOCK;
  const T* b = of.b + tile.batch * of.columns * of.depth * SIZE;
  b += COLUMNS ? tile.col / BLOCK * of.depth * SIZE + x * BLOCK : tile.col / BLOCK * SIZE + x;
  long long step = COLUMNS ? SIZE : of.columns * SIZE;
  S sum = 0;
  for (int block = 0; block < of.depth; ++block, a += SIZE, b += step) {
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) sum = multiply_add(widen<S>(a[k]), widen<S>(b[COLUMNS ? k : k * BLOCK]), sum);
  }
  if (i < p.m && j < p.n) store<EPILOGUE>(p, tile.batch, i, j, sum);
}
