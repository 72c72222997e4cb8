// The k of a tile of C shared by SPLITS blocks, each of which has the sums of a part of it in registers. They are added
// in the order of k: by a cluster in shared memory, or by a launch after, from the workspace.
#pragma once
#include "packed.cuh"
#include "ptx_hopper.cuh"
#include "registers.cuh"

// A block's part of k, in whole steps of BK; beyond the end of k it is empty.
template <int SPLITS, int BK> struct PartOfK {
  int index, first, depth;
  __device__ __forceinline__ explicit PartOfK(int k) : index(blockIdx.x % SPLITS), first(0), depth(k) {
    if constexpr (SPLITS == 1) return;
    const int length = ((k + BK - 1) / BK + SPLITS - 1) / SPLITS * BK;
    first = index * length;
    depth = min(length, k - first);
  }
  template <class T> __device__ __forceinline__ Panel<T> of(const Panel<T>& panel) const {
    if constexpr (SPLITS == 1) return panel; else return along_k(panel, first, depth);
  }
};

// Stores a tile from its sums, those of a part of k where SPLITS blocks share it: each thread from (i, j) on as
// store_registers. A cluster's threads send four sums at a time to the block that finishes these, at `memory`.
template <int EPILOGUE, int ROWS_APART, int COLUMNS_APART, int VEC, bool SINGLE, int SPLITS, bool CLUSTER, int THREADS,
          int TM, int TN, class S, class T, class Out>
__device__ __forceinline__ void store_shared(const Product<T, Out>& p, int part, Tile tile, int i, int j,
                                             const S (&sums)[TM][TN], unsigned memory) {
  if constexpr (SPLITS == 1) {
    store_registers<EPILOGUE, ROWS_APART, COLUMNS_APART, VEC, SINGLE>(p, tile.batch, i, j, sums);
  } else if constexpr (!CLUSTER) {
    const auto parts = partial_sums<ROW, ROW, 0>(p);
    store_registers<PLAIN, ROWS_APART, COLUMNS_APART, VEC, SINGLE>(parts, tile.batch * SPLITS + part, i, j, sums);
  } else {
    constexpr int ACROSS = TN / 4, FOURS = TM * ACROSS, TALL = strip<S, TM>(), ALL = THREADS * 16;
    static_assert(TN % 4 == 0 && sizeof(S) == 4, "four sums are 16 bytes");
    memory += threadIdx.x * 16;
    __syncwarp();
    ptx::barrier_cluster_wait();  // all blocks of the cluster have begun
#pragma unroll
    for (int four = 0; four < FOURS; ++four) {
      const S* x = &sums[four / ACROSS][four % ACROSS * 4];
      const unsigned there = ptx::mapa(memory + (four / SPLITS * SPLITS + part) * ALL, four % SPLITS);
      ptx::st_shared_cluster_v4(there, x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
#pragma unroll(EPILOGUE ? 1 : 4)
    for (int four = part; four < FOURS; four += SPLITS) {
      S sum[1][4], more[4];
      ptx::ld_shared_v4(sum[0], memory);
#pragma unroll
      for (int of = 1; of < SPLITS; ++of) {
        ptx::ld_shared_v4(more, memory + of * ALL);
#pragma unroll
        for (int x = 0; x < 4; ++x) sum[0][x] += more[x];
      }
      memory += SPLITS * ALL;
      const int y = four / ACROSS, x = four % ACROSS;
      const int row = SINGLE ? y * ROWS_APART : y / TALL * ROWS_APART + y % TALL;
      const int column = SINGLE ? x * 4 * COLUMNS_APART : x * COLUMNS_APART;
      store_registers<EPILOGUE, ROWS_APART, COLUMNS_APART, VEC, SINGLE>(p, tile.batch, i + row, j + column, sum);
    }
  }
}
