// Idea: the half of a square C below the diagonal, copied to above it; not a product: symmetric ones need it.
// A block has a tile of SIDE x SIDE elements on or below the diagonal. It reads rows and writes rows, so that both are
// whole sectors: shared memory turns the tile around, with a column to spare so that its columns are in other banks.
#include "product.cuh"

template <class T, class Out, int EPILOGUE, int SIDE>
__global__ void mirror(const Product<T, Out> p) {
  __shared__ Out tile[SIDE][SIDE + 1];
  int down = (int)((sqrtf(8.0f * blockIdx.x + 1.0f) - 1.0f) * 0.5f);  // the row of tiles, but for rounding
  while ((long long)down * (down + 1) / 2 > blockIdx.x) --down;
  while ((long long)(down + 1) * (down + 2) / 2 <= blockIdx.x) ++down;
  int across = blockIdx.x - down * (down + 1) / 2;
  for (int r = threadIdx.y; r < SIDE; r += blockDim.y) {
    int i = down * SIDE + r, j = across * SIDE + threadIdx.x;
    if (i < p.m && j <= i) tile[r][threadIdx.x] = *p.c_at(blockIdx.y, i, j);
  }
  __syncthreads();
  for (int r = threadIdx.y; r < SIDE; r += blockDim.y) {
    int i = across * SIDE + r, j = down * SIDE + threadIdx.x;
    if (j < p.m && i < j) *p.c_at(blockIdx.y, i, j) = tile[threadIdx.x][r];
  }
}
