// A cluster: CM x CN blocks that run together and copy into each other's shared memory.
#pragma once
#include "ptx_hopper.cuh"

// A block's place in its cluster. The tiles of the cluster's blocks lie beside each other in C, so the CN blocks of a
// row of it share rows of A, and the CM blocks of a column share columns of B: each copies a part of them to all. Of a
// cluster of LAYERS, each has the same tiles, and a part of k.
template <int CM, int CN, int LAYERS = 1> struct Cluster {
  static constexpr int BLOCKS = CM * CN, LISTENERS = CM + CN - 1;  // blocks that receive what one copies, with itself
  int rank, m, n;

  __device__ __forceinline__ Cluster()
      : rank(BLOCKS > 1 ? ptx::cluster_ctarank() : 0), m(rank % CM), n(LAYERS > 1 ? rank / CM % CN : rank / CM) {}

  // The first rank of its layer.
  __device__ __forceinline__ int first() const { return LAYERS > 1 ? rank - m - CM * n : 0; }

  // All threads of all blocks; without clusters those of the block.
  static __device__ __forceinline__ void sync() {
    if constexpr (BLOCKS > 1) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    } else {
      __syncthreads();
    }
  }

  // The blocks of its row, which receive A, and of its column, which receive B; a bit for each rank.
  __device__ __forceinline__ unsigned short row_mask() const {
    unsigned mask = 0;
    for (int i = 0; i < CN; ++i) mask |= 1u << (m + CM * i);
    return mask << first();
  }
  __device__ __forceinline__ unsigned short column_mask() const {
    unsigned mask = 0;
    for (int i = 0; i < CM; ++i) mask |= 1u << (i + CM * n);
    return mask << first();
  }

  // A barrier of one of the LISTENERS blocks that copy to this one: those of its row, then the others of its column.
  __device__ __forceinline__ unsigned barrier_of(unsigned barrier, int listener) const {
    if constexpr (BLOCKS == 1) return barrier;
    int below = listener - CN;
    if (below >= m) ++below;  // itself is in the row
    int to = first() + (listener < CN ? m + CM * listener : below + CM * n);
    return ptx::mapa(barrier, listener < LISTENERS ? to : rank);
  }
};
