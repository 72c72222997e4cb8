// A stencil in place: blocks read the edges of their neighbors, which those may have written already.
__global__ void blocks_read(float* out, float* x) {
  int i = blockIdx.x * 128 + threadIdx.x;
  float right = i + 1 < 384 ? x[i + 1] : 0;  // OTHER
#ifdef FIXED
  out[i] = x[i] + right;
#else
  float mine = x[i];
  __syncthreads();
  x[i] = mine + right;  // FAULT
#endif
}
