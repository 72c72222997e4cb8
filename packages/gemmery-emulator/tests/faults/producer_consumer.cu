// One half of the block stores, the other reads: the barrier between the two counts only those that store.
__global__ void producer_consumer(float* out, const float* in, int steps) {
  __shared__ float tile[64];
  int t = threadIdx.x;
  float sum = 0;
  if (t < 64) tile[t] = 0;
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (t < 64) {
      asm volatile("bar.sync 2, 128;" ::: "memory");  // the tile is free
      tile[t] = in[step * 64 + t];  // FAULT
#ifdef FIXED
      asm volatile("bar.arrive 1, 128;" ::: "memory");
#else
      asm volatile("bar.sync 1, 64;" ::: "memory");
#endif
    } else {
      asm volatile("bar.arrive 2, 128;" ::: "memory");
#ifdef FIXED
      asm volatile("bar.sync 1, 128;" ::: "memory");  // the tile is full
#endif
      sum += tile[127 - t];  // OTHER
    }
  }
  out[t] = sum;
}
