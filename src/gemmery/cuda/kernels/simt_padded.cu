// The idea: both tiles have k outermost, so that a step of k is read 16 bytes at once; what lies along k in memory is
// transposed on the way in. A pad of 4 elements a step keeps those stores off each other's banks, and a thread's rows
// and columns lie in strips of 16 bytes, so that neighbouring lanes read neighbouring strips.
// Its parent: simt_vectorized, whose lanes meet on banks when they read either tile.
// Measured on an H200 at n = 4096: a third faster in f32, more than half in f64. A step of k of a warp reads 12
// wavefronts instead of 24, in f64 24 instead of 72: now multiplying takes longer than reading.
#include "registers.cuh"

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int TM, int TN, int BLOCKS>
__global__ void __launch_bounds__(BM / TM * (BN / TN), BLOCKS) simt_padded(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  constexpr int THREADS = BM / TM * (BN / TN);
  using LoadA = Load<T, A, A_VEC, BM, BK, THREADS>;
  using LoadB = Load<T, transposed(B), B_VEC, BN, BK, THREADS>;
  using TileA = KMajor<BM, BK, A == ROW ? 4 : 0>;
  using TileB = KMajor<BN, BK, B == COL ? 4 : 0>;
  using Place = InStrips<BM, BN, TM, TN, strip<S, TM>(), strip<S, TN>()>;
  multiply_in_registers<EPILOGUE, LoadA, LoadB, TileA, TileB, Place, C_VEC, BM, BN, BK, TM, TN>(p);
}
