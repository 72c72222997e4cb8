// The idea: 16-byte loads, several rows of W in flight in every thread, and k shared by as many threads as it takes.
// Its parent: gemv_warp. A team of TEAM threads, part of a warp or several, walks along ROWS rows of W; a thread asks
// for STEPS chunks of VEC elements of each row before it uses the first. PARTIAL: blockIdx.z shares k as well, and
// gemv_finish adds up. OVERLAP: it begins, and sends for W, while the launch before it ends. W whose columns are
// contiguous is the work of gemv_columns.
// Measured on an H200 in f16: faster than cuBLAS with K = 128 and with K = N = 1024, 4096, 16384. The smallest take
// little more than an empty kernel, and a W beyond the caches is read at the bandwidth of memory.
#include "gemv.cuh"

// The chunks of k: some members have fewer than others, all have a multiple of STEPS, all have STEPS.
enum Cover { PARTS, WHOLE, ONCE };

// Adds the products of this member's chunks of k. With VEC = 1 any strides will do, else W and x are read in chunks.
template <int VEC, int STEPS, int COVER, int ROWS, class S, class T>
__device__ __forceinline__ void add_products(S (&sums)[ROWS], const Gemv<T>& g, const T* const (&w)[ROWS], int member,
                                             int team) {
  int chunks = g.k / VEC, first = member;
#pragma unroll 1
  while (COVER == ONCE || first < chunks) {
    Chunk<T, VEC> held[STEPS][ROWS] = {}, x[STEPS] = {};
    long long in_w = VEC > 1 ? first * VEC : first * g.w_col, in_x = VEC > 1 ? first * VEC : first * g.x_step;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (COVER == PARTS && s > 0 && first + s * team >= chunks) continue;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) held[s][r] = chunk_of_w<VEC>(w[r] + in_w, s * team * VEC, g.w_col);
      x[s] = chunk<VEC>(g.x + in_x, s * team * VEC, g.x_step);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        S factor = widen<S>(x[s].of[v]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(widen<S>(held[s][r].of[v]), factor, sums[r]);
      }
    }
    if (COVER == ONCE) break;
    first += team * STEPS;
  }
  if constexpr (COVER == PARTS && VEC > 1) {
#pragma unroll 1
    for (int k = chunks * VEC + member; k < g.k; k += team) {  // less than a chunk is left
      S factor = widen<S>(g.x[k]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(widen<S>(w[r][k]), factor, sums[r]);
    }
  }
}

// Sends for this member's first chunks of W.
template <int VEC, int STEPS, int ROWS, class T>
__device__ __forceinline__ void ask_for(const Gemv<T>& g, int first, int member, int team) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const T* row = g.w + min(first + r, g.results - 1) * g.w_row;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      int chunk = member + s * team;
      if (chunk < g.k / VEC) ptx::prefetch_global_L2(row + chunk * VEC);
    }
  }
}

// The sums over all members of a team; member r has that of row r, for r below ROWS.
template <int TEAM, int ROWS, class S> __device__ __forceinline__ S sum_of_team(S (&sums)[ROWS], int member) {
  constexpr int WARPS = TEAM / 32;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = sum_of_lanes<(TEAM < 32 ? TEAM : 32)>(sums[r]);
  S mine = sums[0];
#pragma unroll
  for (int r = 1; r < ROWS; ++r) mine = member % 32 == r ? sums[r] : mine;
  if constexpr (WARPS > 1) {
    __shared__ S of_warp[32][ROWS];
    __syncthreads();  // those of the batch before are read
    if (threadIdx.x % 32 < ROWS) of_warp[threadIdx.x / 32][threadIdx.x % 32] = mine;
    __syncthreads();
    mine = 0;
    if (member < ROWS) {
#pragma unroll
      for (int i = 0; i < WARPS; ++i) mine += of_warp[threadIdx.x / TEAM * WARPS + i][member];
    }
  }
  return mine;
}

template <class T, class Out, int EPILOGUE, bool COLUMN, bool BATCHED, bool PARTIAL, int VEC, int COVER, int TEAM,
          int ROWS, int STEPS, int THREADS, bool OVERLAP>
__global__ __launch_bounds__(THREADS) void gemv_vectorized(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  static_assert(ROWS <= TEAM, "a member stores one row");
  int member = threadIdx.x % TEAM, team = PARTIAL ? TEAM * gridDim.z : TEAM;
  int first = (blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM) * ROWS;
  int among = PARTIAL ? blockIdx.z * TEAM + member : member;
  if constexpr (OVERLAP) {  // the launch before may still run: nothing is read until it has ended, but lines may come
    ptx::griddepcontrol_launch_dependents();
    if constexpr (VEC > 1) ask_for<VEC, STEPS, ROWS>(gemv_of<COLUMN>(p, BATCHED ? blockIdx.y : 0), first, among, team);
    ptx::griddepcontrol_wait();
  }
  for (int batch = BATCHED ? blockIdx.y : 0; batch < (BATCHED ? p.batch : 1); batch += BATCHED ? gridDim.y : 1) {
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    const T* w[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) w[r] = g.w + min(first + r, g.results - 1) * g.w_row;  // all take part in shuffles
    S sums[ROWS] = {};
    if (!COLUMN || VEC == 1 || is_chunked<VEC>(g)) {  // of a row x the host knows: VEC suits it
      add_products<VEC, STEPS, COVER>(sums, g, w, among, team);
    } else {
      add_products<1, STEPS, PARTS>(sums, g, w, among, team);
    }
    S sum = sum_of_team<TEAM>(sums, member);
    if (member < ROWS && first + member < g.results) {
      store_part<EPILOGUE, COLUMN, PARTIAL>(p, g, batch, first + member, sum);
    }
  }
}
