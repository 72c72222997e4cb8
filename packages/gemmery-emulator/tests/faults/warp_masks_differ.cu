// Lanes name each other with different masks.
__global__ void warp_masks_differ(float* x) {
  int lane = threadIdx.x % 32;
#ifdef FIXED
  unsigned mask = lane < 16 ? 0x0000ffff : 0xffff0000;
#else
  unsigned mask = lane < 16 ? 0x0000ffff : 0xffffff00;
#endif
  x[threadIdx.x] += __shfl_xor_sync(mask, x[threadIdx.x], 1);  // FAULT
}
