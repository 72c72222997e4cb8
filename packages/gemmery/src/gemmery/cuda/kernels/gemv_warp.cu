// Idea: a warp computes R results with 32 / R lanes each, which read adjacent elements of a row of W and add up their
// sums by XOR shuffles. STAGED: x is in shared memory, as in gemv_thread_smem.
// Parent: gemv_thread, whose lanes each read a different row: 32 sectors per load instead of R contiguous pieces.
// Measured on an H200, N = 1024, K = 128 in f16: several times faster than the parent, fastest with R = 1. STAGED is
// slower at every R: two barriers cost more than loading x from L1.
#include "gemv_thread_smem.cu"

// The sum over LANES adjacent lanes, returned to each of them; the same additions in the same order every time.
template <int LANES, class S> __device__ __forceinline__ S sum_of_lanes(S sum) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  return sum;
}

template <class T, class Out, int EPILOGUE, bool COLUMN, int R, bool STAGED, int TILE>
__global__ void gemv_warp(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  constexpr int LANES = 32 / R;
  __shared__ S staged[STAGED ? TILE : 1];
  for (int batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    int r = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const T* w = g.w + min(r, g.results - 1) * g.w_row;  // lanes beyond the end take part in barriers and shuffles
    S sum = 0;
    if constexpr (STAGED) {
      for (int first = 0; first < g.k; first += TILE) {
        stage(staged, g, first);
        for (int k = lane; k < TILE && k < g.k - first; k += LANES) {
          sum = multiply_add(widen<S>(w[(first + k) * g.w_col]), staged[k], sum);
        }
      }
    } else {
      for (int k = lane; k < g.k; k += LANES) {
        sum = multiply_add(widen<S>(w[k * g.w_col]), widen<S>(g.x[k * g.x_step]), sum);
      }
    }
    sum = sum_of_lanes<LANES>(sum);
    if (lane == 0 && r < g.results) store_result<EPILOGUE, COLUMN>(p, batch, r, sum);
  }
}
