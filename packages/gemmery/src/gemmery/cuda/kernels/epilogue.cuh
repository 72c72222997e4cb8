// From a sum to an element of C. EPILOGUE selects the steps at compile time; 0 is C = A B.
#pragma once
#include "product.cuh"
#include "traced.cuh"

enum Epilogue { PLAIN = 0, SCALED = 1, BIAS = 2 };  // beside the functions of cuda/constants.py

// The argument of a kernel with what its function reads behind it, and that part of it.
template <class P> struct Traced : P, Operands {};
template <class P> __device__ __forceinline__ const Operands& operands_of(const P& p) {
  return static_cast<const Traced<P>&>(p);
}

// The operation of traced functions that has this code.
template <int EPILOGUE, class Math = Precise, class S> __device__ __forceinline__ S activate(S x) {
  if constexpr ((EPILOGUE & ACTIVATION) == RELU) return Math::relu(x);
  if constexpr ((EPILOGUE & ACTIVATION) == GELU) return Math::gelu(x);
  if constexpr ((EPILOGUE & ACTIVATION) == SILU) return Math::silu(x);
  return x;
}

// Element (i, j) of C from its sum, and that with a second weight if there is one; with beta = 0 the old C is not read.
template <int EPILOGUE, class T, class Out>
__device__ __forceinline__ Out finished(const Product<T, Out>& p, const Out* c, int i, int j, Sum<T, Out> total,
                                        Sum<T, Out> second = {}) {
  typename SumFor<Out>::type sum = total;
  if constexpr (EPILOGUE & SCALED) {
    sum *= p.alpha;
    if (p.beta != 0) sum = multiply_add(p.beta, widen<decltype(sum)>(*c), sum);
  }
  if constexpr (EPILOGUE & BIAS) sum += p.bias[i * p.bias_row + j * p.bias_col];
  if constexpr (EPILOGUE & TRACED) {
    Sum<T, Out> one[1] = {sum}, other[1] = {second};
    Function::apply<Precise>(one, other, operands_of(p), {i, j, p.m, p.n});
    return narrow<Out>(one[0]);
  }
  return narrow<Out>(activate<EPILOGUE>(sum));
}

template <int EPILOGUE, class T, class Out>
__device__ __forceinline__ void store(const Product<T, Out>& p, int batch, int i, int j, Sum<T, Out> sum,
                                      Sum<T, Out> second = {}) {
  Out* c = p.c_at(batch, i, j);
  *c = finished<EPILOGUE>(p, c, i, j, sum, second);
}
