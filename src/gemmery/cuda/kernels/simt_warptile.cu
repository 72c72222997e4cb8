// Idea: three levels, block tile -> warp tile -> thread tile. The lanes of a warp are close together in C, so a warp
// reads WM + WN elements of shared memory per step of k, and pairs of lanes that read the same share a wavefront.
// Parent: simt_padded, where a warp spans the whole width of the block's tile.
// Measured on an H200 at n = 4096: a little faster in f32; a tie in f64, where one block takes the multiprocessor's
// registers and waits for each tile. A 16-byte read alone takes 2 cycles if pairs of lanes agree, and 4 if they do
// not.
#include "registers.cuh"

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int WM, int WN, int TM, int TN, int BLOCKS>
__global__ void __launch_bounds__(BM / TM * (BN / TN), BLOCKS) simt_warptile(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  constexpr int THREADS = BM / TM * (BN / TN);
  using LoadA = Load<T, A, A_VEC, BM, BK, THREADS>;
  using LoadB = Load<T, transposed(B), B_VEC, BN, BK, THREADS>;
  using TileA = KMajor<BM, BK, A == ROW ? 4 : 0>;
  using TileB = KMajor<BN, BK, B == COL ? 4 : 0>;
  using Place = Seat<BN, WM, WN, TM, TN, strip<S, TM>(), strip<S, TN>()>;
  multiply_in_registers<EPILOGUE, LoadA, LoadB, TileA, TileB, Place, C_VEC, BM, BN, BK, TM, TN>(p);
}
