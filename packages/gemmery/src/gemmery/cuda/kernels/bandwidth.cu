// Memory bandwidth: 16 bytes per load, DEPTH loads in flight per thread; the data is summed, or copied with COPY.
#include "types.cuh"

struct alignas(16) Quad { unsigned x, y, z, w; };

template <bool COPY, int DEPTH> __global__ void bandwidth(Quad* to, const Quad* from, long long count) {
  long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x, threads = (long long)gridDim.x * blockDim.x;
  Quad sum = {0, 0, 0, 0};
  for (long long i = thread; i < count; i += threads * DEPTH) {
    Quad part[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) part[d] = i + d * threads < count ? from[i + d * threads] : sum;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (COPY && i + d * threads < count) to[i + d * threads] = part[d];
      if (!COPY) sum = {sum.x + part[d].x, sum.y ^ part[d].y, sum.z + part[d].z, sum.w ^ part[d].w};
    }
  }
  if (!COPY) to[thread] = sum;
}
