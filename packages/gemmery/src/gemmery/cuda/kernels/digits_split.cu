// Idea: the digits of an operand are made once, before the product, with k adjacent. Adding 128 to each byte but the
// last carries where a digit would be above 127; each byte is then its digit plus 128, and an XOR takes that away.
// It reads every element once and writes as many bytes: 128 MB in and 128 MB out for both operands of 4096^3 in int32.
#include "digits.cuh"
#include "load.cuh"

// Squares of DIGITS_TALL sides by DIGITS_DEEP of k, transposed in shared memory where sides are adjacent. Elements of k
// lie 9 apart for every 8, so that the 16 threads of a side read different banks.
constexpr int DIGITS_ROW = DIGITS_DEEP / 8 * 9 + 1;

template <int COUNT, class W, class T>
__device__ __forceinline__ void split_square(const Digits<T>& x, long long side, int k, W (*tile)[DIGITS_ROW]) {
  constexpr int EACH = DIGITS_TALL * DIGITS_DEEP / DIGITS_THREADS;
  const bool by_k = x.by_k();
  W v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int index = threadIdx.x + i * DIGITS_THREADS;
    const int s = by_k ? index / DIGITS_DEEP : index % DIGITS_TALL;
    const int kk = by_k ? index % DIGITS_DEEP : index / DIGITS_TALL;
    v[i] = side + s < x.count() && k + kk < x.depth ? widen<W>(x.row(side + s)[(k + kk) * x.k_step]) : W(0);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int index = threadIdx.x + i * DIGITS_THREADS;
    const int s = by_k ? index / DIGITS_DEEP : index % DIGITS_TALL;
    const int kk = by_k ? index % DIGITS_DEEP : index / DIGITS_TALL;
    tile[s][kk + kk / 8] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < DIGITS_TALL * DIGITS_DEEP / 8 / DIGITS_THREADS; ++i) {
    const int index = threadIdx.x + i * DIGITS_THREADS;
    const int s = index / (DIGITS_DEEP / 8), eight = index % (DIGITS_DEEP / 8);
    if (side + s >= x.count()) continue;
    constexpr W HALVES = W(0x8080808080808080) & ((W(1) << (8 * COUNT - 8)) - 1);  // of all digits but the last
    W digits[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) digits[e] = (tile[s][eight * 9 + e] + HALVES) ^ HALVES;
    signed char* to = x.to + (side + s) * x.pitch() + k + eight * 8;
#pragma unroll
    for (int digit = 0; digit < COUNT; ++digit) {
      Chunk<u32, 2> bytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 r[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) r[e] = u32(digits[4 * half + e] >> 8 * digit);
        bytes.of[half] = __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
      }
      *reinterpret_cast<Chunk<u32, 2>*>(to + digit * x.count() * x.pitch()) = bytes;
    }
  }
  __syncthreads();
}

template <class T, class Out, int OF_A, int OF_B>
__global__ void __launch_bounds__(DIGITS_THREADS, sizeof(Out) < 8 ? 2 : 1) digits_split(const TmaProduct<T, Out> p) {
  using W = typename Select<(sizeof(Out) < 8), u32, u64>::type;
  __shared__ W tile[DIGITS_TALL][DIGITS_ROW];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const Digits<T> a = digits_of<OF_A>(p.product, false), b = digits_of<OF_A>(p.product, true);
  const unsigned across = (p.product.k + DIGITS_DEEP - 1) / DIGITS_DEEP;
  const unsigned of_a = unsigned((a.count() + DIGITS_TALL - 1) / DIGITS_TALL) * across;
  const unsigned both = of_a + unsigned((b.count() + DIGITS_TALL - 1) / DIGITS_TALL) * across;
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < both; index += gridDim.x) {
    if (index < of_a) {
      split_square<OF_A>(a, index / across * 1LL * DIGITS_TALL, int(index % across) * DIGITS_DEEP, tile);
    } else {
      const unsigned i = index - of_a;
      split_square<OF_B>(b, i / across * 1LL * DIGITS_TALL, int(i % across) * DIGITS_DEEP, tile);
    }
  }
}
