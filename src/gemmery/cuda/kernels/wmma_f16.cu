// The idea: the same in half precision and in tf32: a fragment is 16 x 16 x 16, in tf32 16 x 16 x 8, and an instruction does
// 8 to 16 times the work. Products are exact, sums are f32. In tf32 elements are rounded on their way to shared memory.
// Its parent: wmma_f64, of which nothing but the fragments is another: how they lie in registers is the compiler's
// business, which makes these the easy way to tensor cores.
#include "wmma.cuh"

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int WM, int WN, int BLOCKS>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32, BLOCKS) wmma_f16(const Product<T, Out> p) {
  multiply_by_fragments<EPILOGUE, A, B, A_VEC, B_VEC, C_VEC, BM, BN, BK, WM, WN>(p);
}
