// A vector is reversed in place: a thread stores before another has read what was there.
__global__ void global_in_place(float* x) {
  int t = threadIdx.x;
  float mine = x[127 - t];  // OTHER
#ifdef FIXED
  __syncthreads();
#endif
  x[t] = mine;  // FAULT
}
