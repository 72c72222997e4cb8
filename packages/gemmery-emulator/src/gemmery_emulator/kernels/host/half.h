// Numbers of 16 bits for the host part of a program: storage, conversions to the nearest, and sums in float.
#ifndef GEMMERY_HALF
#define GEMMERY_HALF
#include <cstdint>
#include <cstring>
#include "vector_types.h"
namespace gemmery {
// A float of E bits of exponent and M of mantissa in 16 bits, to the nearest and ties to even.
template <int E, int M> uint16_t narrowed(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff, bias = 127 - ((1 << (E - 1)) - 1);
  if (size > 0x7f800000) return 0x7fff;
  const int exponent = static_cast<int>(size >> 23) - static_cast<int>(bias);
  if (exponent >= (1 << E) - 1) return sign | ((1u << E) - 1) << M;
  const uint64_t whole = size >> 23 ? (size & 0x7fffff) | 0x800000 : size & 0x7fffff;
  const int cut = 23 - M + (exponent < 1 ? 1 - exponent - (size >> 23 ? 0 : 1) : 0);
  if (cut > 40) return sign;
  const uint64_t kept = whole >> cut, rest = whole & ((1ull << cut) - 1), half = 1ull << (cut - 1);
  uint64_t result = exponent < 1 ? kept : kept - (1ull << M) + (static_cast<uint64_t>(exponent) << M);
  result += rest > half || (rest == half && (kept & 1));
  return static_cast<uint16_t>(sign | result);
}
template <int E, int M> float widened(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16, exponent = value >> M & ((1 << E) - 1);
  uint32_t mantissa = value & ((1 << M) - 1), bits;
  const uint32_t bias = 127 - ((1 << (E - 1)) - 1);
  if (exponent == (1 << E) - 1) {
    bits = sign | 0x7f800000 | mantissa << (23 - M);
  } else if (exponent || E == 8) {
    bits = sign | (exponent + bias) << 23 | mantissa << (23 - M);
  } else {
    float small = static_cast<float>(mantissa) / static_cast<float>(1 << 24);
    memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
}  // namespace gemmery
#define GEMMERY_HALF_TYPE(H, H2, R, R2, E, M)                                                                      \
  struct R { unsigned short x; };                                                                                   \
  struct H {                                                                                                        \
    unsigned short __x;                                                                                             \
    H() = default;                                                                                                  \
    H(const R& raw) : __x(raw.x) {}                                                                                 \
    H(float value) : __x(gemmery::narrowed<E, M>(value)) {}                                                         \
    H(double value) : H(static_cast<float>(value)) {}                                                               \
    H(int value) : H(static_cast<float>(value)) {}                                                                  \
    H(unsigned value) : H(static_cast<float>(value)) {}                                                             \
    operator float() const { return gemmery::widened<E, M>(__x); }                                                  \
    operator R() const { return {__x}; }                                                                            \
    H& operator+=(H other) { return *this = H(float(*this) + float(other)); }                                       \
    H& operator*=(H other) { return *this = H(float(*this) * float(other)); }                                       \
  };                                                                                                                \
  struct __attribute__((aligned(4))) H2 { H x, y; H2() = default; H2(H a, H b) : x(a), y(b) {} };                   \
  inline H operator+(H a, H b) { return float(a) + float(b); }                                                      \
  inline H operator-(H a, H b) { return float(a) - float(b); }                                                      \
  inline H operator*(H a, H b) { return float(a) * float(b); }                                                      \
  inline H operator/(H a, H b) { return float(a) / float(b); }                                                      \
  inline float __low2float(H2 a) { return a.x; }                                                                    \
  inline float __high2float(H2 a) { return a.y; }                                                                   \
  inline H __low2half(H2 a) { return a.x; }                                                                         \
  inline H __high2half(H2 a) { return a.y; }
GEMMERY_HALF_TYPE(__half, __half2, __half_raw, __half2_raw, 5, 10)
GEMMERY_HALF_TYPE(__nv_bfloat16, __nv_bfloat162, __nv_bfloat16_raw, __nv_bfloat162_raw, 8, 7)
typedef __half half;
typedef __half2 half2;
typedef __half nv_half;
typedef __half2 nv_half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return x; }
inline __half __int2half_rn(int x) { return x; }
inline __half __ushort_as_half(unsigned short x) { return __half_raw{x}; }
inline unsigned short __half_as_ushort(__half x) { return x.__x; }
inline float __half2float(__half x) { return x; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
#endif
