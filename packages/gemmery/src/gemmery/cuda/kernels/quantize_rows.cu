// Idea: a row of A becomes codes of 8 bits and one factor, its largest magnitude by the largest code. A TEAM of threads
// has the row, and keeps EACH pieces a thread in registers until the largest element is known: memory is read once. A
// longer row is read again, from L2.
// Parent: split_parts, which keeps rows of an operand so. Magnitudes are compared as integers, among which NaN is the
// largest, so that a row with one has the factor NaN.
#include "load.cuh"

template <class Out> struct Code;
template <> struct Code<e4m3> {
  static constexpr float TOP = 448;
  static __device__ __forceinline__ unsigned pair(float low, float high) {
    return ptx::cvt_rn_satfinite_e4m3x2_f32(low, high);
  }
};
template <> struct Code<i8> {
  static constexpr float TOP = 127;
  static __device__ __forceinline__ unsigned pair(float low, float high) {
    return (__float2int_rn(low) & 255) | (__float2int_rn(high) & 255) << 8;
  }
};

// The largest number of a team: a warp, or a block of so many threads.
template <int TEAM> __device__ __forceinline__ unsigned largest_of_team(unsigned x) {
  x = __reduce_max_sync(~0u, x);
  if constexpr (TEAM > 32) {
    __shared__ unsigned of_warp[TEAM / 32];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = __reduce_max_sync(~0u, of_warp[threadIdx.x % (TEAM / 32)]);
  }
  return x;
}

template <class T, class Out, int EPILOGUE, int VEC, int TEAM, int EACH>
__global__ void __launch_bounds__(TEAM > 128 ? TEAM : 128) quantize_rows(const Product<T, Out> p) {
  constexpr int STEP = TEAM * VEC;
  using Piece = Chunk<T, VEC>;
  long long row = blockIdx.x * (long long)(blockDim.x / TEAM) + threadIdx.x / TEAM;
  if (row >= p.m) return;  // a whole warp: a team that is a block has a row
  const T* from = p.a + row * p.a_row;
  Out* to = p.c + row * p.c_row;
  int first = threadIdx.x % TEAM * VEC;
  unsigned largest = 0;
  auto look = [&](const Piece& piece) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) largest = max(largest, __float_as_uint(widen<float>(piece.of[v])) & 0x7fffffff);
  };
  Piece kept[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    if (first + e * STEP < p.k) kept[e] = *reinterpret_cast<const Piece*>(from + first + e * STEP);
  }
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    if (first + e * STEP < p.k) look(kept[e]);
  }
  for (int k = first + EACH * STEP; k < p.k; k += STEP) look(*reinterpret_cast<const Piece*>(from + k));
  float scale = __fdiv_rn(__uint_as_float(largest_of_team<TEAM>(largest)), Code<Out>::TOP);
  scale = scale < 0x1p-126f ? 0x1p-126f : scale;  // its inverse is finite; NaN stays
  float inverse = __fdiv_rn(1, scale);
  if (first == 0) static_cast<float*>(p.workspace)[row] = scale;
  auto write = [&](const Piece& piece, Out* codes) {
    if constexpr (VEC == 1) {
      *reinterpret_cast<unsigned char*>(codes) = Code<Out>::pair(widen<float>(piece.of[0]) * inverse, 0);
    } else {
      Chunk<unsigned short, VEC / 2> pairs;
#pragma unroll
      for (int v = 0; v < VEC / 2; ++v) {
        pairs.of[v] =
            Code<Out>::pair(widen<float>(piece.of[2 * v]) * inverse, widen<float>(piece.of[2 * v + 1]) * inverse);
      }
      *reinterpret_cast<Chunk<unsigned short, VEC / 2>*>(codes) = pairs;
    }
  };
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    if (first + e * STEP < p.k) write(kept[e], to + first + e * STEP);
  }
  for (int k = first + EACH * STEP; k < p.k; k += STEP) write(*reinterpret_cast<const Piece*>(from + k), to + k);
}
