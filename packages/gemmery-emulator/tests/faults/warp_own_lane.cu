// All 32 lanes call a shuffle whose mask names the first eight.
__global__ void warp_own_lane(float* x) {
#ifdef FIXED
  x[threadIdx.x] = __shfl_sync(0xffffffff, x[threadIdx.x], threadIdx.x % 32 / 8 * 8);
#else
  x[threadIdx.x] = __shfl_sync(0x000000ff, x[threadIdx.x], threadIdx.x % 32 / 8 * 8);  // FAULT
#endif
}
