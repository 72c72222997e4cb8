// Effect: a reduction tree over adjacent partners keeps a few lanes of every warp busy down to the last levels.
// A block adds up BLOCK elements of x into one of y, repeatedly: at each level every second one of the remaining
// threads adds its neighbor's sum.
template <int BLOCK>
__global__ void reduce_adjacent(const float* x, float* y, int n) {
  __shared__ float sums[BLOCK];
  for (int piece = blockIdx.x; piece < (n + BLOCK - 1) / BLOCK; piece += gridDim.x) {
    long long i = (long long)piece * BLOCK + threadIdx.x;
    sums[threadIdx.x] = i < n ? x[i] : 0;
    __syncthreads();
    for (int offset = 1; offset < BLOCK; offset *= 2) {
      if (threadIdx.x % (2 * offset) == 0) sums[threadIdx.x] += sums[threadIdx.x + offset];
      __syncthreads();
    }
    if (threadIdx.x == 0) y[piece] = sums[0];
  }
}
