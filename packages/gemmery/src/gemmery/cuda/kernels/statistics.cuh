// Numbers of whole rows: sums, largest elements, of parts of a row that are put together.
#pragma once
#include "operands.cuh"

enum RowOperation { ROW_SUM, ROW_SUM_OF_SQUARES, ROW_MAXIMUM, ROW_LOG_SUM_EXP };

// A statistic of some columns. That of exponentials has its sum by those of the largest element.
template <class S> struct Partial { S value, sum; };

template <int OPERATION, class S> __device__ __forceinline__ Partial<S> partial_of_none() {
  constexpr bool LARGEST = OPERATION == ROW_MAXIMUM || OPERATION == ROW_LOG_SUM_EXP;
  return {LARGEST ? S(__int_as_float(0xff800000)) : S(0), S(0)};
}

template <int OPERATION, class Math = Precise, class S>
__device__ __forceinline__ Partial<S> together(Partial<S> x, Partial<S> y) {
  if constexpr (OPERATION == ROW_SUM || OPERATION == ROW_SUM_OF_SQUARES) return {x.value + y.value, S(0)};
  const S largest = Math::maximum(x.value, y.value);
  if constexpr (OPERATION == ROW_MAXIMUM) return {largest, S(0)};
  auto part = [&](Partial<S> z) { return z.value == largest ? z.sum : z.sum * Precise::exp(z.value - largest); };
  return {largest, part(x) + part(y)};
}

template <int OPERATION, class S> __device__ __forceinline__ Partial<S> partial_of(S x) {
  return {OPERATION == ROW_SUM_OF_SQUARES ? x * x : x, S(1)};
}
