// Lanes of one key are looked for among all lanes, where only some ask.
__global__ void warp_match_in_branch(unsigned* out, const int* in) {
  int key = in[threadIdx.x];
#ifdef FIXED
  if (key % 2) out[threadIdx.x] = __match_any_sync(__activemask(), key);
#else
  if (key % 2) out[threadIdx.x] = __match_any_sync(0xffffffff, key);  // FAULT
#endif
}
