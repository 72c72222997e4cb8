// Lanes beyond the end return, and a vote asks all 32 of them.
__global__ void warp_vote_after_return(unsigned* out, const float* in, int n) {
  int i = blockIdx.x * 128 + threadIdx.x;
#ifdef FIXED
  unsigned mask = __ballot_sync(0xffffffff, i < n);
#else
  unsigned mask = 0xffffffff;
#endif
  if (i >= n) return;
  out[i] = __all_sync(mask, in[i] > 0);  // FAULT
}
