// Whole numbers as signed bytes, x = sum of digit i times 256^i, each from -128 to 127: modulo 2^(8 DIGITS), the bytes
// of C's type, a product needs the products of digits i + j < DIGITS alone. Where the digits of an operand lie.
#pragma once
#include "tma.cuh"

// An operand, A by rows or B by columns; its digits lie in the workspace, [digit][matrix][side][k] in rows of `pitch`.
template <class T> struct Digits {
  const T* from;
  long long batch_step, side_step, k_step;
  int sides, depth, matrices;
  signed char* to;

  __device__ __forceinline__ long long pitch() const { return (depth + 127LL) / 128 * 128; }
  __device__ __forceinline__ long long count() const { return 1LL * matrices * sides; }
  __device__ __forceinline__ bool by_k() const { return llabs(k_step) < llabs(side_step); }
  __device__ __forceinline__ const T* row(long long side) const {
    return from + side / sides * batch_step + side % sides * side_step;
  }
};

// Those of A, and behind them those of B from the next multiple of 256 bytes on.
template <int OF_A, class T, class Out>
__device__ __forceinline__ Digits<T> digits_of(const Product<T, Out>& p, bool of_b) {
  Digits<T> a = {p.a, p.a_batch, p.a_row, p.a_col, p.m, p.k, p.a_batch ? p.batch : 1};
  a.to = static_cast<signed char*>(p.workspace);
  if (!of_b) return a;
  Digits<T> b = {p.b, p.b_batch, p.b_col, p.b_row, p.n, p.k, p.b_batch ? p.batch : 1};
  b.to = a.to + (OF_A * a.count() * a.pitch() + 255) / 256 * 256;
  return b;
}
