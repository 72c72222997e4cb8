// A histogram in global memory is counted up without an atomic: updates of two threads at once are lost.
__global__ void global_histogram(int* bins, const float* in) {
  int bin = int(in[blockIdx.x * 128 + threadIdx.x]) % 7;
#ifdef FIXED
  atomicAdd(bins + bin, 1);
#else
  bins[bin] += 1;  // FAULT OTHER
#endif
}
