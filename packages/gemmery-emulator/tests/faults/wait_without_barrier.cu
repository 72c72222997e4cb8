// A thread waits for its own copies and reads those of others, which only a barrier shows to it.
__device__ __forceinline__ void fetch(float* to, const float* from) {
  unsigned shared = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
}

__global__ void wait_without_barrier(float* out, const float* in) {
  __shared__ float tile[128];
  int t = threadIdx.x;
  fetch(tile + t, in + t);  // OTHER
  asm volatile("cp.async.wait_all;" ::: "memory");
#ifdef FIXED
  __syncthreads();
#endif
  out[t] = tile[127 - t];  // FAULT
}
