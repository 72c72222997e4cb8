// 16 rows of 8 chunks are stored with chunk c of row r at c ^ r % 8, and read without the remainder: out of the tile.
__global__ void wrong_swizzle(float4* out, const float4* in) {
  __shared__ float4 tile[16 * 8];
  int t = threadIdx.x, r = t / 8, c = t % 8;
  tile[r * 8 + (c ^ r % 8)] = in[t];
  __syncthreads();
#ifdef FIXED
  out[t] = tile[r * 8 + (c ^ r % 8)];
#else
  out[t] = tile[r * 8 + (c ^ r)];  // FAULT
#endif
}
