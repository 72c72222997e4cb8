// A barrier where only some lanes of a warp come by: the others go on to the next one.
__global__ void barrier_in_branch(float* out, const float* in) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = in[t];
#ifndef FIXED
  if (t % 32 < 20) {
    __syncthreads();  // FAULT
    tile[t] += 1;
  }
#endif
  __syncthreads();
  out[t] = tile[127 - t];
}
