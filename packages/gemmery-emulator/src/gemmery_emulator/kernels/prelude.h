// What nvcc declares without an include, or by a header of the host's library, and NVRTC does not: names of types and
// limits, and std:: functions of device code. It includes nothing large: <cuda/std/cmath> alone takes a second.
#pragma once

#if __has_include(<cuda/std/cstdint>)
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#else
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
#endif
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUtexObject;
typedef unsigned long long CUsurfObject;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned uint;
typedef unsigned long ulong;
typedef long ssize_t;
typedef unsigned u_int;
typedef long long time_t;
typedef unsigned long pthread_t;
typedef struct _IO_FILE FILE;
#define CUDART_VERSION CUDA_VERSION
#define __extension__
#define register
#define __asm__ asm
#define __typeof__(...) decltype(__VA_ARGS__)
#if __CUDA_ARCH__ >= 900 && !defined(__CUDACC_RDC__)  // with -rdc=true NVRTC declares them
__device__ inline void cudaGridDependencySynchronize() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void cudaTriggerProgrammaticLaunchCompletion() { asm volatile("griddepcontrol.launch_dependents;"); }
#endif
#if __CUDA_ARCH__ >= 700  // shuffles and votes without a mask, of all lanes that are active
// clang-format off
#define GEMMERY_OLD(name, type) \
  template <class T> __device__ T name(T x, type i, int n = 32) { return name##_sync(__activemask(), x, i, n); }
GEMMERY_OLD(__shfl, int) GEMMERY_OLD(__shfl_up, unsigned) GEMMERY_OLD(__shfl_down, unsigned) GEMMERY_OLD(__shfl_xor, int)
#undef GEMMERY_OLD
// clang-format on
__device__ inline int __any(int x) { return __any_sync(__activemask(), x); }
__device__ inline int __all(int x) { return __all_sync(__activemask(), x); }
__device__ inline unsigned __ballot(int x) { return __ballot_sync(__activemask(), x); }
#endif

// The device's runtime takes memory where malloc() does.
template <class T>
__device__ inline cudaError_t cudaMalloc(T** to, size_t size) {
  return (*to = (T*)malloc(size)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
#ifndef __CUDACC_RDC__
__device__ inline cudaError_t cudaFree(void* from) { return free(from), cudaSuccess; }
#endif

#define CHAR_BIT 8
#define SCHAR_MIN (-128)
#define SCHAR_MAX 127
#define UCHAR_MAX 255
#define CHAR_MIN SCHAR_MIN
#define CHAR_MAX SCHAR_MAX
#define SHRT_MIN (-32768)
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define LONG_MAX 9223372036854775807l
#define LONG_MIN (-LONG_MAX - 1)
#define ULONG_MAX 18446744073709551615ul
#define LLONG_MAX 9223372036854775807ll
#define LLONG_MIN (-LLONG_MAX - 1)
#define ULLONG_MAX 18446744073709551615ull
#define FLT_RADIX 2
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_DIG 15
#define DBL_MANT_DIG 53
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#define MAXFLOAT FLT_MAX
#define __FLT_MAX__ FLT_MAX
#define __FLT_MIN__ FLT_MIN
#define __FLT_EPSILON__ FLT_EPSILON
#define __DBL_MAX__ DBL_MAX
#define __INT_MAX__ INT_MAX
#define RAND_MAX 2147483647
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#ifndef INFINITY
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#endif
#ifndef NAN
#define NAN __builtin_bit_cast(float, 0x7fffffff)
#endif
#define HUGE_VAL __builtin_bit_cast(double, 0x7ff0000000000000)
#define HUGE_VALF INFINITY
#define EXIT_SUCCESS 0
#define EXIT_FAILURE 1

// Functions of <cmath>: whole numbers are taken as double, and std:: has them all.
#define GEMMERY_OF_WHOLE(name, type) __device__ inline double name(type x) { return name(static_cast<double>(x)); }
#define GEMMERY_ONE(name)                       \
  GEMMERY_OF_WHOLE(name, int)                   \
  GEMMERY_OF_WHOLE(name, unsigned)              \
  GEMMERY_OF_WHOLE(name, long)                  \
  GEMMERY_OF_WHOLE(name, unsigned long)         \
  GEMMERY_OF_WHOLE(name, long long)             \
  GEMMERY_OF_WHOLE(name, unsigned long long)    \
  namespace std {                               \
  using ::name;                                 \
  }
// clang-format off
GEMMERY_ONE(sqrt) GEMMERY_ONE(cbrt) GEMMERY_ONE(exp) GEMMERY_ONE(exp2) GEMMERY_ONE(expm1)
GEMMERY_ONE(log) GEMMERY_ONE(log2) GEMMERY_ONE(log10) GEMMERY_ONE(log1p)
GEMMERY_ONE(sin) GEMMERY_ONE(cos) GEMMERY_ONE(tan) GEMMERY_ONE(asin) GEMMERY_ONE(acos) GEMMERY_ONE(atan)
GEMMERY_ONE(sinh) GEMMERY_ONE(cosh) GEMMERY_ONE(tanh) GEMMERY_ONE(asinh) GEMMERY_ONE(acosh) GEMMERY_ONE(atanh)
GEMMERY_ONE(erf) GEMMERY_ONE(erfc) GEMMERY_ONE(tgamma) GEMMERY_ONE(lgamma)
GEMMERY_ONE(floor) GEMMERY_ONE(ceil) GEMMERY_ONE(round) GEMMERY_ONE(trunc) GEMMERY_ONE(rint) GEMMERY_ONE(fabs)
// clang-format on
#undef GEMMERY_ONE
#undef GEMMERY_OF_WHOLE

// Two arguments: of two types the wider one, of whole numbers double.
#define GEMMERY_MIXED(name, first, second) \
  __device__ inline double name(first x, second y) { return name(static_cast<double>(x), static_cast<double>(y)); }
#define GEMMERY_TWO(name)             \
  GEMMERY_MIXED(name, float, double)  \
  GEMMERY_MIXED(name, double, float)  \
  GEMMERY_MIXED(name, int, int)       \
  GEMMERY_MIXED(name, int, double)    \
  GEMMERY_MIXED(name, int, float)     \
  GEMMERY_MIXED(name, unsigned, float)     \
  GEMMERY_MIXED(name, unsigned, double)     \
  namespace std {                     \
  using ::name;                       \
  }
GEMMERY_TWO(pow)
GEMMERY_TWO(fmod)
GEMMERY_TWO(atan2)
GEMMERY_TWO(copysign)
#undef GEMMERY_TWO
#undef GEMMERY_MIXED
__device__ inline double pow(unsigned x, int y) { return pow(static_cast<double>(x), y); }

namespace std {
using ::abs;
using ::fma;
using ::fmax;
using ::fmin;
using ::hypot;
using ::isfinite;
using ::isinf;
using ::isnan;
using ::ldexp;
using ::memcpy;
using ::memset;
using ::printf;
using ::remainder;
using ::signbit;
#define GEMMERY_F(name) using ::name##f;
// clang-format off
GEMMERY_F(sqrt) GEMMERY_F(exp) GEMMERY_F(exp2) GEMMERY_F(log) GEMMERY_F(log2) GEMMERY_F(pow) GEMMERY_F(fabs)
GEMMERY_F(fmax) GEMMERY_F(fmin) GEMMERY_F(sin) GEMMERY_F(cos) GEMMERY_F(tanh) GEMMERY_F(floor) GEMMERY_F(ceil)
GEMMERY_F(round) GEMMERY_F(fma)
// clang-format on
#undef GEMMERY_F
typedef decltype(sizeof(0)) size_t;
typedef decltype(nullptr) nullptr_t;
typedef long ptrdiff_t;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::intptr_t;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::uintptr_t;
template <class T>
__host__ __device__ constexpr const T& max(const T& a, const T& b) {
  return a < b ? b : a;
}
template <class T>
__host__ __device__ constexpr const T& min(const T& a, const T& b) {
  return b < a ? b : a;
}
template <class T>
__host__ __device__ constexpr T&& move(T& x) {
  return static_cast<T&&>(x);
}
}  // namespace std
