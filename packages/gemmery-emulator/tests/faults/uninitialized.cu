// The column that pads a tile is read, and nobody has written it.
__global__ void uninitialized(float* out, const float* in) {
  __shared__ float tile[32][33];
  int x = threadIdx.x, y = threadIdx.y;
  tile[y][x] = in[y * 32 + x];
#ifdef FIXED
  if (x == 0) tile[y][32] = 0;
#endif
  __syncthreads();
  out[y * 32 + x] = tile[y][x + 1];  // FAULT
}
