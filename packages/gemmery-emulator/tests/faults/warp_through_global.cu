// Lanes of one warp exchange by global memory and trust that they run in lock step.
__global__ void warp_through_global(float* out, float* scratch) {
  int t = threadIdx.x;
  scratch[t] = t;  // OTHER
#ifdef FIXED
  __syncwarp();
#endif
  out[t] = scratch[t ^ 1];  // FAULT
}
