// Sums of a warpgroup to C by way of shared memory: each warp stages its own 16 rows, a piece of columns at a time, and
// copies the piece out, so that no two warps wait for each other.
#pragma once
#include "wgmma.cuh"

// Pieces of the sums of a warp. A thread has EACH registers of a piece: two elements of 16 bits in each, or one of 32.
// Rows of C that follow those of a tile may be another group's where the product is GROUPED.
template <class Tiles, class Output, bool HAS_GROUPS = false> struct Pieces {
  static constexpr bool GROUPED = HAS_GROUPS;
  using Out = Output;
  static constexpr bool PACKED = sizeof(Out) == 2;
  static constexpr int COLUMNS = PACKED && Tiles::BN % 64 == 0 ? 64 : 32, ACROSS = Tiles::BN / COLUMNS;
  static constexpr int COUNT = Tiles::BLOCKS * ACROSS, EACH = COLUMNS / (PACKED ? 4 : 2);
  static constexpr int ROW = COLUMNS * int(sizeof(Out)), BUFFER = 16 * ROW, BUFFERS = 2;  // bytes; buffers of a warp
  static constexpr int BYTES = Tiles::WARPGROUPS * 4 * BUFFERS * BUFFER;
  // The finished tile stays in registers, packed, beside the sums of the next one.
  static constexpr bool OVERLAPPED = PACKED && Tiles::BLOCKS * Tiles::BN <= 256;
  using Part = typename Select<PACKED, unsigned, Out>::type;
};

__device__ __forceinline__ unsigned pair(float low, float high, f16) { return ptx::cvt_rn_f16x2_f32(low, high); }
__device__ __forceinline__ unsigned pair(float low, float high, bf16) { return ptx::cvt_rn_bf16x2_f32(low, high); }

template <class Out> struct IsWhole { static constexpr bool value = false; };
template <> struct IsWhole<int> { static constexpr bool value = true; };

// What a thread knows of the piece that it finishes: lane l has, of 8 columns, 2 (l % 4) and the next of two rows.
struct Where { int batch, row, column; };  // the warp's first row, and the piece's first column

// Behind the last row of C that a tile of this matrix or group may have.
template <bool GROUPED, class T, class Out>
__device__ __forceinline__ int end_of(const TmaProduct<T, Out>& p, int group) {
  if (GROUPED && p.offsets) return min(p.offsets[group], p.product.m);
  return p.product.m;
}

// alpha, beta C, bias, factors and the activation, where there are any, on the sums of a piece: v[4 e + 2 h + x] is of
// row l / 4 + 8 h and column 8 e + 2 (l % 4) + x. Rows and columns beyond the edges repeat the last ones.
template <bool GROUPED, int COUNT, class T, class Out>
__device__ __forceinline__ void finish_piece(float (&v)[COUNT], const TmaProduct<T, Out>& p, Where at) {
  const Product<T, Out>& q = p.product;
  const int lane = threadIdx.x % 32, row = at.row + lane / 4, column = at.column + lane % 4 * 2;
  const int end = end_of<GROUPED>(p, at.batch);
  const bool of_group = GROUPED && p.offsets;  // then bias and factors of B are those of the group
  auto i_of = [&](int i) { return min(row + i / 2 % 2 * 8, end - 1); };
  auto j_of = [&](int i) { return min(column + i / 4 * 8 + i % 2, q.n - 1); };
  if (p.a_scale) {
    float factor[2] = {p.a_scale[i_of(0) * p.a_scale_row] * q.alpha, p.a_scale[i_of(2) * p.a_scale_row] * q.alpha};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] *= factor[i / 2 % 2];
  } else if (q.alpha != 1) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] *= q.alpha;
  }
  if (p.b_scale) {
#pragma unroll
    for (int e = 0; e < COUNT / 4; ++e) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        float factor = p.b_scale[(of_group ? at.batch : 0) * p.b_scale_k + j_of(4 * e + x) * p.b_scale_col];
        v[4 * e + x] *= factor;
        v[4 * e + 2 + x] *= factor;
      }
    }
  }
  if (q.beta != 0) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int r = row + i / 2 % 2 * 8, c = column + i / 4 * 8 + i % 2;  // others may have written the last ones already
      if (r < end && c < q.n) v[i] = multiply_add(q.beta, widen<float>(*q.c_at(at.batch, r, c)), v[i]);
    }
  }
  if (q.bias) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] += q.bias[(of_group ? at.batch : i_of(i)) * q.bias_row + j_of(i) * q.bias_col];
  }
  if (p.activation == RELU) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] = activate<RELU>(v[i]);
  } else if (p.activation == GELU) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] = activate<GELU>(v[i]);
  } else if (p.activation == SILU) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] = activate<SILU>(v[i]);
  }
}

// A piece of a warp's sums as it goes to C. With FUSED, finish_piece comes before; integers that stay such are exact.
template <bool FUSED, class P, class Tiles, class T, class Out>
__device__ __forceinline__ void pack(typename P::Part (&part)[P::EACH], const Warpgroup<Tiles>& from, int piece,
                                     const TmaProduct<T, Out>& p, Where at) {
  const typename Tiles::S* sums = from.sums[piece / P::ACROSS] + piece % P::ACROSS * (P::COLUMNS / 2);
  if constexpr (IsWhole<Out>::value) {
#pragma unroll
    for (int i = 0; i < P::EACH; ++i) part[i] = sums[i];
  } else {
    float v[P::COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < P::COLUMNS / 2; ++i) v[i] = float(sums[i]);
    if constexpr (FUSED) finish_piece<P::GROUPED>(v, p, at);
#pragma unroll
    for (int i = 0; i < P::EACH; ++i) {
      if constexpr (P::PACKED) part[i] = pair(v[2 * i], v[2 * i + 1], Out{}); else part[i] = v[i];
    }
  }
}

// A warp's buffers in shared memory, which take turns, also across tiles.
template <class P> struct Staging {
  unsigned buffer, both;  // the next one; the sum of the two addresses

  // `warp` counts the consumers' warps.
  __device__ __forceinline__ Staging(unsigned staging, int warp)
      : buffer(staging + warp * P::BUFFERS * P::BUFFER), both(2 * buffer + P::BUFFER) {
    static_assert(P::BUFFERS == 2, "they take turns");
  }

  // Chunks of 16 bytes of a row are XORed, as the map of C says: by row % 8 in rows of 128 bytes, by row / 2 % 4 in 64.
  static __device__ __forceinline__ int key(int row) { return P::ROW == 128 ? row % 8 : row / 2 % 4; }

  __device__ __forceinline__ void stage(const unsigned (&part)[P::EACH]) const {
    const int lane = threadIdx.x % 32;
    const unsigned first = lane % 16 * P::ROW + ((lane / 16 ^ key(lane % 16)) << 4);
#pragma unroll
    for (int i = 0; i < P::EACH / 4; ++i) {
      ptx::stmatrix_x4(buffer + (first ^ 32 * i), part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]);
    }
  }

  // Of 32 bits: 4 lanes have 8 elements of a row, 32 bytes. Odd rows store another quarter of the piece at a time than
  // even ones, so that the 4 rows that are served together lie in different banks.
  template <class X> __device__ __forceinline__ void stage_wide(const X (&part)[P::EACH]) const {
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 4;
    const unsigned row = buffer + lane / 4 * P::ROW, unit = (lane % 4 / 2 ^ lane / 4) << 4, byte = lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int even_at = 4 * i + 2 * half, odd_at = 4 * (i ^ 2) + 2 * half;
        unsigned to = row + half * 8 * P::ROW + ((odd ? i ^ 2 : i) * 32 ^ unit) + byte;
        ptx::st_shared_v2(to, odd ? part[odd_at] : part[even_at], odd ? part[odd_at + 1] : part[even_at + 1]);
      }
    }
  }

  // Element by element, for a C that no map describes, and rows in front of those of another group.
  template <class T, class Out>
  __device__ __forceinline__ void copy_out(const TmaProduct<T, Out>& p, Where at, const char* shared,
                                           unsigned base) const {
    const Out* from = reinterpret_cast<const Out*>(shared + (buffer - base));
    const int end = end_of<P::GROUPED>(p, at.batch);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 16 * P::COLUMNS; i += 32) {
      int row = i / P::COLUMNS, column = i % P::COLUMNS, each = 16 / int(sizeof(Out));
      int place = row * (P::ROW / int(sizeof(Out))) + (column / each ^ key(row)) * each + column % each;
      if (at.row + row < end && at.column + column < p.product.n) {
        *p.product.c_at(at.batch, at.row + row, at.column + column) = from[place];
      }
    }
  }

  // `at` is the place of the warp's tile; `base` and `shared` are the start of shared memory.
  template <class Tiles, class T, class Out>
  __device__ __forceinline__ void store(const typename P::Part (&part)[P::EACH], int piece, const TmaProduct<T, Out>& p,
                                        Where at, const char* shared, unsigned base) {
    at.row += piece / P::ACROSS * 64;
    at.column += piece % P::ACROSS * P::COLUMNS;
    if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<P::BUFFERS - 1>();
    __syncwarp();
    if constexpr (P::PACKED) stage(part); else stage_wide(part);
    if (p.mapped & 1 && (!P::GROUPED || at.row + 16 <= end_of<true>(p, at.batch))) {
      ptx::fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        ptx::cp_async_bulk_tensor_store(&p.c, at.column, at.row, p.product.c_batch ? at.batch : 0, buffer);
        ptx::cp_async_bulk_commit_group();
      }
    } else {
      __syncwarp();
      copy_out(p, at, shared, base);
      if (P::GROUPED && threadIdx.x % 32 == 0) ptx::cp_async_bulk_commit_group();  // of none: each buffer has one
    }
    buffer = both - buffer;
  }
};
