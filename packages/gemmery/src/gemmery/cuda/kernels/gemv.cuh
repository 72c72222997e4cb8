// Matrix-vector product y = W x, whichever operand of the product is the matrix.
#pragma once
#include "epilogue.cuh"
#include "load.cuh"

// W is (results, k). When C is a column (COLUMN), W is A and x is B; when it is a row, W is B transposed and x is A.
template <class T> struct Gemv {
  const T *w, *x;
  long long w_row, w_col, x_step;
  int results, k;
};

// What the host knows of a launch: whether C is a column or a row, whether there are several products, whether other
// blocks have other parts of k, and whether it may start before the previous launch ends.
template <bool IS_COLUMN, bool IS_BATCHED, bool IS_PARTIAL, bool OVERLAPS> struct GemvLaunch {
  static constexpr bool COLUMN = IS_COLUMN, BATCHED = IS_BATCHED, PARTIAL = IS_PARTIAL, OVERLAP = OVERLAPS;
};

template <bool COLUMN, class T, class Out>
__device__ __forceinline__ Gemv<T> gemv_of(const Product<T, Out>& p, int batch) {
  if constexpr (COLUMN) return {p.a_at(batch, 0, 0), p.b_at(batch, 0, 0), p.a_row, p.a_col, p.b_row, p.m, p.k};
  return {p.b_at(batch, 0, 0), p.a_at(batch, 0, 0), p.b_col, p.b_row, p.a_col, p.n, p.k};
}

template <int EPILOGUE, bool COLUMN, class T, class Out>
__device__ __forceinline__ void store_result(const Product<T, Out>& p, int batch, int r, Sum<T, Out> sum,
                                             Sum<T, Out> second = {}) {
  store<EPILOGUE>(p, batch, COLUMN ? r : 0, COLUMN ? 0 : r, sum, second);
}

// VEC elements from the k-th on: one of any stride, or several, adjacent and aligned.
template <int VEC, class T> __device__ __forceinline__ Chunk<T, VEC> chunk(const T* from, int k, long long step) {
  return *reinterpret_cast<const Chunk<T, VEC>*>(from + (VEC > 1 ? k : k * step));
}

// The same for W, which is read once: whole accesses bypass L1, which is a little faster.
template <int VEC, class T> __device__ __forceinline__ Chunk<T, VEC> chunk_of_w(const T* from, int k, long long step) {
  if constexpr (VEC > 1 && sizeof(Chunk<T, VEC>) == 16) {
    return ptx::ld_global_no_allocate(reinterpret_cast<const Chunk<T, VEC>*>(from + k));
  } else {
    return chunk<VEC>(from, k, step);
  }
}

// Stores the sum of a part of k: into C if there is one part, else in the workspace for gemv_finish.
template <int EPILOGUE, bool COLUMN, bool PARTIAL, class T, class Out>
__device__ __forceinline__ void store_part(const Product<T, Out>& p, const Gemv<T>& g, int batch, int r,
                                           Sum<T, Out> sum, Sum<T, Out> second = {}) {
  if constexpr (!PARTIAL) {
    store_result<EPILOGUE, COLUMN>(p, batch, r, sum, second);
  } else {
    static_cast<Sum<T, Out>*>(p.workspace)[((long long)batch * g.results + r) * gridDim.z + blockIdx.z] = sum;
  }
}
