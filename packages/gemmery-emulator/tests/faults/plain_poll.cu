// A count that all threads add to atomically is read by a plain load in between.
__global__ void plain_poll(int* out, int* count) {
  atomicAdd(count, 1);  // OTHER
#ifdef FIXED
  out[blockIdx.x * 128 + threadIdx.x] = atomicAdd(count, 0) > 0;
#else
  out[blockIdx.x * 128 + threadIdx.x] = *count > 0;  // FAULT
#endif
}
