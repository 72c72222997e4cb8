// Lanes leave a loop at different turns, and a shuffle in it asks all of them.
__global__ void warp_loop(float* x, const int* turns) {
  float v = x[threadIdx.x];
  int mine = turns[threadIdx.x], most = mine;
#ifdef FIXED
  for (int apart = 16; apart > 0; apart /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, apart));
#endif
#pragma unroll 1
  for (int turn = 0; turn < most; ++turn) {
    float other = __shfl_xor_sync(0xffffffff, v, 1);  // FAULT
    if (turn < mine) v += other;
  }
  x[threadIdx.x] = v;
}
