// A thread's own array is indexed by one too many.
__global__ void off_by_one_local(float* out, const int* index) {
  float own[8];
#pragma unroll 1
  for (int i = 0; i < 8; ++i) own[index[i]] = float(i);
#ifdef FIXED
  out[threadIdx.x] = own[index[threadIdx.x % 8]];
#else
  out[threadIdx.x] = own[index[threadIdx.x % 8] + 1];  // FAULT
#endif
}
