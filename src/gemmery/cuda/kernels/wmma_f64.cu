// The idea: tensor cores. A warp multiplies fragments of 8 x 4 and 4 x 8 elements in one instruction, and has several of
// A and several of B, each used with all of the other's. How: wmma.cuh.
// Its parent: simt_smem, where a thread reads two elements of a tile for every multiply-add.
#include "wmma.cuh"

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int WM, int WN, int BLOCKS>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32, BLOCKS) wmma_f64(const Product<T, Out> p) {
  multiply_by_fragments<EPILOGUE, A, B, A_VEC, B_VEC, C_VEC, BM, BN, BK, WM, WN>(p);
}
