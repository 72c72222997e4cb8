// Threads of a warp leave different numbers in a flag; where all leave the same, it does not matter who comes last.
__global__ void same_value(int* out, const float* in) {
  __shared__ int found;
  found = 0;
  __syncthreads();
#ifdef FIXED
  if (in[threadIdx.x] > 3) found = 1;
#else
  if (in[threadIdx.x] > 3) found = threadIdx.x;  // FAULT OTHER
#endif
  __syncthreads();
  out[threadIdx.x] = found;
}
