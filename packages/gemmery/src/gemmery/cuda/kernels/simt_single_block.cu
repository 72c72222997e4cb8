// Idea: one thread per element of C, all in one block.
// No parent. A block has at most 1024 threads, so C has at most 32 x 32 elements.
#include "epilogue.cuh"

// Element (i, j) of C, straight from global memory.
template <int EPILOGUE, class T, class Out>
__device__ __forceinline__ void multiply_element(const Product<T, Out>& p, int batch, int i, int j) {
  using S = Sum<T, Out>;
  const T *a = p.a_at(batch, i, 0), *b = p.b_at(batch, 0, j);
  S sum = ZeroOf<S>::value();
  for (int k = 0; k < p.k; ++k, a += p.a_col, b += p.b_row) sum = multiply_add(widen<S>(*a), widen<S>(*b), sum);
  store<EPILOGUE>(p, batch, i, j, sum);
}

template <class T, class Out, int EPILOGUE>
__global__ void __launch_bounds__(1024) simt_single_block(const Product<T, Out> p) {
  int i = threadIdx.y, j = threadIdx.x;
  for (int batch = 0; batch < p.batch; ++batch) multiply_element<EPILOGUE>(p, batch, i, j);
}
