// A histogram in shared memory is counted up by ++, which is a load and a store.
__global__ void shared_increment(int* bins, const float* in) {
  __shared__ int own[8];
  int t = threadIdx.x;
  if (t < 8) own[t] = 0;
  __syncthreads();
#ifdef FIXED
  atomicAdd(own + int(in[t]) % 8, 1);
#else
  own[int(in[t]) % 8]++;  // FAULT OTHER
#endif
  __syncthreads();
  if (t < 8) bins[t] = own[t];
}
