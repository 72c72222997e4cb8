// The next tile is stored while other threads still read this one: in lock step the sums come out right all the same.
__global__ void missing_second_barrier(float* out, const float* in, int steps) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  float sum = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    tile[t] = in[step * 128 + t];  // FAULT
    __syncthreads();
    for (int i = 0; i < 128; i += 32) sum += tile[(t + i + 1) % 128];  // OTHER
#ifdef FIXED
    __syncthreads();
#endif
  }
  out[t] = sum;
}
