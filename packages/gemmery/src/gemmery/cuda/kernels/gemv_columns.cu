// Idea: gemv_vectorized for W with contiguous columns, as in transposed matrices. LANES adjacent lanes hold VEC results
// each and walk down k together; other lanes, warps and blocks take other parts of k.
// Parent: gemv_vectorized. Sums are combined by shuffles, then in shared memory, then (PARTIAL) by gemv_finish.
#include "gemv.cuh"

// Adds VEC results from r on, over this part of k; WHOLE: all of them exist. LAST_FIRST: the last of STEPS rows is used
// first, for which ptxas keeps all of them under way, in more registers.
template <int VEC, int STEPS, bool WHOLE, bool LAST_FIRST, class S, class T>
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
    for (int step = 0; step < STEPS; ++step) {
      int s = LAST_FIRST ? STEPS - 1 - step : step;
      S factor = widen<S>(x[s]);
#pragma unroll
      for (int v = 0; v < VEC; ++v) sums[v] = multiply_add(widen<S>(loaded[s].of[v]), factor, sums[v]);
    }
  }
}

// Asks L2 for a thread's first chunks of W, which may not be final yet.
template <int VEC, int STEPS, class T>
__device__ __forceinline__ void prefetch_columns(const Gemv<T>& g, int r, int part, int parts) {
  if (r >= g.results) return;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    int k = part + s * parts;
    if (k < g.k) ptx::prefetch_global_L2(g.w + k * g.w_col + r);
  }
}

// The sums of a block's results over its part of k, of each warp; all threads then read them.
template <int VEC, int LANES, int STEPS, bool LAST_FIRST, int WARPS, class S, class T>
__device__ __forceinline__ void sum_columns(S (&of_warp)[WARPS][LANES * VEC], const Gemv<T>& g, int block, int part,
                                            int parts) {
  int lane = threadIdx.x % LANES, r = block + lane * VEC;
  S sums[VEC] = {};
  if (r + VEC <= g.results) {
    add_columns<VEC, STEPS, true, LAST_FIRST>(sums, g, r, part, parts);
  } else {
    add_columns<VEC, 1, false, false>(sums, g, r, part, parts);
  }
  __syncthreads();  // the previous batch has been read
#pragma unroll
  for (int v = 0; v < VEC; ++v) {
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) sums[v] += __shfl_xor_sync(0xffffffff, sums[v], offset);
    if (threadIdx.x % 32 < LANES) of_warp[threadIdx.x / 32][lane * VEC + v] = sums[v];
  }
  __syncthreads();
}

template <class S, int WARPS, int EACH>
__device__ __forceinline__ S sum_of_warps(const S (&of_warp)[WARPS][EACH], int result) {
  S sum = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) sum += of_warp[i][result];
  return sum;
}

// Lets the next launch begin; asks for the first elements of W before it waits for the launch before.
template <class Launch, int VEC, int LANES, int STEPS, class T, class Out>
__device__ __forceinline__ void begin_columns(const Product<T, Out>& p, int block, int part, int parts) {
  if constexpr (Launch::OVERLAP) {
    ptx::griddepcontrol_launch_dependents();
    auto first = gemv_of<Launch::COLUMN>(p, Launch::BATCHED ? blockIdx.y : 0);
    prefetch_columns<VEC, STEPS>(first, block + threadIdx.x % LANES * VEC, part, parts);
    ptx::griddepcontrol_wait();
  }
}

template <class T, class Out, int EPILOGUE, class Launch, int VEC, int LANES, int STEPS, int WARPS>
__global__ __launch_bounds__(32 * WARPS) void gemv_columns(const Traced<Product<T, Out>> p) {
  constexpr bool COLUMN = Launch::COLUMN, BATCHED = Launch::BATCHED, PARTIAL = Launch::PARTIAL;
  using S = Sum<T, Out>;
  constexpr int EACH = LANES * VEC;  // results per block
  __shared__ S of_warp[WARPS][EACH];
  int block = blockIdx.x * EACH, part = threadIdx.x / LANES, parts = 32 / LANES * WARPS;
  if (PARTIAL) part += blockIdx.z * parts, parts *= gridDim.z;
  begin_columns<Launch, VEC, LANES, STEPS>(p, block, part, parts);
  for (int batch = BATCHED ? blockIdx.y : 0; batch < (BATCHED ? p.batch : 1); batch += BATCHED ? gridDim.y : 1) {
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    sum_columns<VEC, LANES, STEPS, false>(of_warp, g, block, part, parts);
    for (int e = threadIdx.x; e < EACH && block + e < g.results; e += 32 * WARPS) {
      store_part<EPILOGUE, COLUMN, PARTIAL>(p, g, batch, block + e, sum_of_warps(of_warp, e));
    }
  }
}
