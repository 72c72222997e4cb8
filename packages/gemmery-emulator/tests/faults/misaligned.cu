// 16 bytes at once from rows whose length is no multiple of 16 bytes.
__global__ void misaligned(float* out, const float* in, int columns) {
  int t = threadIdx.x;
#ifdef FIXED
  columns = columns / 4 * 4;
#endif
  float4 x = *reinterpret_cast<const float4*>(in + t * columns);  // FAULT
  out[t] = x.x + x.y + x.z + x.w;
}
