// Elements of A and B, with zeros beyond the edges.
#pragma once
#include "product.cuh"

template <class To, class T, class Out>
__device__ __forceinline__ To a_or_zero(const Product<T, Out>& p, int batch, int i, int k) {
  return i < p.m && k < p.k ? widen<To>(*p.a_at(batch, i, k)) : To(0);
}

template <class To, class T, class Out>
__device__ __forceinline__ To b_or_zero(const Product<T, Out>& p, int batch, int k, int j) {
  return k < p.k && j < p.n ? widen<To>(*p.b_at(batch, k, j)) : To(0);
}
