// A tile is read before all threads have stored their part of it.
__global__ void missing_barrier(float* out, const float* in) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = in[blockIdx.x * 128 + t];  // OTHER
#ifdef FIXED
  __syncthreads();
#endif
  out[blockIdx.x * 128 + t] = tile[127 - t];  // FAULT
}
