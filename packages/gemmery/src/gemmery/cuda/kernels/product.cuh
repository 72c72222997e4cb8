// The only argument of every kernel: C = activation(alpha A B + beta C + bias), `batch` times.
#pragma once
#include "types.cuh"

// Strides count elements; they may be zero or negative. Sides are below 2^31, offsets are not.
// cuda/launch.py packs the same fields in the same order.
template <class T, class Out> struct Product {
  using A = typename OperandsOf<T>::A;
  using B = typename OperandsOf<T>::B;
  const A* a;        // (batch, m, k)
  const B* b;        // (batch, k, n)
  Out* c;            // (batch, m, n)
  const typename SumFor<Out>::type* bias;
  void* workspace;   // scratch memory of the size requested by the rung
  long long a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col;
  long long bias_row, bias_col;  // one of them is 0
  int m, n, k, batch;
  typename SumFor<Out>::type alpha, beta;

  __device__ __forceinline__ const A* a_at(int batch_index, int i, int kk) const {
    return a + batch_index * a_batch + i * a_row + kk * a_col;
  }
  __device__ __forceinline__ const B* b_at(int batch_index, int kk, int j) const {
    return b + batch_index * b_batch + kk * b_row + j * b_col;
  }
  __device__ __forceinline__ Out* c_at(int batch_index, int i, int j) const {
    return c + batch_index * c_batch + i * c_row + j * c_col;
  }
};
