// A block reverses its part of a vector in place by way of global memory: a store of another thread is read too early.
__global__ void global_missing_barrier(float* scratch, float* out) {
  int t = threadIdx.x, i = blockIdx.x * 128;
  scratch[i + t] = out[i + t] * 2;  // OTHER
#ifdef FIXED
  __syncthreads();
#endif
  out[i + t] = scratch[i + 127 - t];  // FAULT
}
