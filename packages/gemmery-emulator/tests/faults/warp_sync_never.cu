// A barrier of half a warp that only a quarter of it comes to, while the rest waits at the barrier of the block.
__global__ void warp_sync_never(float* out, const float* in) {
  int lane = threadIdx.x % 32;
#ifdef FIXED
  if (lane < 16) __syncwarp(0x0000ffff);
#else
  if (lane < 8) __syncwarp(0x0000ffff);  // FAULT
#endif
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}
