// A lock of a compare-and-swap guards a sum; nothing makes what was written under it visible to the next who holds it.
__device__ int lock;
__global__ void lock_without_fence(float* sum, const float* in) {
  if (threadIdx.x % 32) return;
  for (bool done = false; !done;) {
    if (atomicCAS(&lock, 0, 1) == 0) {
#ifdef FIXED
      __threadfence();
#endif
      sum[0] = fmaxf(sum[0], in[threadIdx.x]) + 1;  // FAULT OTHER
#ifdef FIXED
      __threadfence();
#endif
      atomicExch(&lock, 0);
      done = true;
    }
  }
}
