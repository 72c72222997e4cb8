// Each block writes one element more than it has, which is the next block's first.
__global__ void blocks_race(float* out, const float* in) {
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
#ifdef FIXED
  if (t == 128) return;
#else
  if (i >= 384) return;
#endif
  out[i] = in[i] + t;  // FAULT OTHER
}
