// Effect: the last five levels of the tree stay in registers; a warp needs neither shared memory nor barriers.
// Parent: reduce_strided. Two barriers are left, around the warp that adds up the sums of the others.
// Measured on an H200: less than half the time.
__device__ __forceinline__ float sum_of_warp(float sum) {
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  return sum;
}

template <int BLOCK>
__global__ void reduce_shuffle(const float* x, float* y, int n) {
  constexpr int WARPS = BLOCK / 32;
  __shared__ float of_warp[WARPS];
  for (int piece = blockIdx.x; piece < (n + BLOCK - 1) / BLOCK; piece += gridDim.x) {
    long long i = (long long)piece * BLOCK + threadIdx.x;
    float sum = sum_of_warp(i < n ? x[i] : 0);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
      sum = sum_of_warp(threadIdx.x < WARPS ? of_warp[threadIdx.x] : 0);
      if (threadIdx.x == 0) y[piece] = sum;
    }
    __syncthreads();  // before the sums of the next piece are stored
  }
}
