// Idea: 16-byte loads, several rows of W in flight per thread, and k shared by as many threads as needed.
// Parent: gemv_warp. A team of TEAM threads, part of a warp or several warps, walks along ROWS rows of W; each thread
// requests STEPS chunks of VEC elements of each row before it uses the first. PARTIAL: blockIdx.z also shares k, and
// gemv_finish adds up the parts. OVERLAP: the kernel starts, and prefetches W, while the previous launch ends.
// gemv_columns handles W with contiguous columns.
// Measured on an H200 in f16: faster than cuBLAS for K = 128 and for K = N = 1024, 4096, 16384. The smallest products
// take little more than an empty kernel, and W larger than the caches is read at memory bandwidth.
#include "gemv_warp.cu"

// Chunks of k per member: different numbers, a multiple of STEPS each, exactly STEPS each.
enum Cover { PARTS, WHOLE, ONCE };

// Adds the products of this member's chunks of k. VEC = 1 takes any strides, else W and x are read in chunks.
template <int VEC, int STEPS, int COVER, int ROWS, class S, class T>
__device__ __forceinline__ void add_products(S (&sums)[ROWS], const Gemv<T>& g, const T* const (&w)[ROWS], int member,
                                             int team) {
  int chunks = g.k / VEC, first = member;
#pragma unroll 1
  while (COVER == ONCE || first < chunks) {
    Chunk<T, VEC> loaded[STEPS][ROWS] = {}, x[STEPS] = {};
    long long in_w = VEC > 1 ? first * VEC : first * g.w_col, in_x = VEC > 1 ? first * VEC : first * g.x_step;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (COVER == PARTS && s > 0 && first + s * team >= chunks) continue;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) loaded[s][r] = chunk_of_w<VEC>(w[r] + in_w, s * team * VEC, g.w_col);
      x[s] = chunk<VEC>(g.x + in_x, s * team * VEC, g.x_step);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) {
        S factor = widen<S>(x[s].of[v]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(widen<S>(loaded[s][r].of[v]), factor, sums[r]);
      }
    }
    if (COVER == ONCE) break;
    first += team * STEPS;
  }
  if constexpr (COVER == PARTS && VEC > 1) {
#pragma unroll 1
    for (int k = chunks * VEC + member; k < g.k; k += team) {  // the rest, less than a chunk
      S factor = widen<S>(g.x[k]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(widen<S>(w[r][k]), factor, sums[r]);
    }
  }
}

// Prefetches this member's first chunks of W.
template <int VEC, int STEPS, int ROWS, class T>
__device__ __forceinline__ void prefetch(const Gemv<T>& g, int first, int member, int team) {
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

// Sums over all members of a team; member r gets that of row r, for r below ROWS.
template <int TEAM, int ROWS, class S> __device__ __forceinline__ S sum_of_team(S (&sums)[ROWS], int member) {
  constexpr int WARPS = TEAM / 32;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = sum_of_lanes<(TEAM < 32 ? TEAM : 32)>(sums[r]);
  S mine = sums[0];
#pragma unroll
  for (int r = 1; r < ROWS; ++r) mine = member % 32 == r ? sums[r] : mine;
  if constexpr (WARPS > 1) {
    __shared__ S of_warp[32][ROWS];
    __syncthreads();  // the previous batch has been read
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

// True when x can be read in chunks.
template <int VEC, class T> __device__ __forceinline__ bool is_chunked(const Gemv<T>& g) {
  return g.x_step == 1 && reinterpret_cast<unsigned long long>(g.x) % sizeof(Chunk<T, VEC>) == 0;
}

template <class T, class Out, int EPILOGUE, class Launch, int VEC, int COVER, int TEAM, int ROWS, int STEPS,
          int THREADS>
__global__ __launch_bounds__(THREADS) void gemv_vectorized(const Traced<Product<T, Out>> p) {
  constexpr bool COLUMN = Launch::COLUMN, BATCHED = Launch::BATCHED, PARTIAL = Launch::PARTIAL;
  using S = Sum<T, Out>;
  constexpr int WEIGHTS = EPILOGUE & TRACED ? int(Function::SUMS) : 1, OWN = ROWS / WEIGHTS;  // rows of each weight
  static_assert(ROWS <= TEAM && ROWS % WEIGHTS == 0, "a member stores one row");
  int member = threadIdx.x % TEAM, team = PARTIAL ? TEAM * gridDim.z : TEAM;
  int first = (blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM) * OWN;
  int among = PARTIAL ? blockIdx.z * TEAM + member : member;
  if constexpr (Launch::OVERLAP) {  // the previous launch may still run: prefetch lines, but read nothing yet
    ptx::griddepcontrol_launch_dependents();
    if constexpr (VEC > 1 && WEIGHTS == 1)
      prefetch<VEC, STEPS, ROWS>(gemv_of<COLUMN>(p, BATCHED ? blockIdx.y : 0), first, among, team);
    ptx::griddepcontrol_wait();
  }
  for (int batch = BATCHED ? blockIdx.y : 0; batch < (BATCHED ? p.batch : 1); batch += BATCHED ? gridDim.y : 1) {
    Gemv<T> g = gemv_of<COLUMN>(p, batch);
    const T* w[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) w[r] = g.w + min(first + r % OWN, g.results - 1) * g.w_row;  // all lanes shuffle
    if constexpr (WEIGHTS == 2) {
#pragma unroll
      for (int r = OWN; r < ROWS; ++r) w[r] += p.second_apart / int(sizeof(T));
    }
    S sums[ROWS] = {};
    if (!COLUMN || VEC == 1 || is_chunked<VEC>(g)) {  // for a row x the host has checked VEC
      add_products<VEC, STEPS, COVER>(sums, g, w, among, team);
    } else {
      add_products<1, STEPS, PARTS>(sums, g, w, among, team);
    }
    S sum = sum_of_team<TEAM>(sums, member), second = {};
    if constexpr (WEIGHTS == 2) second = __shfl_down_sync(0xffffffff, sum, OWN);
    if (member < OWN && first + member < g.results) {
      store_part<EPILOGUE, COLUMN, PARTIAL>(p, g, batch, first + member, sum, second);
    }
  }
}
