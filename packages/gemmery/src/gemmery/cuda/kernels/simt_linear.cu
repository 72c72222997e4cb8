// Idea: one-dimensional blocks of any number of threads; thread id -> (i, j).
// Parent: simt_naive. Each step adds to C in global memory if C can hold the sum; a half-precision C, or one whose old
// value is still needed, is summed in scratch memory instead.
// Measured on an H200, n = 2048, f32: more than twice the parent's time, because each step stores. With 16 threads per
// block instead of 32 it takes twice as long; from 64 on their number does not matter.
#include "epilogue.cuh"

template <class T, class Out, int EPILOGUE>
__global__ void __launch_bounds__(1024) simt_linear(const Product<T, Out> p) {
  using S = Sum<T, Out>;
  long long id = blockIdx.x * (long long)blockDim.x + threadIdx.x, row = id / p.n;
  int batch = row / p.m, i = row % p.m, j = id % p.n;
  if (batch >= p.batch) return;
  S* sum = static_cast<S*>(p.workspace) + id;
  if constexpr (sizeof(Out) == sizeof(S) && !(EPILOGUE & SCALED)) sum = reinterpret_cast<S*>(p.c_at(batch, i, j));
  const T *a = p.a_at(batch, i, 0), *b = p.b_at(batch, 0, j);
  *sum = 0;
  for (int k = 0; k < p.k; ++k, a += p.a_col, b += p.b_row) {
    *sum = multiply_add(widen<S>(*a), widen<S>(*b), *sum);
    ptx::compiler_fence();  // otherwise the compiler keeps the sum in a register
  }
  store<EPILOGUE>(p, batch, i, j, *sum);
}
