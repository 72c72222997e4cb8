// Idea: one thread per result of y = W x.
// Parent: simt_naive, which leaves 31 of 32 lanes, or most blocks, idle if C has one row or one column.
// Adjacent lanes read different rows of W: if rows are contiguous, each load of a warp touches 32 sectors.
// Measured on an H200, N = 1024, K = 128 in f16: several times slower than cuBLAS.
#include "gemv.cuh"

template <class T, class Out, int EPILOGUE, bool COLUMN>
__global__ void gemv_thread(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  for (int batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= g.results) return;
    const T *w = g.w + r * g.w_row, *x = g.x;
    S sum = 0;
    for (int k = 0; k < g.k; ++k, w += g.w_col, x += g.x_step) sum = multiply_add(widen<S>(*w), widen<S>(*x), sum);
    store_result<EPILOGUE, COLUMN>(p, batch, r, sum);
  }
}
