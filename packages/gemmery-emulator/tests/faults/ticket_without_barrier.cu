// One thread takes the block's ticket, fenced as it should be, and the other warps may not have stored their part yet.
__device__ unsigned ticket;
__global__ void ticket_without_barrier(float* out, float* parts, const float* in) {
  __shared__ bool last;
  int t = threadIdx.x, i = blockIdx.x * 128 + t;
  parts[i] = in[i];  // OTHER
  __threadfence();
#ifdef FIXED
  __syncthreads();
#endif
  if (t == 0) {
    last = atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (last)
    for (int block = 0; block < gridDim.x; ++block) atomicAdd(out + t, parts[block * 128 + t]);  // FAULT
}
