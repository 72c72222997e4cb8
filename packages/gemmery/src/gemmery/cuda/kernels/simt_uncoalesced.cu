// Idea: none; x and y of a thread are swapped, to show what thread order costs.
// Parent: simt_naive. The 32 lanes of a warp now walk down a column of C: each reads a different row of A, so one load
// touches up to 32 sectors of 32 bytes for 32 elements.
// Measured on an H200, n = 2048, f32: more than seven times the parent's time, with 33 sectors per step instead of 5.
#include "simt_naive.cu"

template <class T, class Out, int EPILOGUE>
__global__ void __launch_bounds__(1024) simt_uncoalesced(const Product<T, Out> p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.m) return;
  for (int batch = blockIdx.z; batch < p.batch; batch += gridDim.z) {
    for (int j = blockIdx.y * blockDim.y + threadIdx.y; j < p.n; j += gridDim.y * blockDim.y) {
      multiply_element<EPILOGUE>(p, batch, i, j);
    }
  }
}
