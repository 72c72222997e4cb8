// Both sides of a branch shuffle with a full mask: they are two instructions, and each waits for all lanes.
__global__ void warp_two_shuffles(float* x) {
  float v = x[threadIdx.x];
  bool even = threadIdx.x % 2 == 0;
#ifdef FIXED
  v += __shfl_sync(0xffffffff, v, even ? 4 : 5);
#else
  if (even) {
    v += __shfl_sync(0xffffffff, v, 4);  // FAULT
    x[128 + threadIdx.x] = v;
  } else {
    v += __shfl_sync(0xffffffff, v * 2, 5);  // FAULT
  }
#endif
  x[threadIdx.x] = v;
}
