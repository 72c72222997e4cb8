// The last thread reads its neighbor's element, which is beyond the tile.
__global__ void off_by_one_shared(float* out, const float* in) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = in[t];
  __syncthreads();
#ifdef FIXED
  out[t] = tile[t + 1 < 128 ? t + 1 : t] - tile[t];
#else
  out[t] = tile[t + 1] - tile[t];  // FAULT
#endif
}
