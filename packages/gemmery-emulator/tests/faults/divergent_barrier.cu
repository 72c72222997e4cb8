// Half of the block waits at one barrier, the other half at another one that has a number of its own.
__global__ void divergent_barrier(float* out, const float* in) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = in[t];
#ifdef FIXED
  __syncthreads();
#else
  if (t < 64) {
    asm volatile("bar.sync 1, 128;" ::: "memory");  // FAULT
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");  // FAULT
  }
#endif
  out[t] = tile[127 - t];
}
