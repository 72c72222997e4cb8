// Idea: global memory is read and written 16 bytes at a time, by threads assigned in memory order, whatever part of the
// tile they compute. Rows that are not aligned, or end within 16 bytes, are read in smaller chunks.
// Parent: simt_threadtile, which loads one element at a time.
// Measured on an H200 at n = 4096: a tie with the parent, in f32 and f64. The limit is bank conflicts, as before.
#include "simt_threadtile.cu"

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int BLOCKS>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) simt_vectorized(const Product<T, Out> p) {
  // Load (load.cuh) moves chunks of A_VEC and B_VEC elements, and store_registers (registers.cuh) of C_VEC.
  multiply_in_registers<EPILOGUE, Access, Tiles, SideMajor<Tiles::BM, Tiles::BK>, KMajor<Tiles::BN, Tiles::BK>,
                        ThreadTiling<Tiles, Sum<T, Out>>>(p);
}
