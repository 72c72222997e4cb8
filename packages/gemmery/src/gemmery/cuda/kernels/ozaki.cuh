// float64 as integers modulo small numbers: x 2^t, rounded, for a t of each row of A and each column of B. Its residues
// modulo COUNT coprime numbers are int8; sums of their products, modulo the same numbers, tell the sum of the integers'
// products by the Chinese remainder theorem. What the launches of one product share lies in the workspace.
#pragma once
#include "tma.cuh"

// The largest coprime numbers that have residues of 8 bits, by what they are less than 256: 0, 1, 3, 5, 9, 15, 17, 23,
// 27, 29, 33, 39, 45, 57, 59. A byte of a constant each, so that a kernel finds one by its index without memory.
__device__ __forceinline__ constexpr int modulus(int i) {
  return 256 - int((i < 8 ? 0x17110f0905030100 : 0x3b392d27211d1b) >> i % 8 * 8 & 255);
}

// Numbers of up to 120 bits: three limbs of 40, so that float64 sums them times bytes exactly.
struct Limbs { unsigned long long of[3]; };
constexpr unsigned long long LIMB = (1ULL << 40) - 1;
constexpr Limbs times(Limbs x, unsigned y) {
  unsigned long long carry = 0;
  for (int i = 0; i < 3; ++i) {
    carry += x.of[i] * y;
    x.of[i] = carry & LIMB;
    carry >>= 40;
  }
  return x;
}

// The constants of the theorem for the first COUNT moduli, whose product is M. With w[i] = 1 modulo modulus i and 0
// modulo all others, a number is the sum of its residues times w[i], less a multiple of M.
template <int COUNT> struct Remainders {
  Limbs w[COUNT] = {}, all = {{1, 0, 0}};  // all: M
  int low[COUNT] = {}, high[COUNT] = {};   // residues of 256^0 ... 256^7, signed bytes
  double half = 0.5;                       // M / 2

  constexpr Remainders() {
    for (int i = 0; i < COUNT; ++i) {
      const int p = modulus(i);
      all = times(all, p);
      half *= p;
      Limbs others = {{1, 0, 0}};
      int residue = 1, inverse = 1;
      for (int j = 0; j < COUNT; ++j) {
        if (j == i) continue;
        others = times(others, modulus(j));
        residue = residue * modulus(j) % p;
      }
      while (residue * inverse % p != 1) ++inverse;
      w[i] = times(others, inverse);
      unsigned digits[2] = {};
      for (int j = 0, power = 1; j < 8; ++j, power = power * 256 % p) {
        digits[j / 4] |= unsigned((power > p / 2 ? power - p : power) & 255) << j % 4 * 8;
      }
      low[i] = int(digits[0]);
      high[i] = int(digits[1]);
    }
  }
};

// Why the integers cannot stand for the operands: Inf, NaN, or a row whose norm is too large or too small.
enum OzakiStatus { OUTSIDE = 1 };

// An operand, A by rows or B by columns: its sides, and where its residues lie, [modulus][matrix][side][k].
struct Integers {
  const double* from;
  long long batch_step, side_step, k_step;
  int sides, depth, matrices;
  int* exponents;  // t of each side
  signed char* residues;

  __device__ __forceinline__ long long pitch() const { return (depth + 127LL) / 128 * 128; }
  __device__ __forceinline__ long long count() const { return 1LL * matrices * sides; }
  __device__ __forceinline__ bool by_k() const { return llabs(k_step) < llabs(side_step); }
  __device__ __forceinline__ const double* row(long long side) const {
    return from + side / sides * batch_step + side % sides * side_step;
  }
};

// The workspace, as ladder/float64_residues.py lays it out. Sums of BM x BN are adjacent, those of all moduli follow
// each other, and a thread of the product's has 16 adjacent bytes of each.
template <int COUNT, int BM, int BN> struct OzakiWork {
  unsigned* status;
  Integers of[2];
  unsigned char* sums;

  template <class P> __device__ __forceinline__ explicit OzakiWork(const P& p) {
    char* at = static_cast<char*>(p.workspace);
    auto take = [&](long long bytes) {
      char* start = at;
      at += (bytes + 255) / 256 * 256;
      return start;
    };
    status = reinterpret_cast<unsigned*>(take(4));
    of[0] = {p.a, p.a_batch, p.a_row, p.a_col, p.m, p.k, p.a_batch ? p.batch : 1};
    of[1] = {p.b, p.b_batch, p.b_col, p.b_row, p.n, p.k, p.b_batch ? p.batch : 1};
    for (Integers& x : of) x.exponents = reinterpret_cast<int*>(take(4LL * p.batch * x.sides));
    const long long tiles = 1LL * ((p.m + BM - 1) / BM) * ((p.n + BN - 1) / BN) * p.batch;
    sums = reinterpret_cast<unsigned char*>(take(tiles * COUNT * BM * BN));
    for (Integers& x : of) x.residues = reinterpret_cast<signed char*>(take(COUNT * x.count() * x.pitch()));
  }
};

__device__ __forceinline__ double power_of_two_f64(int e) { return __longlong_as_double((e + 1023LL) << 52); }

// A byte congruent to a sum modulo p, of a sum up to 2^30. The quotient is rounded down, or is one less for a negative
// multiple of p: where p is not 256, p itself is a byte.
__device__ __forceinline__ int inverse_of(int p) { return int(((1LL << 38) + p - 1) / p); }
__device__ __forceinline__ unsigned byte_of(int sum, int p, int inverse) {
  return unsigned(sum - (__mulhi(sum, inverse) >> 6) * p);
}
