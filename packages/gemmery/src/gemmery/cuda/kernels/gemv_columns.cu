// Idea: gemv_vectorized for W with contiguous columns, as in transposed matrices. LANES adjacent lanes hold VEC results
// each and walk down k together; other lanes, warps and blocks take other parts of k.
// Parent: gemv_vectorized. Sums are combined by shuffles, then in shared memory, then (PARTIAL) by gemv_finish.
#include "gemv.cuh"

// Adds VEC results from r on, over this part of k; WHOLE: all of them exist.
template <int VEC, int STEPS, bool WHOLE, class S, class T>
__device__ __forceinline__ void add_columns(S (&sums)[VEC], const Gemv<T>& g, int r, int part, int parts) {
#pragma unroll 1
  for (int first = part; first < g.k; first += parts * STEPS) {
    Chunk<T, VEC> loaded[STEPS] = {};
    T x[STEPS] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      int k = first + s * parts;
      if (s > 0 && k >= g.k) continue;
      const T* w = g.w + k * g.w_col + r;
      if constexpr (WHOLE) {
        loaded[s] = chunk_of_w<VEC>(w, 0, 0);
      } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          if (r + v < g.results) loaded[s].of[v] = w[v];
        }
      }
      x[s] = g.x[k * g.x_step];
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      S factor = widen<S>(x[s]);
#pragma unroll
      for (int v = 0; v < VEC; ++v) sums[v] = multiply_add(widen<S>(loaded[s].of[v]), factor, sums[v]);
    }
  }
}

template <class T, class Out, int EPILOGUE, class Launch, int VEC, int LANES, int STEPS, int WARPS>
__global__ __launch_bounds__(32 * WARPS) void gemv_columns(const Product<T, Out> p) {
  constexpr bool COLUMN = Launch::COLUMN, BATCHED = Launch::BATCHED, PARTIAL = Launch::PARTIAL;
  using S = Sum<T, Out>;
  constexpr int EACH = LANES * VEC;  // results per block
  __shared__ S of_warp[WARPS][EACH];
  if constexpr (Launch::OVERLAP) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  int lane = threadIdx.x % LANES, warp = threadIdx.x / 32, block = blockIdx.x * EACH;
  int part = threadIdx.x / LANES, parts = 32 / LANES * WARPS;
  if (PARTIAL) part += blockIdx.z * parts, parts *= gridDim.z;
  for (int batch = BATCHED ? blockIdx.y : 0; batch < (BATCHED ? p.batch : 1); batch += BATCHED ? gridDim.y : 1) {
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    S sums[VEC] = {};
    int r = block + lane * VEC;
    if (r + VEC <= g.results) {
      add_columns<VEC, STEPS, true>(sums, g, r, part, parts);
    } else {
      add_columns<VEC, 1, false>(sums, g, r, part, parts);
    }
    __syncthreads();  // the previous batch has been read
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
#pragma unroll
      for (int offset = LANES; offset < 32; offset *= 2) sums[v] += __shfl_xor_sync(0xffffffff, sums[v], offset);
      if (threadIdx.x % 32 < LANES) of_warp[warp][lane * VEC + v] = sums[v];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < EACH && block + e < g.results; e += 32 * WARPS) {
      S sum = 0;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += of_warp[i][e];
      store_part<EPILOGUE, COLUMN, PARTIAL>(p, g, batch, block + e, sum);
    }
  }
}
