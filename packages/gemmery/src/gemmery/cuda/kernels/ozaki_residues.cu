// Idea: operands become residues once, before the product. A first launch finds how far each row of A and each column
// of B may be scaled: its norm must stay below the root of half the product of all moduli, so that no sum of products
// wraps around. A second one scales, rounds to integers of up to 60 bits, and writes their residues with k adjacent.
#include "load.cuh"
#include "ozaki.cuh"

constexpr int OZAKI_PHASES = OZAKI_THREADS / OZAKI_SIDES;

template <class T, class Out> __global__ void ozaki_begin(const TmaProduct<T, Out> p) {
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  *static_cast<unsigned*>(p.product.workspace) = 0;
}

// The t of a side, from the sum of its squares: 2^t times the norm is at most the root of `limit`. Squares must neither
// overflow nor be so small that they are lost.
__device__ __forceinline__ int exponent_for(double squares, bool any, double limit, unsigned* status) {
  if (!any) return 0;
  if (!(squares >= 0x1p-900 && squares <= 0x1p960)) {
    atomicOr(status, unsigned(OUTSIDE));
    return 0;
  }
  return (int(__double_as_longlong(limit / squares) >> 52) - 1023) >> 1;
}

struct SumsOfSides {
  double squares[OZAKI_PHASES][OZAKI_SIDES + 1];
  bool any[OZAKI_PHASES][OZAKI_SIDES];
};

// Of 16 sides at a time, by 16 threads each: those of a side read adjacent elements of k, or those of a k of all sides.
template <int COUNT>
__device__ __forceinline__ void scale_sides(const Integers& x, long long first, unsigned* status,
                                            SumsOfSides& shared) {
  const bool by_k = x.by_k();
  const int inner = threadIdx.x % 16, outer = threadIdx.x / 16;
  const int own = by_k ? outer : inner, phase = by_k ? inner : outer;
  double squares = 0;
  bool any = false;
  if (first + own < x.count()) {
    const double* from = x.row(first + own);
#pragma unroll 8
    for (int k = phase; k < x.depth; k += OZAKI_PHASES) {
      const double v = from[k * x.k_step];
      squares = __fma_rn(v, v, squares);
      any |= v != 0;
    }
  }
  shared.squares[phase][own] = squares;
  shared.any[phase][own] = any;
  __syncthreads();
  if (threadIdx.x < OZAKI_SIDES && first + threadIdx.x < x.count()) {
    double all = 0;
    any = false;
#pragma unroll
    for (int i = 0; i < OZAKI_PHASES; ++i) {
      all += shared.squares[i][threadIdx.x];
      any |= shared.any[i][threadIdx.x];
    }
    // Rounded sums and integers are off by far less than 2^-18, and the share of M that decides its multiple by 2^-18.
    constexpr double LIMIT = Remainders<COUNT>().half * (1 - 0x1p-16);
    x.exponents[first + threadIdx.x] = exponent_for(all, any, LIMIT, status);
  }
  __syncthreads();
}

template <class T, class Out, int COUNT, int BM, int BN>
__global__ void __launch_bounds__(OZAKI_THREADS, 4) ozaki_scales(const TmaProduct<T, Out> p) {
  __shared__ SumsOfSides shared;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const OzakiWork<COUNT, BM, BN> work(p.product);
  const long long a = (work.of[0].count() + OZAKI_SIDES - 1) / OZAKI_SIDES;
  const long long both = a + (work.of[1].count() + OZAKI_SIDES - 1) / OZAKI_SIDES;
#pragma unroll 1
  for (long long unit = blockIdx.x; unit < both; unit += gridDim.x) {
    const Integers x = unit < a ? work.of[0] : work.of[1];
    scale_sides<COUNT>(x, (unit < a ? unit : unit - a) * OZAKI_SIDES, work.status, shared);
  }
}

// The residue of an integer from its eight signed digits, in the low byte: the sum of digits times residues of 256^j is
// below 2^18. It is summed in the fraction of a float, so that reducing it takes four instructions for floats, which
// run at twice the rate of those for integers; the quotient is rounded to nearest, since no sum is half way.
template <int P> __device__ __forceinline__ unsigned residue(int low, int high, int of_low, int of_high) {
  constexpr float WHOLE = 0x1.8p23f, INVERSE = 1.0f / P;
  const int bits = __dp4a(low, of_low, __dp4a(high, of_high, 0x4b400000));  // of WHOLE
  if (P == 256) return bits;
  const float sum = __fadd_rn(__int_as_float(bits), -WHOLE);
  const float quotient = __fadd_rn(__fmaf_rn(sum, INVERSE, WHOLE), -WHOLE);
  return __float_as_uint(__fmaf_rn(quotient, -P, __int_as_float(bits)));
}

// Writes the residues of eight adjacent integers, and begins with modulus I.
template <int COUNT, int I = 0>
__device__ __forceinline__ void write_residues(const int (&low)[8], const int (&high)[8], signed char* to,
                                               long long apart) {
  if constexpr (I < COUNT) {
    constexpr Remainders<COUNT> OF;
    constexpr int LOW = OF.low[I], HIGH = OF.high[I], P = modulus(I);
    Chunk<unsigned, 2> eight;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned r[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) r[e] = residue<P>(low[4 * half + e], high[4 * half + e], LOW, HIGH);
      eight.of[half] = __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
    }
    *reinterpret_cast<Chunk<unsigned, 2>*>(to) = eight;
    write_residues<COUNT, I + 1>(low, high, to + apart, apart);
  }
}

// Squares of 32 sides by 128 of k, transposed in shared memory where sides are adjacent. Elements of k lie 9 apart for
// every 8, so that the 16 threads of a side read different banks.
constexpr int ROW_OF_TILE = OZAKI_DEEP / 8 * 9 + 1;

template <int COUNT>
__device__ __forceinline__ void convert_tile(const Integers& x, long long side, int k, double (*tile)[ROW_OF_TILE]) {
  const bool by_k = x.by_k();
  double v[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int s = by_k ? threadIdx.x / 128 + 2 * i : threadIdx.x % 32;
    const int kk = by_k ? threadIdx.x % 128 : threadIdx.x / 32 + 8 * i;
    v[i] = side + s < x.count() && k + kk < x.depth ? x.row(side + s)[(k + kk) * x.k_step] : 0;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int s = by_k ? threadIdx.x / 128 + 2 * i : threadIdx.x % 32;
    const int kk = by_k ? threadIdx.x % 128 : threadIdx.x / 32 + 8 * i;
    tile[s][kk + kk / 8] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int s = threadIdx.x / 16 + 16 * i, eight = threadIdx.x % 16;
    if (side + s >= x.count()) continue;
    const double scale = power_of_two_f64(x.exponents[side + s]);
    int low[8], high[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      constexpr long long HALVES = 0x0080808080808080;  // of digits 0 to 6, which makes them signed
      const long long digits = (__double2ll_rn(tile[s][eight * 9 + e] * scale) + HALVES) ^ HALVES;
      low[e] = int(digits);
      high[e] = int(digits >> 32);
    }
    const long long place = (side + s) * x.pitch() + k + eight * 8;
    write_residues<COUNT>(low, high, x.residues + place, x.count() * x.pitch());
  }
  __syncthreads();
}

template <class T, class Out, int COUNT, int BM, int BN>
__global__ void __launch_bounds__(OZAKI_THREADS, 4) ozaki_residues(const TmaProduct<T, Out> p) {
  __shared__ double tile[OZAKI_TALL][ROW_OF_TILE];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const OzakiWork<COUNT, BM, BN> work(p.product);
  if (*work.status) return;
  const unsigned across = (p.product.k + OZAKI_DEEP - 1) / OZAKI_DEEP;
  const unsigned a = unsigned((work.of[0].count() + OZAKI_TALL - 1) / OZAKI_TALL) * across;
  const unsigned both = a + unsigned((work.of[1].count() + OZAKI_TALL - 1) / OZAKI_TALL) * across;
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < both; index += gridDim.x) {
    const unsigned within = index < a ? index : index - a;
    const Integers x = index < a ? work.of[0] : work.of[1];
    convert_tile<COUNT>(x, within / across * 1LL * OZAKI_TALL, int(within % across) * OZAKI_DEEP, tile);
  }
}
