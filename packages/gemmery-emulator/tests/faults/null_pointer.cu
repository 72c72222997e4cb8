// A pointer that was never set.
__global__ void null_pointer(float* out, const float* bias) {
  int t = threadIdx.x;
#ifdef FIXED
  if (!bias) return;
#endif
  out[t] = bias[t];  // FAULT
}
