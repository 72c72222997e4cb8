// All lanes come to a barrier of the even ones.
__global__ void warp_sync_own_lane(float* x) {
#ifdef FIXED
  if (threadIdx.x % 2 == 0) __syncwarp(0x55555555);
#else
  __syncwarp(0x55555555);  // FAULT
#endif
  x[threadIdx.x] += 1;
}
