// A row of a softmax: only the lanes that hold elements take part in the maximum, by a function with a full mask.
__device__ float largest(float v) {
  for (int apart = 16; apart > 0; apart /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, apart));
  return v;
}
__global__ void warp_softmax(float* x, int columns) {
  int lane = threadIdx.x % 32;
  float v = lane < columns ? x[threadIdx.x] : -1e30f, most = v;
#ifdef FIXED
  most = largest(v);
#else
  if (lane < columns) most = largest(v);  // FAULT
#endif
  x[threadIdx.x] = expf(v - most);
}
