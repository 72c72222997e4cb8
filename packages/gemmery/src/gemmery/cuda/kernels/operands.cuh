// What functions of sums are made of: operands that are loaded, and operations on numbers.
#pragma once
#include "load.cuh"

// Element (i, j) of C, of m x n: the first of those that a thread finishes together.
struct Spot { int i, j, m, n; };

template <> struct Narrow<e4m3> {
  static __device__ __forceinline__ e4m3 of(float x) {
    return {static_cast<unsigned char>(ptx::cvt_rn_satfinite_e4m3x2_f32(x, 0))};
  }
};
template <> struct Narrow<e5m2> {
  static __device__ __forceinline__ e5m2 of(float x) {
    return {static_cast<unsigned char>(ptx::cvt_rn_satfinite_e5m2x2_f32(x, 0))};
  }
};
// Numbers saturate, NaN becomes 0; sums of integers wrap.
template <> struct Narrow<i8> {
  static __device__ __forceinline__ i8 of(float x) { return i8(max(-128, min(127, __float2int_rn(x)))); }
  static __device__ __forceinline__ i8 of(double x) { return of(float(x)); }
  template <class S> static __device__ __forceinline__ i8 of(S x) { return i8(x); }
};
template <class To> __device__ __forceinline__ To widen(i8 x) { return To(x); }
template <class To> __device__ __forceinline__ To widen(e5m2 x) {
  return ptx::cvt_f32_f16(static_cast<unsigned short>(x.bits << 8));
}
template <class To> __device__ __forceinline__ To widen(e4m3 x) {
  const bool is_nan = (x.bits & 127) == 127;
  return is_nan ? __int_as_float(0x7fc00000) : __uint_as_float((x.bits & 128) << 24 | (x.bits & 127) << 20) * 0x1p120f;
}

// WIDTH elements of a row from column j on, VECTOR at a time where they are adjacent and aligned; beyond the last
// column, what that one has.
template <int VECTOR, class S, int WIDTH, class T>
__device__ __forceinline__ void load_row(S (&to)[WIDTH], const T* row, long long step, int j, int n) {
  if constexpr (VECTOR > 1 && WIDTH > 1) {
    constexpr int EACH = VECTOR < WIDTH ? VECTOR : WIDTH;
#pragma unroll
    for (int x = 0; x < WIDTH; x += EACH) {
      const auto piece = *reinterpret_cast<const Chunk<T, EACH>*>(row + min(j + x, n - EACH));
#pragma unroll
      for (int v = 0; v < EACH; ++v) to[x + v] = widen<S>(piece.of[v]);
    }
  } else {
#pragma unroll
    for (int x = 0; x < WIDTH; ++x) to[x] = widen<S>(row[min(j + x, n - 1) * step]);
  }
}

// Two of them, of 16 bits, as numbers.
template <class T, class S, int WIDTH> __device__ __forceinline__ void unpack(S (&to)[WIDTH], unsigned pair) {
#pragma unroll
  for (int x = 0; x < WIDTH; ++x) to[x] = widen<S>(T{static_cast<unsigned short>(pair >> 16 * (x % 2))});
}

// Writes them, those that are inside.
template <int VECTOR, class S, int WIDTH, class T>
__device__ __forceinline__ void store_row(const S (&from)[WIDTH], T* row, long long step, int j, int n) {
  if constexpr (VECTOR > 1 && WIDTH > 1) {
    constexpr int EACH = VECTOR < WIDTH ? VECTOR : WIDTH;
#pragma unroll
    for (int x = 0; x < WIDTH; x += EACH) {
      Chunk<T, EACH> piece;
#pragma unroll
      for (int v = 0; v < EACH; ++v) piece.of[v] = narrow<T>(from[x + v]);
      if (j + x < n) *reinterpret_cast<Chunk<T, EACH>*>(row + j + x) = piece;
    }
  } else {
#pragma unroll
    for (int x = 0; x < WIDTH; ++x) {
      if (j + x < n) row[(j + x) * step] = narrow<T>(from[x]);
    }
  }
}

// Operations by the compiler's functions, each within a few roundings.
struct Precise {
  static __device__ __forceinline__ float absolute(float x) { return fabsf(x); }
  static __device__ __forceinline__ double absolute(double x) { return fabs(x); }
  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ double exp(double x) { return ::exp(x); }
  static __device__ __forceinline__ float log(float x) { return logf(x); }
  static __device__ __forceinline__ double log(double x) { return ::log(x); }
  static __device__ __forceinline__ float tanh(float x) { return tanhf(x); }
  static __device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
  static __device__ __forceinline__ float erf(float x) { return erff(x); }
  static __device__ __forceinline__ double erf(double x) { return ::erf(x); }
  static __device__ __forceinline__ float sqrt(float x) { return sqrtf(x); }
  static __device__ __forceinline__ double sqrt(double x) { return ::sqrt(x); }
  static __device__ __forceinline__ float rint(float x) { return rintf(x); }
  static __device__ __forceinline__ double rint(double x) { return ::rint(x); }
  template <class S> static __device__ __forceinline__ S rsqrt(S x) { return S(1) / sqrt(x); }
  template <class S> static __device__ __forceinline__ S sigmoid(S x) { return S(1) / (S(1) + exp(-x)); }
  template <class S> static __device__ __forceinline__ S silu(S x) { return x / (S(1) + exp(-x)); }
  static __device__ __forceinline__ float gelu(float x) { return x * normcdff(x); }
  static __device__ __forceinline__ double gelu(double x) { return x * normcdf(x); }
  template <class S> static __device__ __forceinline__ S relu(S x) { return x < 0 ? S(0) : x; }  // NaN stays NaN
  template <class S> static __device__ __forceinline__ S maximum(S x, S y) { return x > y || x != x ? x : y; }
  template <class S> static __device__ __forceinline__ S minimum(S x, S y) { return x < y || x != x ? x : y; }
};
