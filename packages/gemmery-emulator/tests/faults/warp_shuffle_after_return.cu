// The last lanes have nothing to do and return; the others still read from them.
__global__ void warp_shuffle_after_return(float* out, const float* in, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
#ifdef FIXED
  float v = i < n ? in[i] : 0;
#else
  if (i >= n) return;
  float v = in[i];
#endif
  for (int apart = 16; apart > 0; apart /= 2) v += __shfl_down_sync(0xffffffff, v, apart);  // FAULT
  if (threadIdx.x % 32 == 0) atomicAdd(out, v);
}
