// The idea: threads in one line, as many a block as one likes; thread id -> (i, j).
// Its parent: simt_naive. Each step adds to C in global memory, where that can hold the sum: a C of half precision, and
// one whose old value is still needed, get a sum in scratch memory instead.
// Measured on an H200, n = 2048, f32: more than twice the parent's time, for what each step stores. With half of 32
// threads a block it takes twice as long; from 64 on their number does not matter.
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
    ptx::compiler_fence();  // or the compiler would keep the sum in a register
  }
  store<EPILOGUE>(p, batch, i, j, *sum);
}
