// Each block adds its part to one vector: no two threads of a block meet, but those of two blocks do.
__global__ void blocks_update(float* sums, const float* in) {
#ifdef FIXED
  atomicAdd(sums + threadIdx.x, in[blockIdx.x * 128 + threadIdx.x]);
#else
  sums[threadIdx.x] += in[blockIdx.x * 128 + threadIdx.x];  // FAULT OTHER
#endif
}
