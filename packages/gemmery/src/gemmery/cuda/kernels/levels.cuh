// Weights of 4 or 8 bits: how 64 rows by 128 of k lie in memory, and how a thread makes operands of wgmma of its share.
// A chunk is the weights, then the factors of its groups, then their zero points (cuda/weights.py arranges them). Rows
// 2 g and 2 g + 1 of a warp's 16 are the rows g and g + 8 of its fragment, so that a thread's two sums of a token are
// neighbors in C. A thread's 16 bytes are next to its neighbor's.
// Idea: no integer becomes a number by a conversion. A bf16 whose 8 high bits are 0 is its 8 low bits times 2^-133,
// whether it is subnormal or not; an f16 with 0x64 above 8 bits is 1024 more than they count. One logical instruction
// leaves a level where it lies, for both halves of a register, and one multiply-add takes the offset off. An f16 has
// that in its subnormals, times 2^-24, if the CLOSE factors of a row are from 2^10 to 2^16 of its own.
#pragma once
#include "types.cuh"

enum Kind { INT4, INT8, E4M3, E2M1 };

template <class T> __device__ __forceinline__ unsigned fma2(unsigned x, unsigned y, unsigned z) {
  if constexpr (SameAs<T, bf16>::value) return ptx::fma_rn_bf16x2(x, y, z);
  return ptx::fma_rn_f16x2(x, y, z);
}

// A pair of the same 16 bits, and of 2^e.
constexpr unsigned both(unsigned half) { return half << 16 | half; }
template <class T> constexpr unsigned power(int e) {
  return both(SameAs<T, bf16>::value ? unsigned(e + 127) << 7 : unsigned(e + 15) << 10);
}
constexpr unsigned MINUS_ZERO = both(0x8000);

// GROUP of k have a factor, 0: a row has, which the finished sum is multiplied by; ZEROS: and a zero point.
template <class T, Kind KIND_, int GROUP_, bool ZEROS_, bool CLOSE> struct Levels {
  static constexpr Kind KIND = KIND_;
  static constexpr bool ZEROS = ZEROS_, BF16 = SameAs<T, bf16>::value;
  static constexpr bool ONCE = CLOSE || (BF16 && !ZEROS);  // 8 times a factor is exact
  static constexpr int GROUP = GROUP_, BITS = KIND == INT4 || KIND == E2M1 ? 4 : 8, COUNT = GROUP ? 128 / GROUP : 0;
  static constexpr int BYTES = 1024 * BITS, CHUNK = BYTES + COUNT * (ZEROS ? 192 : 128);
  static constexpr int UNITS = BYTES / 2048;  // of 16 bytes, a thread's
  static constexpr int PRODUCTS = GROUP && GROUP < 64 ? GROUP / 16 : 4;  // of 64 of k, with one factor
  // What operands are multiplied by: with the factors as bf16 holds them, of which 2^133 is none.
  static constexpr float UNSCALE = BF16 ? 8192 : 1;
  static_assert(!ZEROS || KIND == INT4, "zero points are of 4 bits");

  unsigned words[UNITS][4], scales[COUNT ? COUNT : 1], zeros[COUNT ? COUNT : 1];

  __device__ __forceinline__ void fetch(unsigned weights, unsigned factors, unsigned points) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) ptx::ld_shared_v4(words[unit], weights + unit * 2048);
    if constexpr (COUNT >= 4) {
#pragma unroll
      for (int i = 0; i < COUNT / 4; ++i) {
        ptx::ld_shared_v4(*reinterpret_cast<unsigned(*)[4]>(scales + 4 * i), factors + 16 * i);
      }
    } else if constexpr (COUNT == 2) {
      ptx::ld_shared_v2(scales[0], scales[1], factors);
    } else if constexpr (COUNT == 1) {
      scales[0] = ptx::ld_shared_b32(factors);
    }
    if constexpr (ZEROS) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) zeros[i] = ptx::ld_shared_u16(points + 2 * i);
    }
  }
  static __device__ __forceinline__ unsigned factors_at(int thread) { return BYTES + thread / 4 * COUNT * 4; }
  static __device__ __forceinline__ unsigned zeros_at(int thread) {
    return BYTES + COUNT * 128 + thread / 4 * COUNT * 2;
  }

  // The operands of four products, 64 of k; of each, a[0] and a[1] are two rows, a[2] and a[3] the same 8 of k later.
  __device__ __forceinline__ void unpack(unsigned (&a)[4][4], int half) const {
    constexpr unsigned ONE = power<T>(0), SIXTEENTH = power<T>(-4);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      unsigned scale = 0, low = 0, high = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j % PRODUCTS == 0) {
          const int i = COUNT > 1 ? (4 * half + j) * 16 / (GROUP ? GROUP : 1) : 0;
          if constexpr (GROUP > 0) scale = ptx::twice(scales[i], row);
          if constexpr (KIND == INT4) points(low, high, scale, i, row);
          if constexpr (KIND == INT8 && BF16 && GROUP > 0) low = fma2<T>(scale, both(0x8080), MINUS_ZERO);
        }
        if constexpr (KIND == INT4) {
          const unsigned x = row ? words[half][j] >> 8 : words[half][j];
          if constexpr (ONCE) {  // (8 + q) s - 8 s, rounded once
            a[j][row] = fma2<T>(x & 0x000f000f, scale, low);
            a[j][row + 2] = fma2<T>(x & 0x00f000f0, high, low);
          } else {
            constexpr unsigned BASE = BF16 ? 0 : both(0x6400);
            a[j][row] = fma2<T>(fma2<T>(x & 0x000f000f | BASE, ONE, low), scale, MINUS_ZERO);
            a[j][row + 2] = fma2<T>(fma2<T>(x & 0x00f000f0 | BASE, SIXTEENTH, high), scale, MINUS_ZERO);
          }
        } else if constexpr (KIND == E2M1) {
          a[j][row] = fma2<T>(fraction(words[half][j], row), scale, MINUS_ZERO);
          a[j][row + 2] = fma2<T>(fraction(words[half][j], row + 2), scale, MINUS_ZERO);
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const unsigned x = words[2 * half + j / 2][j % 2 * 2 + h];
            a[j][row + 2 * h] = KIND == INT8 ? integer(x, row, scale, low) : number(x, row, scale);
          }
        }
      }
    }
  }

 private:
  // What takes the zero point, 8 without one, off the low four bits of a byte and off the high ones.
  __device__ __forceinline__ void points(unsigned& low, unsigned& high, unsigned scale, int i, int row) const {
    if constexpr (ONCE) {
      low = fma2<T>(scale, both(0x8008), MINUS_ZERO);
      high = fma2<T>(scale, power<T>(-4), MINUS_ZERO);  // and the factor of 16 times a level
    } else {
      const unsigned point = ZEROS ? __byte_perm(zeros[i], 0, row ? 0x4141 : 0x4040) : both(8);
      low = point | (BF16 ? MINUS_ZERO : both(0xe400));
      high = BF16 ? low : (point << 4) + both(0xd400);
    }
  }

  // 8 bits of a row, 128 more than their level.
  static __device__ __forceinline__ unsigned integer(unsigned x, int row, unsigned scale, unsigned low) {
    const unsigned level = __byte_perm(x, BF16 ? 0 : both(0x6464), row ? 0x4341 : 0x4240);
    if constexpr (BF16) {
      constexpr unsigned UNIT = power<T>(120), OFFSET = both(0x8000 | (127 - 6) << 7);
      return GROUP ? fma2<T>(level, scale, low) : fma2<T>(level, UNIT, OFFSET);
    }
    const unsigned q = fma2<T>(level, power<T>(0), both(0xe480));
    return GROUP ? fma2<T>(q, scale, MINUS_ZERO) : q;
  }

  // A float8 of a row: its bits, as T has them, times 2^120 or 2^8.
  static __device__ __forceinline__ unsigned number(unsigned x, int row, unsigned scale) {
    unsigned bits;
    if constexpr (BF16) {
      bits = row ? (x << 4 & both(0x80f0)) | (x >> 4 & both(0x0700)) : x & both(0x87f0);
    } else {
      bits = row ? (x << 7 & both(0x3f80)) | (x << 1 & both(0x8000)) : x & both(0xbf80);
    }
    const unsigned one = fma2<T>(bits, power<T>(BF16 ? 107 : 8), MINUS_ZERO);
    return GROUP ? fma2<T>(one, scale, MINUS_ZERO) : one;
  }

  // The i-th float4 of a half word, as T has it: in bf16 2^-126 of it, which factors make good. f16 has no room for
  // that.
  static __device__ __forceinline__ unsigned fraction(unsigned x, int i) {
    if constexpr (BF16) {
      if (i == 3) return (x << 4 & both(0x8180)) | (x >> 4 & both(0x0040));
      return (i == 0 ? x : i == 1 ? x << 6 : __funnelshift_r(x, x, 6)) & both(0x81c0);
    } else {
      unsigned bits = x << 7 * i & both(0x8e00);
      if (i == 2) bits = (x >> 3 & both(0x0e00)) | (x << 15 & both(0x8000));
      if (i == 3) bits = (x << 4 & both(0x0e00)) | (x << 14 & both(0x8000));
      return fma2<T>(bits, power<T>(14), MINUS_ZERO);
    }
  }
};
