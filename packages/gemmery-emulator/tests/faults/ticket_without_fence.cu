// The last block sums up what all have stored; without a fence before the ticket its reads may come too early.
__device__ unsigned ticket;
__global__ void ticket_without_fence(float* out, float* parts, const float* in) {
  __shared__ bool last;
  int t = threadIdx.x;
  if (t == 0) {
    parts[blockIdx.x] = in[blockIdx.x];  // OTHER
#ifdef FIXED
    __threadfence();
#endif
    last = atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1;
#ifdef FIXED
    __threadfence();
#endif
  }
  __syncthreads();
  if (last && t < gridDim.x) atomicAdd(out, parts[t]);  // FAULT
}
