// A counter is cleared while other threads already add to it.
__global__ void atomic_and_store(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;  // OTHER
#ifdef FIXED
  __syncthreads();
#endif
  atomicAdd(&count, 1);  // FAULT
  __syncthreads();
  out[threadIdx.x] = count;
}
