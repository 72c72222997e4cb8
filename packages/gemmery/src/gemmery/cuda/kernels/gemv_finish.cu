// Idea: blocks that shared k left `parts` sums per result in the workspace; LANES lanes per result add them up in a
// fixed order. Parents: gemv_vectorized and gemv_columns, as their second launch.
#include "gemv_warp.cu"

template <class T, class Out, int EPILOGUE, bool COLUMN, int PARTS, int LANES>
__global__ void gemv_finish(const Traced<Product<T, Out>> p) {
  using S = Sum<T, Out>;
  int results = COLUMN ? p.m : p.n, lane = threadIdx.x % LANES;
  int r = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
  for (int batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    const S* sums = static_cast<const S*>(p.workspace) + ((long long)batch * results + min(r, results - 1)) * PARTS;
    S sum = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part += LANES) sum += sums[part + lane];
    sum = sum_of_lanes<LANES>(sum);
    if (lane == 0 && r < results) store_result<EPILOGUE, COLUMN>(p, batch, r, sum);
  }
}
