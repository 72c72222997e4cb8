// Idea: one thread per element of C, in as many blocks as needed.
// Parent: simt_single_block. A thread loads one element of A and one of B for every multiply-add, so memory is the
// limit: the 32 lanes of a warp share a row of A and read adjacent elements of B. The loop has 121 instructions for 16
// multiply-adds on sm_90.
#include "simt_single_block.cu"

template <class T, class Out, int EPILOGUE>
__global__ void __launch_bounds__(1024) simt_naive(const Product<T, Out> p) {
  int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= p.n) return;
  for (int batch = blockIdx.z; batch < p.batch; batch += gridDim.z) {
    for (int i = blockIdx.y * blockDim.y + threadIdx.y; i < p.m; i += gridDim.y * blockDim.y) {
      multiply_element<EPILOGUE>(p, batch, i, j);
    }
  }
}
