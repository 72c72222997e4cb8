// Tiles of 16 lanes with masks of their own; the width is left out, so that a lane reads from the other tile.
__global__ void warp_reads_outside(float* x) {
  float v = x[threadIdx.x];
  unsigned mask = threadIdx.x % 32 < 16 ? 0x0000ffff : 0xffff0000;
#ifdef FIXED
  for (int apart = 8; apart > 0; apart /= 2) v += __shfl_down_sync(mask, v, apart, 16);
#else
  for (int apart = 8; apart > 0; apart /= 2) v += __shfl_down_sync(mask, v, apart);  // FAULT
#endif
  x[threadIdx.x] = v;
}
