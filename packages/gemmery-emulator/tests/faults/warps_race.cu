// Each warp leaves its sum at one place of the block: the last one stays, whichever it is.
__global__ void warps_race(float* out, const float* in) {
  __shared__ float sums[4];
  int t = threadIdx.x, lane = t % 32, warp = t / 32;
  float sum = in[t];
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
#ifdef FIXED
  if (lane == 0) sums[warp] = sum;
#else
  if (t < 3) sums[1 + t] = 0;
  if (lane == 0) sums[0] = sum;  // FAULT OTHER
#endif
  __syncthreads();
  if (t == 0) out[0] = sums[0] + sums[1] + sums[2] + sums[3];
}
