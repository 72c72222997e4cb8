// The bound lets one thread too many write.
__global__ void off_by_one_global(float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef FIXED
  if (i >= n) return;
#else
  if (i > n) return;
#endif
  out[i] = 1;  // FAULT
}
