// The launch gives fewer bytes of shared memory than the kernel uses: its third array lies beyond them.
extern __shared__ float memory[];

__global__ void dynamic_shared(float* out, const float* in) {
  int t = threadIdx.x;
  float *a = memory, *b = memory + 128;
  a[t] = in[t];
  b[t] = in[t] * 2;
#ifndef FIXED
  memory[256 + t] = in[t] * 3;  // FAULT
#endif
  out[t] = a[t] + b[t];
}
