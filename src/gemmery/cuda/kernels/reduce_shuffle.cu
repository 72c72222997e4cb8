// The effect: the last five levels of the tree stay in registers; a warp needs neither shared memory nor barriers.
// Its parent: reduce_strided. One barrier is left: between the sums of the warps and the warp that adds those up.
template <int BLOCK>
__global__ void reduce_shuffle(const float* x, float* y, int n) {
  constexpr int WARPS = BLOCK / 32;
  __shared__ float of_warp[WARPS];
  long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
  float sum = i < n ? x[i] : 0;
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = threadIdx.x < WARPS ? of_warp[threadIdx.x] : 0;
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
  if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
