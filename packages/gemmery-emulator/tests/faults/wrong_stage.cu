// Two stages take turns, one barrier a step: the parity is wrong, and the stage is filled that is being read.
__global__ void wrong_stage(float* out, const float* in, int steps) {
  __shared__ float tile[2][128];
  int t = threadIdx.x;
  float sum = 0;
  tile[0][t] = in[t];
  tile[1][t] = 0;
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    sum += tile[step % 2][(t + 32) % 128];  // OTHER
#ifdef FIXED
    tile[(step + 1) % 2][t] = in[(step + 1) % 4 * 128 + t];
#else
    tile[step % 2][t] = in[(step + 1) % 4 * 128 + t];  // FAULT
#endif
    __syncthreads();
  }
  out[t] = sum;
}
