// Idea: blocks that have a row of C tell each other a number of it, such as its largest element, and then finish their
// sums, which have never left their registers. A warp publishes the number of each of its rows of a tile and waits for
// those of the row's other tiles. A word says both that a number has come and which: one way to L2 and back.
// Parent: wgmma_persistent, whose tiles have no need of each other. Else sums in f32 go to memory, and traced_rows
// reads them twice.
// No block waits for ever: all are resident, and take tiles in order. The tiles of a band are no more than the blocks,
// so each belongs to another block, whose tiles before are of bands before.
#include "staged.cuh"
#include "statistics.cuh"
#include "wgmma_persistent.cu"

template <class Base> struct Quick : Base {  // a thread takes the larger of two 128 times: by one instruction each
  static __device__ __forceinline__ float maximum(float x, float y) { return ptx::max_nan(x, y); }
};

// A word for each row and each tile of it, 0 until its number has come; and behind them, for the 16 rows of a warp, how
// many tiles have read theirs: the last one leaves zeros to the next launch.
struct Words {
  unsigned* words;
  unsigned* readers;
  int columns;  // tiles of a row

  __device__ __forceinline__ unsigned* at(int row, int tile) const { return words + row * columns + tile; }
  // NaN of all ones would be the 0 that says nothing.
  static __device__ __forceinline__ unsigned of(float x) { return ~(x == x ? __float_as_uint(x) : 0x7fc00000u); }
  static __device__ __forceinline__ float number(unsigned word) { return __uint_as_float(~word); }
};

// Of four lanes that have parts of a row, in their order; all get it.
template <int OPERATION, class Math> __device__ __forceinline__ Partial<float> of_four(Partial<float> mine) {
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    const Partial<float> other = {__shfl_xor_sync(~0u, mine.value, offset), 0.0f};
    const bool later = threadIdx.x & offset;
    mine = together<OPERATION, Math>(later ? other : mine, later ? mine : other);
  }
  return mine;
}

__device__ __forceinline__ unsigned two_bytes(const float (&v)[2], e4m3) {
  return ptx::cvt_rn_satfinite_e4m3x2_f32(v[0], v[1]);
}
__device__ __forceinline__ unsigned two_bytes(const float (&v)[2], e5m2) {
  return ptx::cvt_rn_satfinite_e5m2x2_f32(v[0], v[1]);
}
__device__ __forceinline__ unsigned two_bytes(const float (&v)[2], i8) {
  return static_cast<unsigned char>(narrow<i8>(v[0])) | static_cast<unsigned char>(narrow<i8>(v[1])) << 8;
}

// Four lanes have four times eight columns: each lane two of every eight, in 16 bits. It gets one eight whole.
__device__ __forceinline__ Chunk<unsigned, 2> own_eight(const unsigned (&two)[4]) {
  const unsigned low = two[0] | two[1] << 16, high = two[2] | two[3] << 16, lane = threadIdx.x % 4;
  const unsigned mine = lane < 2 ? low : high, other = __shfl_xor_sync(~0u, lane < 2 ? high : low, 2);
  const bool odd = lane % 2;  // then the second halves are those of its own eight
  const unsigned kept = __byte_perm(mine, other, odd ? 0x7632 : 0x5410);
  const unsigned got = __shfl_xor_sync(~0u, __byte_perm(mine, other, odd ? 0x5410 : 0x7632), 1);
  // Halves in the order of columns: of an even lane and the odd one, first those of this half of the lanes.
  const unsigned here = odd ? 0x1054 : 0x5410, there = odd ? 0x3276 : 0x7632;
  return {__byte_perm(kept, got, lane < 2 ? here : there), __byte_perm(kept, got, lane < 2 ? there : here)};
}

template <class Tiles, class T, class Out>
__device__ __forceinline__ void finish_tile(const Warpgroup<Tiles>& from, const TmaProduct<T, Out>& p, Tile tile,
                                            int warpgroup, const Words& words) {
  static_assert(Tiles::BLOCKS == 1 && Function::STATISTICS == 1, "a thread has two rows, and a number of each");
  using Math = Quick<typename Select<Function::SHORT, Approximate<Out>, Precise>::type>;
  constexpr int OPERATION = Function::operation(0);
  const auto& sums = from.sums[0];
  const int lane = threadIdx.x % 32, of_warp = tile.row + Tiles::row_of(warpgroup) + threadIdx.x % 128 / 32 * 16;
  const int row = of_warp + lane / 4, column = tile.col + lane % 4 * 2;
  auto spot = [&](int i) { return Spot{row + i / 2 % 2 * 8, column + i / 4 * 8, p.product.m, p.product.n}; };
  const Partial<float> none = partial_of_none<OPERATION, float>();
  Partial<float> of_row[2] = {none, none};
#pragma unroll
  for (int i = 0; i < Tiles::WN / 2; i += 2) {
    const float pair[2] = {sums[i], sums[i + 1]};
    float term[2][1];
    Function::terms<0, Math>(term, pair, pair, static_cast<const float*>(nullptr), operands_of(p), spot(i));
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      of_row[i / 2 % 2] = together<OPERATION, Math>(of_row[i / 2 % 2], partial_of<OPERATION>(term[x][0]));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float part = of_four<OPERATION, Math>(of_row[half]).value;
    if (lane % 4 == 0) ptx::st_relaxed(words.at(row + 8 * half, tile.col / Tiles::BN), Words::of(part));
    of_row[half] = none;
  }
  constexpr int AT_ONCE = 4;  // words of a row that a lane asks for: 16 tiles, 4096 columns
#pragma unroll 1
  for (int first = lane % 4; first < words.columns; first += 4 * AT_ONCE) {
    unsigned word[2][AT_ONCE];
    bool come;
    do {
      come = true;
#pragma unroll
      for (int i = 0; i < 2 * AT_ONCE; ++i) {
        const int other = min(first + i / 2 * 4, words.columns - 1);
        word[i % 2][i / 2] = ptx::ld_relaxed(words.at(row + i % 2 * 8, other));
        come &= word[i % 2][i / 2] != 0;
      }
    } while (!come);
#pragma unroll
    for (int i = 0; i < 2 * AT_ONCE; ++i) {
      const Partial<float> part = {Words::number(word[i % 2][i / 2]), 0.0f};
      if (first + i / 2 * 4 < words.columns) of_row[i % 2] = together<OPERATION, Math>(of_row[i % 2], part);
    }
  }
  __syncwarp();
  unsigned before = 0;
  if (lane == 0) before = ptx::atom_add_acq_rel(words.readers + of_warp / 16);
  float known[2][Function::OF_ROW];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float number = of_four<OPERATION, Math>(of_row[half]).value;
    const Spot at = spot(2 * half);
    Function::take_row<Math>(known[half], &number, operands_of(p), at, column == 0 && at.i < at.m);
  }
  constexpr bool BYTES = sizeof(Out) == 1;  // then a lane stores an eight of each four, else pairs
  Out* const c[2] = {p.product.c_at(0, row, tile.col + lane % 4 * (BYTES ? 8 : 2)),
                     p.product.c_at(0, row + 8, tile.col + lane % 4 * (BYTES ? 8 : 2))};
#pragma unroll
  for (int i = 0; i < Tiles::WN / 2; i += 16) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = row + 8 * half < p.product.m;
      unsigned codes[4];
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {
        const int x = i + 4 * eight + 2 * half;
        float pair[2] = {sums[x], sums[x + 1]};
        Function::apply<Math>(pair, pair, operands_of(p), spot(x), nullptr, static_cast<float*>(nullptr), known[half]);
        if constexpr (BYTES) {
          codes[eight] = two_bytes(pair, Out{});
        } else if (inside) {
          auto to = reinterpret_cast<Chunk<Out, 2>*>(c[half] + i * 2 + eight * 8);
          *to = {narrow<Out>(pair[0]), narrow<Out>(pair[1])};
        }
      }
      if constexpr (BYTES) {
        const Chunk<unsigned, 2> eight = own_eight(codes);
        if (inside) *reinterpret_cast<Chunk<unsigned, 2>*>(c[half] + i * 2) = eight;
      }
    }
  }
  if (__shfl_sync(~0u, before, 0) == words.columns - 1) {
#pragma unroll 1
    for (int i = lane; i < 16 * words.columns; i += 32) *words.at(of_warp, i) = 0;
    if (lane == 0) words.readers[of_warp / 16] = 0;
  }
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_rows(const __grid_constant__ Traced<TmaProduct<T, Out>> p) {
  extern __shared__ __align__(1024) char shared[];
  using Order = Bands<Tiles>;
  all_tiles<Tiles, Order>(p, shared, false, [&](const Consumer<Tiles>& consumer, const Order& order, int warpgroup) {
    unsigned* words = reinterpret_cast<unsigned*>(const_cast<int*>(p.offsets));
    const Words exchanged = {words, words + order.rows() * Tiles::BM * order.columns(), order.columns()};
    finish_tile<Tiles, T, Out>(consumer, p, order.tile, warpgroup, exchanged);
  });
}
