// A transposition with two faults, for `gemmery emulate`: a barrier is missing between writing the tile and reading it,
// and all lanes of a warp read the same bank. A pad of one column, tile[32][33], removes the bank conflicts.
#include <cstdio>

__global__ void transpose(const float* x, float* y) {
  __shared__ float tile[32][32];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

int main() {
  float *x, *y;
  cudaMallocManaged(&x, 32 * 32 * sizeof(float));
  cudaMallocManaged(&y, 32 * 32 * sizeof(float));
  for (int i = 0; i < 32 * 32; ++i) x[i] = i;
  transpose<<<1, dim3(32, 32)>>>(x, y);
  cudaDeviceSynchronize();
  printf("%g\n", y[1]);
}
