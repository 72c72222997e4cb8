// Element types, and the arithmetic of their sums. No CUDA header is included: compiling one takes longer than
// compiling a kernel, and NVRTC before 13.3 ships none.
#pragma once
#include "ptx.cuh"

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct tf32 { float value; };  // a float rounded to 10 bits of fraction in products

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
struct flag { u8 value; };  // a bool: pairs of which both are true are counted, and the count compared with 0

template <class R> struct alignas(2 * sizeof(R)) Complex {
  R re, im;
  Complex() = default;
  __device__ __forceinline__ constexpr Complex(R real, R imaginary = 0) : re(real), im(imaginary) {}
  __device__ __forceinline__ Complex& operator+=(Complex x) { return *this = {re + x.re, im + x.im}; }
  __device__ __forceinline__ Complex& operator*=(Complex x) {
    return *this = {re * x.re - im * x.im, re * x.im + im * x.re};
  }
  __device__ __forceinline__ bool operator!=(R x) const { return re != x || im != 0; }
};
using complex64 = Complex<float>;
using complex128 = Complex<double>;

enum Layout { ROW, COL, ANY };  // adjacent in memory: elements of a row, of a column, or neither

// The type in which products of T are summed for a result of type Out: whole numbers wrap, whatever their sign.
template <class Out> struct SumFor { using type = float; };
template <> struct SumFor<double> { using type = double; };
template <> struct SumFor<complex64> { using type = complex64; };
template <> struct SumFor<complex128> { using type = complex128; };
template <> struct SumFor<i8> { using type = u32; };
template <> struct SumFor<u8> { using type = u32; };
template <> struct SumFor<i16> { using type = u32; };
template <> struct SumFor<u16> { using type = u32; };
template <> struct SumFor<int> { using type = u32; };
template <> struct SumFor<u32> { using type = u32; };
template <> struct SumFor<flag> { using type = u32; };
template <> struct SumFor<i64> { using type = u64; };
template <> struct SumFor<u64> { using type = u64; };
template <class T, class Out> struct SumOf { using type = typename SumFor<Out>::type; };
template <class T, class Out> using Sum = typename SumOf<T, Out>::type;

// A and B of types of their own, which are widened as they are loaded.
template <class A, class B> struct Mixed {};
template <class T> struct OperandsOf { using A = T; using B = T; };
template <class X, class Y> struct OperandsOf<Mixed<X, Y>> { using A = X; using B = Y; };

// The type that a matrix of T stores in memory, and that of results.
template <class T> struct StoredAs { using type = T; };
template <> struct StoredAs<tf32> { using type = float; };

template <class To, class From> __device__ __forceinline__ To widen(From x) { return To(x); }
template <class To> __device__ __forceinline__ To widen(flag x) { return x.value != 0; }
template <class To> __device__ __forceinline__ To widen(tf32 x) { return x.value; }
template <class To> __device__ __forceinline__ To widen(f16 x) { return ptx::cvt_f32_f16(x.bits); }
template <class To> __device__ __forceinline__ To widen(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

template <class R> __device__ __forceinline__ R negative(R x) { return -x; }
__device__ __forceinline__ f16 negative(f16 x) { return {static_cast<unsigned short>(x.bits ^ 0x8000)}; }

// Rounded to nearest, ties to even.
template <class Out> struct Narrow {
  template <class S> static __device__ __forceinline__ Out of(S x) { return Out(x); }
};
template <> struct Narrow<flag> { static __device__ __forceinline__ flag of(u32 x) { return {u8(x != 0)}; } };
template <> struct Narrow<tf32> { static __device__ __forceinline__ tf32 of(float x) { return {x}; } };
template <> struct Narrow<f16> {
  static __device__ __forceinline__ f16 of(float x) { return {ptx::cvt_rn_f16_f32(x)}; }
};
template <> struct Narrow<bf16> {
  static __device__ __forceinline__ bf16 of(float x) { return {ptx::cvt_rn_bf16_f32(x)}; }
};
template <class Out, class S> __device__ __forceinline__ Out narrow(S x) { return Narrow<Out>::of(x); }

__device__ __forceinline__ float multiply_add(float x, float y, float sum) { return __fmaf_rn(x, y, sum); }
__device__ __forceinline__ double multiply_add(double x, double y, double sum) { return __fma_rn(x, y, sum); }
__device__ __forceinline__ u32 multiply_add(u32 x, u32 y, u32 sum) { return x * y + sum; }
__device__ __forceinline__ u64 multiply_add(u64 x, u64 y, u64 sum) { return x * y + sum; }
template <class R>
__device__ __forceinline__ Complex<R> multiply_add(Complex<R> x, Complex<R> y, Complex<R> sum) {
  return {multiply_add(-x.im, y.im, multiply_add(x.re, y.re, sum.re)),
          multiply_add(x.im, y.re, multiply_add(x.re, y.im, sum.im))};
}

// The 0 of sums.
template <class S> struct ZeroOf { static __device__ __forceinline__ S value() { return S(0); } };

// ---- products of semirings: the least or largest of sums or products, and the logarithm of a sum of exponentials ----
// An element of InRing<T, RING> is one of T. A sum or product that is NaN is left out, as fmin and fmax do.

enum Semiring { MIN_PLUS, MAX_PLUS, MAX_TIMES, LOG_SUM_EXP };
template <class T, Semiring RING> struct InRing { T value; };
template <class R, Semiring RING> struct RingSum {
  R value;
  __device__ __forceinline__ operator R() const { return value; }
};
// log of the sum of e^x: the largest x, and the sum of e^(x - largest), which therefore neither overflows nor vanishes.
template <class R> struct RingSum<R, LOG_SUM_EXP> {
  R value, sum;
  __device__ __forceinline__ operator R() const { return value + log(sum); }
};
template <class T, Semiring RING, class Out> struct SumOf<InRing<T, RING>, Out> {
  using type = RingSum<typename SumFor<Out>::type, RING>;
};
template <class R, Semiring RING> struct ZeroOf<RingSum<R, RING>> {
  static __device__ __forceinline__ RingSum<R, RING> value() {
    return {R(__int_as_float(RING == MIN_PLUS ? 0x7f800000 : 0xff800000))};  // an infinity
  }
};
template <class S> struct PadsWithZeros { static constexpr bool value = true; };  // a product of zeros adds nothing
template <class R, Semiring RING> struct PadsWithZeros<RingSum<R, RING>> { static constexpr bool value = false; };

template <class To, class T, Semiring RING> __device__ __forceinline__ To widen(InRing<T, RING> x) {
  return {widen<decltype(To::value)>(x.value)};
}
__device__ __forceinline__ float fast_exp(float x) { return ptx::ex2_approx_ftz(x * 1.44269504f); }
__device__ __forceinline__ double fast_exp(double x) { return exp(x); }

template <class R, Semiring RING>
__device__ __forceinline__ RingSum<R, RING> multiply_add(RingSum<R, RING> x, RingSum<R, RING> y,
                                                         RingSum<R, RING> sum) {
  if constexpr (RING == MIN_PLUS) return {min(x.value + y.value, sum.value)};
  if constexpr (RING == MAX_PLUS) return {max(x.value + y.value, sum.value)};
  if constexpr (RING == MAX_TIMES) return {max(x.value * y.value, sum.value)};
  if constexpr (RING == LOG_SUM_EXP) {  // one exponential: of the distance between the new x and the largest one
    const R next = x.value + y.value, above = next == sum.value ? R(0) : next - sum.value;
    const R scale = fast_exp(-abs(above));
    return above > 0 ? RingSum<R, RING>{next, sum.sum * scale + 1} : RingSum<R, RING>{sum.value, sum.sum + scale};
  }
}

// ---- what only tensor cores of sm_90 multiply ----

struct e4m3 { unsigned char bits; };  // float8: 4 bits of exponent and 3 of fraction, no infinity
struct e5m2 { unsigned char bits; };
struct e4m3e5m2 { unsigned char bits; };  // of products of the one by the other: an element of either
struct e5m2e4m3 { unsigned char bits; };

// The type in which they add products of T, before alpha, beta, bias and scales.
template <class T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<i8> { using type = int; };
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

template <bool FIRST, class X, class Y> struct Select { using type = X; };
template <class X, class Y> struct Select<false, X, Y> { using type = Y; };

template <class X, class Y> struct SameAs { static constexpr bool value = false; };
template <class X> struct SameAs<X, X> { static constexpr bool value = true; };
