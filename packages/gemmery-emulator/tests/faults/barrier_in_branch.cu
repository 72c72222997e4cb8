// A barrier where only some lanes of a warp come by: the others wait at the next one, and the two are taken for one.
__global__ void barrier_in_branch(float* out, const float* in) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  tile[t] = in[t];
#ifndef FIXED
  if (t % 32 < 20) __syncthreads();
#endif
  __syncthreads();  // FAULT
  out[t] = tile[127 - t];
}
