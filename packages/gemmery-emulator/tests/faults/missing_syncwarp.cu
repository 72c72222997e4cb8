// Lanes of one warp exchange by shared memory and trust that they run in lock step, which nothing promises.
__global__ void missing_syncwarp(float* out, const float* in) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = in[t];  // OTHER
#ifdef FIXED
  __syncwarp();
#endif
  out[t] = tile[t ^ 1];  // FAULT
}
