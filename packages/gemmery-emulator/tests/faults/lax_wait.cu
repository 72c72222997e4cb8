// A thread may go on while its latest group of cp.async is under way, and reads what that one brings.
__device__ __forceinline__ void fetch(float* to, const float* from) {
  unsigned shared = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
}

__global__ void lax_wait(float* out, const float* in) {
  __shared__ float tile[2][128];
  int t = threadIdx.x;
  fetch(&tile[0][t], in + t);
  asm volatile("cp.async.commit_group;" ::: "memory");
  fetch(&tile[1][t], in + 128 + t);  // OTHER
  asm volatile("cp.async.commit_group;" ::: "memory");
#ifdef FIXED
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#else
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
  __syncthreads();
  float first = tile[0][127 - t];
  out[t] = first + tile[1][127 - t];  // FAULT
}
