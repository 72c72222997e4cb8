// float32 as a few numbers of 16 bits: x 2^s = p0 + p1 2^-SHIFT + p2 2^-2SHIFT, with an s for each row of A and each
// column of B. What the launches of one product share lies in the workspace.
#pragma once
#include "tma.cuh"

// Two f16 of 11 bits each. The second is scaled by 2^11, so that it has the range of the first.
struct TwoParts {
  using Element = f16;
  static constexpr int PARTS = 2, SHIFT = 11, TOP = 14;  // the largest element of a row is 2^TOP or more
};
// Three bf16 of 8 bits each, which are exact. With 2^50 as the largest element, sums of products stay below 2^118, and
// all three parts of an element as small as 2^-155 of it are normal numbers.
struct ThreeParts {
  using Element = bf16;
  static constexpr int PARTS = 3, SHIFT = 0, TOP = 50;
};

// An operand that was split before has the parts of both schemes, from p.a_scale or p.b_scale on: products in parts
// have no factors. This is the first one of a scheme.
static_assert(KEPT_PARTS == TwoParts::PARTS + ThreeParts::PARTS && MOST_PARTS == ThreeParts::PARTS, "as the host says");
__host__ __device__ constexpr int first_kept(int parts) { return parts == ThreeParts::PARTS ? TwoParts::PARTS : 0; }

// Scaled elements below 2^-13 have less than 23 bits in TwoParts: the smallest ones of each k are kept.
constexpr unsigned WEAK = (127 - 13) << 23;  // the bits of 2^-13

// An operand, A by rows or B by columns: its sides, and where its parts lie, [part][matrix][side][k].
struct Split {
  const float* from;
  long long batch_step, side_step, k_step;
  int sides, depth, matrices;
  unsigned* largest;   // of each side, as bits of its magnitude
  unsigned* smallest;  // of each k, if below 2^-13
  unsigned short* parts;

  __device__ __forceinline__ long long pitch() const { return (depth + 63LL) / 64 * 64; }
  __device__ __forceinline__ int strips() const { return (sides + STRIP - 1) / STRIP * matrices; }
  __device__ __forceinline__ long long count() const { return 1LL * matrices * sides; }
  __device__ __forceinline__ const float* row(long long side) const {
    return from + side / sides * batch_step + side % sides * side_step;
  }
};

// The workspace, as ladder/float32_pre_pass.py lays it out.
struct SplitWork {
  unsigned *status, *measured;  // of each strip, the tiles that are measured
  Split of[2];

  template <class P> static __device__ __forceinline__ long long strips_of(const P& p) {
    return 1LL * p.batch * ((p.m + STRIP - 1) / STRIP + (p.n + STRIP - 1) / STRIP);
  }

  template <class P> __device__ __forceinline__ explicit SplitWork(const P& p) {
    char* at = static_cast<char*>(p.workspace);
    auto take = [&](long long bytes) {
      char* start = at;
      at += (bytes + 255) / 256 * 256;
      return start;
    };
    status = reinterpret_cast<unsigned*>(take(4));
    measured = reinterpret_cast<unsigned*>(take(4 * strips_of(p)));
    of[0] = {p.a, p.a_batch, p.a_row, p.a_col, p.m, p.k, p.a_batch ? p.batch : 1};
    of[1] = {p.b, p.b_batch, p.b_col, p.b_row, p.n, p.k, p.b_batch ? p.batch : 1};
    for (Split& x : of) {
      x.largest = reinterpret_cast<unsigned*>(take(4LL * p.batch * x.sides));
      x.smallest = reinterpret_cast<unsigned*>(take(4LL * x.depth));
    }
    for (Split& x : of) x.parts = reinterpret_cast<unsigned short*>(take(2 * MOST_PARTS * x.count() * x.pitch()));
  }
};

__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }
__device__ __forceinline__ bool finite(unsigned magnitude) { return magnitude < 0x7f800000; }
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// The exponent of a float32, subnormal or not, from the bits of its magnitude; that of 0 is -150.
__device__ __forceinline__ int exponent_of(unsigned bits) {
  return bits >> 23 ? int(bits >> 23) - 127 : -118 - __clz(bits);
}

// Whether TwoParts keep the bound of float32 for each element: the smallest ones of each k tell.
template <class T, class Out> __device__ __forceinline__ void guard(const SplitWork& work, const Product<T, Out>& p) {
  const double depth = p.k;  // a b and what it is compared with must not be rounded to float32
#pragma unroll 1
  for (int k = blockIdx.x * blockDim.x + threadIdx.x; k < p.k; k += gridDim.x * blockDim.x) {
    const double a = __uint_as_float(work.of[0].smallest[k]), b = __uint_as_float(work.of[1].smallest[k]);
    const bool enough = a >= 0x1p-9 / depth && b >= 0x1p-9 / depth && a * b >= 0x1p-23 / depth;
    if (!enough) atomicOr(work.status, unsigned(INEXACT));
  }
}
