// A full mask in a branch that half of the warp takes: the other lanes never execute the shuffle.
__global__ void warp_shuffle_in_branch(float* x) {
  int lane = threadIdx.x % 32;
  float v = x[threadIdx.x];
#ifdef FIXED
  float other = __shfl_xor_sync(0xffffffff, v, 1);
  if (lane < 16) v += other;
#else
  if (lane < 16) v += __shfl_xor_sync(0xffffffff, v, 1);  // FAULT
#endif
  x[threadIdx.x] = v;
}
