// A ring of two stages filled by cp.async: the stage just read is filled again before all threads are done with it.
__device__ __forceinline__ void fetch(float* to, const float* from) {
  unsigned shared = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__global__ void ring_overwritten(float* out, const float* in, int steps) {
  __shared__ float ring[2][128];
  int t = threadIdx.x;
  float sum = 0;
  fetch(&ring[0][t], in + t);
  fetch(&ring[1][t], in + 128 + t);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    sum += ring[step % 2][127 - t];  // OTHER
#ifdef FIXED
    __syncthreads();
#endif
    fetch(&ring[step % 2][t], in + (step + 2) % 4 * 128 + t);  // FAULT
  }
  out[t] = sum;
}
