// The first phase has parity 0; the wait is for the one after, which nobody completes.
__global__ void mbarrier_parity(float* out) {
  __shared__ __align__(8) unsigned long long barrier;
  unsigned shared = unsigned(__cvta_generic_to_shared(&barrier)), done = 0;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared), "r"(blockDim.x) : "memory");
  __syncthreads();
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared) : "memory");
#ifdef FIXED
  unsigned parity = 0;
#else
  __syncthreads();
  unsigned parity = 1;
#endif
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"  // FAULT
                 : "=r"(done) : "r"(shared), "r"(parity) : "memory");
  }
  out[threadIdx.x] = 1;
}
