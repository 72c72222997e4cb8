// A vote with a full mask where some lanes do not come by; the mask of those that do is taken before the branch.
__global__ void warp_vote_in_branch(unsigned* out, const float* in) {
  float v = in[threadIdx.x];
  unsigned found = 0;
#ifdef FIXED
  unsigned mask = __ballot_sync(0xffffffff, v > 40);
  if (v > 40) found = __ballot_sync(mask, int(v) % 2);
#else
  if (v > 40) found = __ballot_sync(0xffffffff, int(v) % 2);  // FAULT
#endif
  out[threadIdx.x] = found;
}
