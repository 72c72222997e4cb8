// Neighboring bytes are different places, the same byte is not: two threads meet at every second one.
__global__ void narrow_neighbors(unsigned char* out, const unsigned char* in) {
  __shared__ unsigned char tile[128];
  int t = threadIdx.x;
#ifdef FIXED
  tile[t] = in[t];
#else
  tile[t] = 0;
  __syncthreads();
  tile[t / 2] = in[t];  // FAULT OTHER
#endif
  __syncthreads();
  out[t] = tile[127 - t];
}
