// A block of 48 threads: half of its second warp does not exist, and is read.
__global__ void warp_partial(float* out, const float* in) {
  float v = in[threadIdx.x];
  for (int apart = 16; apart > 0; apart /= 2) {
    int lane = threadIdx.x % 32 + apart;
#ifdef FIXED
    int source = threadIdx.x - threadIdx.x % 32 + lane < 48 ? lane : threadIdx.x % 32;
    float other = __shfl_sync(0xffffffff, v, source);
    if (source == lane) v += other;
#else
    float other = __shfl_sync(0xffffffff, v, lane);  // FAULT
    if (lane < 32) v += other;
#endif
  }
  if (threadIdx.x % 32 == 0) atomicAdd(out, v);
}
