// The barrier counts one arrival more than there are threads: its phase never ends.
__global__ void mbarrier_count(float* out) {
  __shared__ __align__(8) unsigned long long barrier;
  unsigned shared = unsigned(__cvta_generic_to_shared(&barrier)), done = 0;
#ifdef FIXED
  unsigned arrivals = blockDim.x;
#else
  unsigned arrivals = blockDim.x + 1;
#endif
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared), "r"(arrivals) : "memory");
  __syncthreads();
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared) : "memory");
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"  // FAULT
                 : "=r"(done) : "r"(shared) : "memory");
  }
  out[threadIdx.x] = 1;
}
