// Sums of a warpgroup to C by way of shared memory: each warp stages its own 16 rows, a piece of columns at a time, and
// copies the piece out, so that no two warps wait for each other.
#pragma once
#include "wgmma.cuh"

// Pieces of the sums of a warp. A thread has EACH registers of a piece: two elements of 16 bits in each, or one of 32.
// Rows of C that follow those of a tile may be another group's where the product is GROUPED.
template <class Tiles, class Output, bool HAS_GROUPS = false> struct Pieces {
  static constexpr bool GROUPED = HAS_GROUPS;
  using Out = Output;
  static constexpr int SUMS = Tiles::BLOCKS * Tiles::WN / 2;  // registers of a thread, as those below
  // Whether the finished tile stays in registers, packed, beside the sums of the next one.
  static constexpr bool PACKED = sizeof(Out) == 2, OVERLAPPED = PACKED && SUMS <= MOST_OVERLAPPED;
  static constexpr int COLUMNS = Tiles::Consumers::COLUMNS;
  static constexpr int ACROSS = (Tiles::OWN + COLUMNS - 1) / COLUMNS;
  static constexpr int COUNT = Tiles::BLOCKS * ACROSS, EACH = COLUMNS / (PACKED ? 4 : 2);
  // Bytes of a row of C in a piece, of the piece, and the warp's buffers. SWAPPED, its columns of sums are rows of C.
  static constexpr bool SWAPPED = Tiles::SWAPPED;
  static constexpr int ROW = (SWAPPED ? 16 : COLUMNS) * int(sizeof(Out));
  static constexpr int BUFFER = 16 * COLUMNS * int(sizeof(Out)), BUFFERS = Tiles::Consumers::BUFFERS;
  static constexpr int STAGING = Tiles::WARPGROUPS * 4 * BUFFERS * BUFFER, BYTES = STAGING + BIAS_BYTES;
  using Part = typename Select<PACKED, unsigned, Out>::type;
  static_assert(Tiles::OWN % COLUMNS == 0 || OVERLAPPED, "pieces that overlap are all finished before one is stored");
  static_assert(PACKED || !SWAPPED, "stmatrix transposes elements of 16 bits");

  // Pieces, the last ones, that stay while the next tile is multiplied: as many as fit beside its sums. Of a late tile,
  // from the second step on, no more fit than BESIDE_A, as a part of A is in registers, too.
  static constexpr int ROOM = PACKED ? 208 : 192, FITTING = SUMS < 192 ? (ROOM - SUMS) / EACH : 0;
  static constexpr int BESIDE_A = Tiles::WARPGROUPS == 3 ? 5 : 6, OF_APART = Tiles::WARPGROUPS == 3 ? 5 : 7;
  static constexpr bool ALL_FIT = OVERLAPPED && !(SWAPPED && SUMS == 144);  // else NVRTC 13.0 spills some for a bias
  static constexpr int MOST = !ALL_FIT ? FITTING : Tiles::APART ? OF_APART : COUNT;
  static constexpr int STAYING = MOST < COUNT ? MOST : COUNT;
  static constexpr int LEAVING = COUNT - STAYING;
  static constexpr int KEPT = STAYING > 1 ? STAYING : 1;
  // Steps that a tile has at least: one piece is stored in each; where tiles may be short, more of them in two steps.
  static constexpr int STEPS = Tiles::RAGGED && KEPT > 2 ? 2 : KEPT, IN_STEP = (KEPT + STEPS - 1) / STEPS;

  // Where a piece begins in the warp's sums. The last one of a row of them ends with it, over a part of the one before.
  static constexpr __device__ int row(int piece) { return piece / ACROSS * 64; }
  static constexpr __device__ bool ends_row(int piece) { return piece % ACROSS == ACROSS - 1; }
  static constexpr __device__ int column(int piece) {
    return piece % ACROSS * COLUMNS < Tiles::OWN - COLUMNS ? piece % ACROSS * COLUMNS : Tiles::OWN - COLUMNS;
  }
};

__device__ __forceinline__ unsigned pair(float low, float high, f16) { return ptx::cvt_rn_f16x2_f32(low, high); }
__device__ __forceinline__ unsigned pair(float low, float high, bf16) { return ptx::cvt_rn_bf16x2_f32(low, high); }

template <class Out> struct IsWhole { static constexpr bool value = false; };
template <> struct IsWhole<int> { static constexpr bool value = true; };

// The first row of a warp's part of a tile, and the first column; or of a piece of it. Of a part that is NARROWER the
// column is one more: there is no register for a mark. Pieces in front of column `own` are another tile's.
struct Where { int batch, row, column, own = 0; };

// Behind the last row of C that a tile of this matrix or group may have.
template <bool GROUPED, class T, class Out>
__device__ __forceinline__ int end_of(const TmaProduct<T, Out>& p, int group) {
  if (GROUPED && p.offsets) return min(p.offsets[group], p.product.m);
  return p.product.m;
}

// gelu and silu by the approximations of the special function unit, within 16 u of the argument's size: a tile has
// 32,768 arguments, and each instruction takes 0.3 % of n = 4096. log2(erfc(sqrt(2) x)) is x times a polynomial, fitted
// on 0 to 2.75 for a small error of gelu: 9 u of its argument and, down to -3, 1e-4 of itself; then it falls.
template <class Out> __device__ __forceinline__ float log2_erfc(float x, Out) {
  float y = __fmaf_rn(-0.0164989363f, x, 0.117959663f);
  y = __fmaf_rn(y, x, -0.420154184f);
  y = __fmaf_rn(y, x, -1.83712304f);
  return x * __fmaf_rn(y, x, -2.30217338f);
}
// For results of bf16, a polynomial in 4 instructions in place of 5: within 2^-11 of gelu, 1/8 of a rounding, and
// 4 u of its argument, with 1/8 of that left. It falls, too, and is minus infinity at infinity.
__device__ __forceinline__ float log2_erfc(float x, bf16) {
  float y = __fmaf_rn(-0.12814965f, x, 1.16382618f), z = __fmaf_rn(y, x, 5.81638208f);
  return __fmaf_rn(y, __fmaf_rn(z, z, 106.987606f), -163.888114f);
}
// From half of the argument, gelu is x / 2 + |x| / 2 erf: infinity stays what it is, and no sign is asked for.
template <class Out> __device__ __forceinline__ float gelu_of_half(float x) {
  const float size = fabsf(x);
  return __fmaf_rn(size, 1.0f - ptx::ex2_approx_ftz(log2_erfc(size, Out{})), x);
}
__device__ __forceinline__ float sigmoid(float x) {
  return ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(x * -1.44269504f));
}
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// The operations of functions whose results all have 16 bits, and of activations, by these approximations.
template <class Out> struct Approximate : Precise {
  static __device__ __forceinline__ float gelu(float x) { return gelu_of_half<Out>(0.5f * x); }
  static __device__ __forceinline__ float sigmoid(float x) { return ::sigmoid(x); }
  static __device__ __forceinline__ float silu(float x) { return ::silu(x); }
  static __device__ __forceinline__ float relu(float x) { return ptx::max_nan(x, 0); }
};

// Where a thread's pair `i` of a piece is.
template <class T, class Out> __device__ __forceinline__ Spot spot_of(const TmaProduct<T, Out>& p, Where at, int i) {
  const int row = at.row + threadIdx.x % 32 / 4, column = at.column + threadIdx.x % 4 * 2;
  return {row + i % 2 * 8, column + i / 2 * 8, p.product.m, p.product.n};
}

// Operands of a function that are CARRIED come by tensor copies to stages of the ring behind those of k: a matrix in
// boxes of 64 columns by the rows of the tile, a row in boxes of one. None is in two stages.
template <class Tiles> constexpr __device__ int bytes_of_box(int which) {
  return Function::is_row(which) ? 1024 : Tiles::BM * 128;
}
template <class Tiles> constexpr int BOXES_ACROSS = (Tiles::WIDE + 63) / 64;
template <class Tiles> constexpr __device__ int place_of_box(int which, int box) {
  int at = 0;
  for (int i = 0; i <= which; ++i) {
    for (int j = 0; j < BOXES_ACROSS<Tiles>; ++j) {
      if (at % Tiles::STAGE + bytes_of_box<Tiles>(i) > Tiles::STAGE) at += Tiles::STAGE - at % Tiles::STAGE;
      if (i == which && j == box) return at;
      at += bytes_of_box<Tiles>(i);
    }
  }
  return at;
}
template <class Tiles> constexpr __device__ int stages_of_operands(int count) {
  return count == 0 ? 0 : place_of_box<Tiles>(count - 1, BOXES_ACROSS<Tiles> - 1) / Tiles::STAGE + 1;
}
// As many as the ring has room for at a time; threads load the others.
template <class Tiles> constexpr __device__ int operands_carried() {
  int count = Tiles::SWAPPED || Tiles::APART || Tiles::OWN % 16 ? 0 : int(Function::CARRIED);
  while (stages_of_operands<Tiles>(count) > Tiles::STAGES) --count;
  return count;
}
template <int EPILOGUE, class Tiles> constexpr int CARRIED = EPILOGUE & TRACED ? operands_carried<Tiles>() : 0;

// The last piece whose operands are in a stage.
template <class P, class Tiles> constexpr __device__ int last_piece(int stage, int count) {
  int last = 0;
  for (int i = 0; i < P::COUNT * count; ++i) {
    const int first = P::column(i / count) / 64, end = (P::column(i / count) + P::COLUMNS - 1) / 64;
    for (int box = first; box <= end; ++box) {
      if (place_of_box<Tiles>(i % count, box) / Tiles::STAGE == stage) last = i / count;
    }
  }
  return last;
}

// Those of a piece, as `pack` has its sums: pairs of 8 columns, of the one row and the other. `stages` of the ring have
// them, and `row` is that of the warp in the tile.
template <class P, class Tiles, int COUNT, int PAIRS>
__device__ __forceinline__ void load_carried(unsigned (&held)[COUNT][PAIRS], unsigned ring, const int* stages,
                                             int row, int piece) {
  const int lane = threadIdx.x % 32, own = Tiles::BM == 8 ? lane % 8 : row + P::row(piece) + lane % 16;
  const unsigned of_matrix = own * 128 + ((lane / 16 ^ own % 8) << 4), of_row = lane / 8 % 2 << 4;
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
#pragma unroll
    for (int i = 0; i < PAIRS / 4; ++i) {
      const int column = P::column(piece) + 16 * i, place = place_of_box<Tiles>(j, column / 64);
      const unsigned from = ring + stages[place / Tiles::STAGE] * Tiles::STAGE + place % Tiles::STAGE;
      unsigned(&four)[4] = reinterpret_cast<unsigned(&)[4]>(held[j][4 * i]);
      if (Function::is_row(j)) {
        ptx::ldmatrix_x2(four[0], four[2], from + (of_row ^ column % 64 * 2));
        four[1] = four[0];
        four[3] = four[2];
      } else {
        ptx::ldmatrix_x4(four, from + (of_matrix ^ column % 64 * 2));
      }
    }
  }
}

// The function of a piece's sums, of which `second` are those with the second B, and of operands that are `held`.
// `second` then has the output that goes to memory as the first one does, if there is one.
template <int HOLDS, int COUNT, class T, class Out>
__device__ __forceinline__ void apply_function(float (&v)[COUNT], float (&second)[COUNT],
                                               const TmaProduct<T, Out>& p, Where at,
                                               const unsigned (*held)[COUNT / 2]) {
  using Math = typename Select<Function::SHORT, Approximate<Out>, Precise>::type;
  constexpr int OPERANDS = HOLDS > 0 ? HOLDS : 1;
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    float pair[2] = {v[i], v[i + 1]}, other[2] = {second[i], second[i + 1]};
    unsigned own[OPERANDS];
#pragma unroll
    for (int j = 0; j < OPERANDS; ++j) own[j] = HOLDS > 0 ? held[j][i / 2] : 0;
    float more[2];
    Function::apply<Math, HOLDS>(pair, other, operands_of(p), spot_of(p, at, i / 2), own, more);
    v[i] = pair[0];
    v[i + 1] = pair[1];
    if constexpr (Function::STAGED) {
      second[i] = more[0];
      second[i + 1] = more[1];
    }
  }
}

// v[4 e + 2 h + x] is of column 8 e + 2 (l % 4) + x and row l / 4 + 8 h, in lane l: a thread has two of eight columns.
// Loads what a vector has for a thread's columns of those from `column` on; beyond the last one, what that one has.
template <int COUNT>
__device__ __forceinline__ void load_columns(float (&x)[COUNT], const float* from, long long step, int column,
                                             int columns) {
  const int own = column + threadIdx.x % 4 * 2;
  if (step == 1 && column + COUNT * 4 <= columns && reinterpret_cast<unsigned long long>(from) % 8 == 0) {
    auto pairs = reinterpret_cast<const Chunk<float, 2>*>(from + own);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = pairs[i / 2 * 4].of[i % 2];
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = from[min(own + i / 2 * 8 + i % 2, columns - 1) * step];
  }
}

// Multiplies the sums of a piece by factors; one of all of A and one of all of B are one.
template <bool GROUPED, int COUNT, class T, class Out>
__device__ __forceinline__ void apply_factors(float (&v)[COUNT], const TmaProduct<T, Out>& p, Where at) {
  const int row = at.row + threadIdx.x % 32 / 4, last = end_of<GROUPED>(p, at.batch) - 1;
  const float* b = p.b_scale + (GROUPED && p.offsets ? at.batch * p.b_scale_k : 0);
  if (has_one_factor(p)) {
    const float both = *p.a_scale * *b;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] *= both;
    return;
  }
  if (p.a_scale) {
    float x[2] = {p.a_scale[min(row, last) * p.a_scale_row], p.a_scale[min(row + 8, last) * p.a_scale_row]};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] *= x[i / 2 % 2];
  }
  if (p.b_scale) {
    float x[COUNT / 2];
    load_columns(x, b, p.b_scale_col, at.column, p.product.n);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i] *= x[i / 4 * 2 + i % 2];
  }
}

// Whether a factor of all of A and one of all of B are one.
template <class P> __device__ __forceinline__ bool has_one_factor(const P& p) {
  return p.a_scale && p.a_scale_row == 0 && p.b_scale && p.b_scale_col == 0;
}

// The factors of a thread's rows of A in a tile, two of each block of 64; one of everything is among those of B.
template <bool GROUPED, int BLOCKS, class T, class Out>
__device__ __forceinline__ void load_row_factors(float (&x)[BLOCKS][2], const TmaProduct<T, Out>& p, Where at) {
  const int row = at.row + threadIdx.x % 32 / 4, last = end_of<GROUPED>(p, at.batch) - 1;
  const bool each = p.a_scale && !has_one_factor(p);
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; ++i) {
    x[i / 2][i % 2] = each ? p.a_scale[min(row + i / 2 * 64 + i % 2 * 8, last) * p.a_scale_row] : 1.0f;
  }
}

// alpha, and beta C, which is only read where beta is not 0.
template <bool GROUPED, int COUNT, class T, class Out>
__device__ __forceinline__ void apply_scalars(float (&v)[COUNT], const TmaProduct<T, Out>& p, Where at) {
  const Product<T, Out>& q = p.product;
  const int row = at.row + threadIdx.x % 32 / 4, column = at.column + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) v[i] *= q.alpha;
  if (q.beta == 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half < end_of<GROUPED>(p, at.batch)) {
      const Out* c = q.c_at(at.batch, row + 8 * half, column);
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        int j = i / 2 * 8 + i % 2, place = i / 2 * 4 + 2 * half + i % 2;
        if (column + j < q.n) v[place] = multiply_add(q.beta, widen<float>(c[j * q.c_col]), v[place]);
      }
    }
  }
}

// Whether there is a bias of columns and not of rows; groups have one for their columns each.
template <bool GROUPED, class T, class Out>
__device__ __forceinline__ bool biases_columns(const TmaProduct<T, Out>& p) {
  return p.product.bias_col != 0 || (GROUPED && p.offsets);
}

template <bool GROUPED, class T, class Out>
__device__ __forceinline__ const float* bias_of(const TmaProduct<T, Out>& p, int batch) {
  const bool of_groups = GROUPED && p.offsets;
  return reinterpret_cast<const float*>(p.product.bias) + (of_groups ? batch * p.product.bias_row : 0);
}

// Whether half of the bias is in shared memory, and half of a sum is added to it: both are exact above 2^-125.
template <int EPILOGUE> constexpr bool HALVED = EPILOGUE == (BIAS | GELU);

// Where the bias of a column lies there: of 16 columns, the four of a thread, such as 2, 3, 10 and 11, lie together if
// it LOADs four of them at a time, and not two.
template <int LOAD> __device__ __forceinline__ int place_of_bias(int column) {
  return LOAD == 2 ? column : (column & ~15) + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}
// That of a thread's sum `i` of a piece, where every NEARth of what it loads is its own.
template <int NEAR, int LOAD> __device__ __forceinline__ float near_bias(const Chunk<float, LOAD>* near, int i) {
  return LOAD == 2 ? near[i / 4 * NEAR].of[i % 2] : near[i / 8 * NEAR].of[(i / 4 % 2 * 2 + i % 2) % LOAD];
}

// Each thread halves what it has copied there.
template <int LOAD> __device__ __forceinline__ void halve_bias(float* bias, int columns) {
  for (int i = threadIdx.x % 128; i < columns; i += 128) bias[place_of_bias<LOAD>(i)] *= 0.5f;
}

// A warpgroup copies the bias of its columns of a tile to shared memory while the tile is multiplied: at its end, loads
// from there wait for nothing, and are the same for every alignment, step and edge. Zeros if the bias is of rows.
template <class P, int COLUMNS, int LOAD, class T, class Out>
__device__ __forceinline__ void bring_bias(unsigned to, const TmaProduct<T, Out>& p, Where at) {
  const bool of_columns = biases_columns<P::GROUPED>(p);
  const float* from = bias_of<P::GROUPED>(p, at.batch);
  for (int i = threadIdx.x % 128; i < COLUMNS; i += 128) {
    const int column = min(at.column + i, p.product.n - 1);
    ptx::cp_async<4>(to + place_of_bias<LOAD>(i) * 4, from + column * p.product.bias_col, of_columns);
  }
  ptx::cp_async_commit_group();
}

// The same for the factors of its columns; 1 where B has none. Where all have one factor, each thread makes that of
// what it has copied.
template <class P, int COLUMNS, class T, class Out>
__device__ __forceinline__ void bring_factors(unsigned to, const TmaProduct<T, Out>& p, Where at) {
  const float* from = p.b_scale + (P::GROUPED && p.offsets ? at.batch * p.b_scale_k : 0);
  const int last = p.product.n - 1;
  for (int i = threadIdx.x % 128; i < COLUMNS; i += 128) {
    if (p.b_scale) ptx::cp_async<4>(to + 4 * i, from + min(at.column + i, last) * p.b_scale_col, true);
  }
  ptx::cp_async_commit_group();
}
template <class T, class Out>
__device__ __forceinline__ void complete_factors(float* factors, int columns, const TmaProduct<T, Out>& p) {
  const bool one = has_one_factor(p);
  if (p.b_scale && !one) return;
  for (int i = threadIdx.x % 128; i < columns; i += 128) factors[i] = one ? *p.a_scale * factors[i] : 1.0f;
}

// Adds a bias of rows to the sums of a piece, or to half of those of a block.
template <int COUNT, class T, class Out>
__device__ __forceinline__ void add_row_bias(float (&v)[COUNT], const TmaProduct<T, Out>& p, Where at) {
  const Product<T, Out>& q = p.product;
  const int row = at.row + threadIdx.x % 32 / 4, last = q.m - 1;
  const float x[2] = {q.bias[min(row, last) * q.bias_row], q.bias[min(row + 8, last) * q.bias_row]};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) v[i] += x[i / 2 % 2];
}

template <bool GROUPED, int COUNT, class T, class Out>
__device__ __forceinline__ void add_bias(float (&v)[COUNT], const TmaProduct<T, Out>& p, Where at) {
  if (!biases_columns<GROUPED>(p)) return add_row_bias(v, p, at);
  float x[COUNT / 2];
  load_columns(x, bias_of<GROUPED>(p, at.batch), p.product.bias_col, at.column, p.product.n);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) v[i] += x[i / 4 * 2 + i % 2];
}

template <int EPILOGUE, class Out, int COUNT> __device__ __forceinline__ void activate_all(float (&v)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) v[i] = activate<EPILOGUE, Approximate<Out>>(v[i]);
}

// The steps of EPILOGUE on the sums of a piece. The usual ones have images of their own: to jump over the steps of
// other products costs the fetch of instructions.
template <int EPILOGUE, bool GROUPED, int COUNT, class T, class Out>
__device__ __forceinline__ void finish_piece(float (&v)[COUNT], const TmaProduct<T, Out>& p, Where at) {
  constexpr bool ASKS = EPILOGUE & ASKED;
  if constexpr (EPILOGUE & FACTORS) apply_factors<GROUPED>(v, p, at);
  if (ASKS ? p.product.alpha != 1 || p.product.beta != 0 : EPILOGUE & SCALED) apply_scalars<GROUPED>(v, p, at);
  if (ASKS ? p.product.bias != nullptr : EPILOGUE & BIAS) add_bias<GROUPED>(v, p, at);
  const int activation = ASKS ? p.activation : EPILOGUE & ACTIVATION;
  if (activation == RELU) {
    activate_all<RELU, Out>(v);
  } else if (activation == GELU) {
    activate_all<GELU, Out>(v);
  } else if (activation == SILU) {
    activate_all<SILU, Out>(v);
  }
}

// A piece of a warp's sums as it goes to C. The steps of EPILOGUE come before; integers that stay such are exact.
// `near` is a thread's part of the bias of the piece's columns, every NEARth LOAD from there on, unless that is 0; or
// of their factors, beside which `of_rows` are those of its rows. `held` are operands of a function.
template <int EPILOGUE, class P, int NEAR = 0, int LOAD = 4, int HOLDS = 0, class Tiles, class T, class Out>
__device__ __forceinline__ void pack(typename P::Part (&part)[P::EACH], const Warpgroup<Tiles>& from, int piece,
                                     const TmaProduct<T, Out>& p, Where at, const Chunk<float, LOAD>* near = nullptr,
                                     const float* of_rows = nullptr,
                                     const unsigned (*held)[P::COLUMNS / 4] = nullptr,
                                     typename P::Part* more = nullptr) {
  const typename Tiles::S* sums = from.sums[piece / P::ACROSS] + P::column(piece) / 2;
  if constexpr (IsWhole<Out>::value) {
#pragma unroll
    for (int i = 0; i < P::EACH; ++i) part[i] = sums[i];
  } else {
    float v[P::COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < P::COLUMNS / 2; ++i) v[i] = float(sums[i]);
    if (Tiles::NARROWER > 0 && P::ends_row(piece) && at.column % 2) {
#pragma unroll
      for (int i = 0; i < P::COLUMNS / 2; ++i) v[i] = float(sums[i - Tiles::NARROWER / 2]);
    }
    if constexpr (NEAR > 0 && HALVED<EPILOGUE>) {
#pragma unroll
      for (int i = 0; i < P::COLUMNS / 2; ++i) {
        v[i] = gelu_of_half<Out>(__fmaf_rn(0.5f, v[i], near_bias<NEAR>(near, i)));
      }
    } else if constexpr (NEAR > 0 && (EPILOGUE & FACTORS)) {
#pragma unroll
      for (int i = 0; i < P::COLUMNS / 2; ++i) v[i] = v[i] * of_rows[i / 2 % 2] * near_bias<NEAR>(near, i);
      finish_piece<EPILOGUE & ~FACTORS, P::GROUPED>(v, p, at);
    } else if constexpr (NEAR > 0) {
      static_assert(!(EPILOGUE & (FACTORS | SCALED)), "a bias is added after these");
#pragma unroll
      for (int i = 0; i < P::COLUMNS / 2; ++i) v[i] += near_bias<NEAR>(near, i);
      finish_piece<EPILOGUE & ~BIAS, P::GROUPED>(v, p, at);
    } else {
      finish_piece<EPILOGUE, P::GROUPED>(v, p, at);
    }
    if constexpr (EPILOGUE & TRACED) {
      float second[P::COLUMNS / 2];
#pragma unroll
      for (int i = 0; i < P::COLUMNS / 2; ++i) second[i] = float(sums[i + Tiles::WN / 2 - Tiles::OWN / 2]);
      apply_function<HOLDS>(v, second, p, at, held);
      if constexpr (Function::STAGED) {
#pragma unroll
        for (int i = 0; i < P::EACH; ++i) more[i] = pair(second[2 * i], second[2 * i + 1], Out{});
      }
    }
#pragma unroll
    for (int i = 0; i < P::EACH; ++i) {
      if constexpr (P::PACKED) part[i] = pair(v[2 * i], v[2 * i + 1], Out{}); else part[i] = v[i];
    }
  }
}

// A warp's buffers in shared memory, which take turns, also across tiles. Sums of 32 bits are stored while nothing is
// multiplied: where the ring leaves room, each warp has four.
template <class P> struct Staging {
  unsigned buffer, other;  // the next one; of two, the sum of their addresses, of more, the end of the last

  // `warp` counts the consumers' warps.
  __device__ __forceinline__ Staging(unsigned staging, int warp)
      : buffer(staging + warp * P::BUFFERS * P::BUFFER),
        other(P::BUFFERS == 2 ? 2 * buffer + P::BUFFER : buffer + P::BUFFERS * P::BUFFER) {}

  __device__ __forceinline__ void next() {
    if constexpr (P::BUFFERS == 2) {
      buffer = other - buffer;
    } else {
      buffer += P::BUFFER;
      if (buffer == other) buffer -= P::BUFFERS * P::BUFFER;
    }
  }

  // Chunks of 16 bytes of a row are XORed, as the map of C says: by row % 8 in rows of 128 bytes, by row / 2 % 4 in 64,
  // by row / 4 % 2 in 32.
  static __device__ __forceinline__ int key(int row) {
    return P::ROW == 128 ? row % 8 : P::ROW == 64 ? row / 2 % 4 : row / 4 % 2;
  }

  __device__ __forceinline__ void stage(const unsigned (&part)[P::EACH]) const {
    const int lane = threadIdx.x % 32;
    if constexpr (P::SWAPPED) {
      const int row = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
      const unsigned first = buffer + row * P::ROW + ((chunk ^ key(row)) << 4);
#pragma unroll
      for (int i = 0; i < P::EACH / 4; ++i) {
        ptx::stmatrix_x4_trans(first + i * 16 * P::ROW, part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]);
      }
      return;
    }
    const unsigned first = lane % 16 * P::ROW + ((lane / 16 ^ key(lane % 16)) << 4);
#pragma unroll
    for (int i = 0; i < P::EACH / 4; ++i) {
      ptx::stmatrix_x4(buffer + (first ^ 32 * i), part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]);
    }
  }

  // Of 32 bits: 4 lanes have 8 elements of a row, 32 bytes. Odd rows store other columns of the piece at a time than
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

  // Element by element, a column for each lane, for a C that no map describes, and rows in front of another group's.
  template <class T, class Out>
  __device__ __forceinline__ void copy_out(const TmaProduct<T, Out>& p, Where at, const char* shared,
                                           unsigned base) const {
    const int end = end_of<P::GROUPED>(p, at.batch);
    constexpr int SIZE = int(sizeof(Out));
#pragma unroll 1
    for (int column = threadIdx.x % 32; column < min(P::COLUMNS, p.product.n - at.column); column += 32) {
      const char* from = shared + (buffer - base);
      Out* c = p.product.c_at(at.batch, at.row, at.column + column);
#pragma unroll 1
      for (int row = 0; row < min(16, end - at.row); ++row) {
        int place = row * P::ROW + (column * SIZE ^ key(row) << 4);
        *c = *reinterpret_cast<const Out*>(from + place);
        c += p.product.c_row;
      }
    }
  }

  // `at` is the place of the warp's tile; `base` and `shared` are the start of shared memory. MORE: not to C, but to
  // the second output of a function.
  template <class Tiles, bool MORE = false, class T, class Out>
  __device__ __forceinline__ void store(const typename P::Part (&part)[P::EACH], int piece, const TmaProduct<T, Out>& p,
                                        Where at, const char* shared, unsigned base) {
    at.row += P::row(piece);
    at.column += P::column(piece);
    if (P::SWAPPED && at.column < at.own) return;
    if (Tiles::NARROWER > 0 && at.column % 2) at.column -= P::ends_row(piece) ? 1 + Tiles::NARROWER : 1;
    if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<P::BUFFERS - 1>();
    __syncwarp();
    if constexpr (P::PACKED) stage(part); else stage_wide(part);
    // Tiles of 192 rows, which have no registers for stores of their own, are for a C with a map; so are SWAPPED ones.
    const auto inside = [&] { return !P::GROUPED || at.row + 16 <= end_of<true>(p, at.batch); };
    if (Tiles::BM == 192 || P::SWAPPED || MORE || (p.mapped && inside())) {
      ptx::fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        const int x = P::SWAPPED ? at.row : at.column, y = P::SWAPPED ? at.column : at.row;
        const TensorMap* map = &p.c;
        if constexpr (MORE) map = &operands_of(p).more;
        ptx::cp_async_bulk_tensor_store(map, x, y, p.product.c_batch ? at.batch : 0, buffer);
        ptx::cp_async_bulk_commit_group();
      }
    } else {
      __syncwarp();
      copy_out(p, at, shared, base);
      if (P::GROUPED && threadIdx.x % 32 == 0) ptx::cp_async_bulk_commit_group();  // of none: each buffer has one
    }
    next();
  }
};

// All pieces of a warp's sums, one after the other; `at` is the place of the warp's tile.
template <int EPILOGUE, class P, class Tiles, class T, class Out>
__device__ __forceinline__ void store_pieces(Staging<P>& staging, const Warpgroup<Tiles>& from,
                                             const TmaProduct<T, Out>& p, Where at, const char* shared, unsigned base) {
#pragma unroll
  for (int piece = 0; piece < P::COUNT; ++piece) {
    typename P::Part part[P::EACH];
    pack<EPILOGUE, P>(part, from, piece, p, {at.batch, at.row + P::row(piece), at.column + P::column(piece)});
    staging.template store<Tiles>(part, piece, p, at, shared, base);
  }
}
