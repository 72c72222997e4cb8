// Element types, and the arithmetic of their sums. No CUDA header is included: compiling one takes longer than
// compiling a kernel, and NVRTC before 13.3 ships none.
#pragma once
#include "ptx.cuh"

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct tf32 { float value; };  // a float rounded to 10 bits of fraction in products

enum Layout { ROW, COL, ANY };  // adjacent in memory: elements of a row, of a column, or neither

// The type in which products of T are summed for a result of type Out.
template <class T, class Out> struct SumOf { using type = float; };
template <class T> struct SumOf<T, double> { using type = double; };
template <class T, class Out> using Sum = typename SumOf<T, Out>::type;

// The type that a matrix of T stores in memory, and that of results.
template <class T> struct StoredAs { using type = T; };
template <> struct StoredAs<tf32> { using type = float; };

template <class To> __device__ __forceinline__ To widen(float x) { return x; }
template <class To> __device__ __forceinline__ To widen(double x) { return x; }
template <class To> __device__ __forceinline__ To widen(tf32 x) { return x.value; }
template <class To> __device__ __forceinline__ To widen(f16 x) { return ptx::cvt_f32_f16(x.bits); }
template <class To> __device__ __forceinline__ To widen(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

// Rounded to nearest, ties to even.
template <class Out> struct Narrow;
template <> struct Narrow<float> { static __device__ __forceinline__ float of(float x) { return x; } };
template <> struct Narrow<tf32> { static __device__ __forceinline__ tf32 of(float x) { return {x}; } };
template <> struct Narrow<double> { static __device__ __forceinline__ double of(double x) { return x; } };
template <> struct Narrow<f16> {
  static __device__ __forceinline__ f16 of(float x) { return {ptx::cvt_rn_f16_f32(x)}; }
};
template <> struct Narrow<bf16> {
  static __device__ __forceinline__ bf16 of(float x) { return {ptx::cvt_rn_bf16_f32(x)}; }
};
template <class Out, class S> __device__ __forceinline__ Out narrow(S x) { return Narrow<Out>::of(x); }

__device__ __forceinline__ float multiply_add(float x, float y, float sum) { return __fmaf_rn(x, y, sum); }
__device__ __forceinline__ double multiply_add(double x, double y, double sum) { return __fma_rn(x, y, sum); }

// ---- what only tensor cores of sm_90 multiply ----

struct e4m3 { unsigned char bits; };  // float8: 4 bits of exponent and 3 of fraction, no infinity
struct e5m2 { unsigned char bits; };
using i8 = signed char;
template <> struct Narrow<int> { static __device__ __forceinline__ int of(int x) { return x; } };

// The type in which they add products of T, before alpha, beta, bias and scales.
template <class T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<i8> { using type = int; };
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

template <bool FIRST, class X, class Y> struct Select { using type = X; };
template <class X, class Y> struct Select<false, X, Y> { using type = Y; };

template <class X, class Y> struct SameAs { static constexpr bool value = false; };
template <class X> struct SameAs<X, X> { static constexpr bool value = true; };
