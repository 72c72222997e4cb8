// Idea: each block reads x once, into shared memory, TILE elements at a time; all threads read it from there.
// Parent: gemv_thread, whose threads all load the same x.
// Measured on an H200, N = 1024, K = 128 in f16: a small gain, because x was in L1 before.
#include "gemv.cuh"

// Copies up to TILE elements of x, from `first` on, into shared memory, with all threads of the block.
template <int TILE, class S, class T>
__device__ __forceinline__ void stage(S (&x)[TILE], const Gemv<T>& g, int first) {
  __syncthreads();  // the previous tile has been read
  for (int k = threadIdx.x; k < TILE && k < g.k - first; k += blockDim.x) {
    x[k] = widen<S>(g.x[(first + k) * g.x_step]);
  }
  __syncthreads();
}

template <class T, class Out, int EPILOGUE, bool COLUMN, int TILE>
__global__ void gemv_thread_smem(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  __shared__ S x[TILE];
  for (int batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    const T* w = g.w + min(r, g.results - 1) * g.w_row;  // threads beyond the end help to stage x
    S sum = 0;
    for (int first = 0; first < g.k; first += TILE) {
      stage(x, g, first);
      for (int k = 0; k < TILE && k < g.k - first; ++k, w += g.w_col) sum = multiply_add(widen<S>(*w), x[k], sum);
    }
    if (r < g.results) store_result<EPILOGUE, COLUMN>(p, batch, r, sum);
  }
}
