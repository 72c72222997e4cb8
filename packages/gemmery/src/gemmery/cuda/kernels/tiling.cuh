// What the host chooses for a kernel, and the kernel's instance names.
#pragma once
#include "types.cuh"

// The layouts of A and B, and the elements of A, B and C that one access moves.
template <Layout A_LAYOUT, Layout B_LAYOUT, int A_WIDTH, int B_WIDTH, int C_WIDTH> struct Access {
  static constexpr Layout A = A_LAYOUT, B = B_LAYOUT;
  static constexpr int A_VEC = A_WIDTH, B_VEC = B_WIDTH, C_VEC = C_WIDTH;
};

// A block computes M x N of C in steps of K, and each thread TM x TN of that.
template <int M, int N, int K, int THREAD_M, int THREAD_N> struct ThreadTiles {
  static constexpr int BM = M, BN = N, BK = K, TM = THREAD_M, TN = THREAD_N;
  static constexpr int DOWN = BM / TM, ACROSS = BN / TN, THREADS = DOWN * ACROSS;
};

// A block computes M x N of C in steps of K, and each warp WM x WN of that.
template <int M, int N, int K, int WARP_M, int WARP_N> struct WarpTiles {
  static constexpr int BM = M, BN = N, BK = K, WM = WARP_M, WN = WARP_N;
  static constexpr int DOWN = BM / WM, ACROSS = BN / WN, THREADS = DOWN * ACROSS * 32;

  // The first row and column of this thread's warp.
  static __device__ __forceinline__ int row() { return threadIdx.x / 32 / ACROSS * WM; }
  static __device__ __forceinline__ int column() { return threadIdx.x / 32 % ACROSS * WN; }
};
