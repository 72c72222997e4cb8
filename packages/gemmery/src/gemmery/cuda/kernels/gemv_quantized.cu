// Idea: W is multiplied from the 8 or 4 bits in which it is stored, with a factor for each group of k. A warp reads 16
// bytes a lane of 16 rows of W; a few logical instructions turn them into exact integers in T, the left operand of
// mma.m16n8k16. Up to 8 rows of x are the right one, in the same order of k, so that they share each read of W. The sum
// of a group, in f32, is multiplied by the group's factor. Blocks stay for all their rows of W.
// Parent: gemv_vectorized, which reads 16 bits an element and multiplies on CUDA cores: of 4 bits, memory brings 35
// elements a cycle to a multiprocessor, more than those unpack, convert and multiply. BITS = 16 is a W of plain T.
// Measured on an H200, bf16, one row of x, W 14336 x 4096: 14.2 us with 4 bits and 19.0 us with 8, where PyTorch takes
// 30.9 us with 16 bits and 18.4 us with its kernel for 4. 4 rows take 5 % longer, 16 rows 15 to 40 %. Instructions set
// the time: 314 for 1 KB of 4-bit W took 17.9 us, 184 take 14.2 us.
#include "gemv.cuh"
#include "mma.cuh"

// How blocks share the product: BITS of an element of W, GROUP elements of a row with one factor, whether W and x are
// read 16 bytes at a time, 16 rows of W and 8 of x at a time, and pieces of each row of W that a warp has requested.
template <int BITS_, int GROUP_, bool WIDE_, int TILES_, int EIGHTS_, int STEPS_, int WARPS_, int BLOCKS_>
struct PackedTiles {
  static constexpr int BITS = BITS_, GROUP = GROUP_, TILES = TILES_, EIGHTS = EIGHTS_;
  static constexpr int STEPS = STEPS_, WARPS = WARPS_, BLOCKS = BLOCKS_;  // BLOCKS: of a multiprocessor
  static constexpr bool WIDE = WIDE_, PACKED = BITS < 16;
  static constexpr int EACH = 128 / BITS, DEEP = 4 * EACH;  // elements of a lane's piece, and of those of four lanes
  static constexpr int SUMS = TILES * EIGHTS * 128;  // of a warp
  static_assert(!PACKED || (WIDE && GROUP % DEEP == 0), "a step has one factor");
};

// 128 (bf16) and 1024 (f16), twice: the last bits of their fraction count ones. And -1, twice.
template <class T> struct Ones { static constexpr unsigned BASE = 0x43004300, MINUS = 0xbf80bf80; };
template <> struct Ones<f16> { static constexpr unsigned BASE = 0x64006400, MINUS = 0xbc00bc00; };

__device__ __forceinline__ unsigned multiply_add(bf16, unsigned x, unsigned y, unsigned sum) {
  return ptx::fma_rn_bf16x2(x, y, sum);
}
__device__ __forceinline__ unsigned multiply_add(f16, unsigned x, unsigned y, unsigned sum) {
  return ptx::fma_rn_f16x2(x, y, sum);
}

// Two elements of a word of W: the J-th and the one half a word later; of 16 bits, both. `twice` is 0x00010001.
template <class T, int BITS> __device__ __forceinline__ unsigned pair_of_w(unsigned word, int j, unsigned twice) {
  constexpr unsigned BASE = Ones<T>::BASE, MINUS = Ones<T>::MINUS;
  if constexpr (BITS == 16) return word;
  word >>= j * BITS;
  if constexpr (BITS == 8) {  // seven bits, less 128 where the sign is set
    return multiply_add(T(), (word & 0x80 * twice) | BASE, MINUS, (word & 0x7f * twice) | BASE);
  } else {  // stored plus 8
    return multiply_add(T(), BASE | 0x00080008, MINUS, (word & 0xf * twice) | BASE);
  }
}

// The elements of x at the same k, among the 16 / BITS words of the whole word of W.
template <int BITS> __device__ __forceinline__ unsigned pair_of_x(const unsigned* x, int j) {
  if constexpr (BITS == 16) return *x;
  return __byte_perm(x[j / 2], x[j / 2 + 8 / BITS], j % 2 ? 0x7632 : 0x5410);
}

// 8 elements from the k-th on, zeros beyond the end, unless none are there.
template <bool WIDE, bool INSIDE, class T>
__device__ __forceinline__ void eight(unsigned (&words)[4], const T* from, long long step, int k, int end) {
  if constexpr (WIDE) {
    Chunk<unsigned, 4> piece = {};
    if (INSIDE || k < end) piece = *reinterpret_cast<const Chunk<unsigned, 4>*>(from + k);
    memcpy(words, &piece, sizeof words);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned low = k + 2 * i < end ? from[(k + 2 * i) * step].bits : 0;
      words[i] = low | (k + 2 * i + 1 < end ? unsigned(from[(k + 2 * i + 1) * step].bits) << 16 : 0);
    }
  }
}

// Rows of a matrix: a lane has row l / 4 of each eight; beyond the last row it has an earlier one, whose products are
// not stored.
template <int EIGHTS> struct LaneRows {
  int first;
  bool follow[EIGHTS];

  __device__ __forceinline__ LaneRows(int of_warp, int rows) {
    int row = of_warp + int(threadIdx.x) % 32 / 4;
    first = min(row, rows - 1);
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) follow[e] = row + 8 * e < rows;
  }
  __device__ __forceinline__ long long distance(int e, long long step) const { return follow[e] ? 8 * e * step : 0; }
};

// What a lane reads of W. Its pieces come through a ring of STEPS slots in shared memory, which no other lane touches:
// those of every WARPS-th step of each of the block's tiles, every gridDim.x-th of all, without a stop between tiles.
template <class T, class Out, class Launch, class Tiles> struct PackedRows {
  static constexpr int ROWS = 2 * Tiles::TILES, SLOT = ROWS * 32 * 16, RING = Tiles::STEPS * SLOT;  // bytes of a warp
  static constexpr int STEP = 32;  // of a row, in units of T: 64 bytes
  const Product<T, Out>& p;
  const T* ahead;  // the piece to request next
  long long distance[ROWS];
  unsigned ring, slot = 0;
  int steps, across, tiles, tile, step;

  __device__ __forceinline__ PackedRows(const Product<T, Out>& p, const void* shared)
      : p(p), steps((p.k + Tiles::DEEP - 1) / Tiles::DEEP), tile(blockIdx.x) {
    across = (p.n + 8 * ROWS - 1) / (8 * ROWS);
    tiles = Launch::BATCHED ? across * p.batch : across;
    ring = ptx::shared_address(shared) + threadIdx.x / 32 * RING + threadIdx.x % 32 * 16;
    enter();
  }
  __device__ __forceinline__ int batch(int tile) const { return Launch::BATCHED ? tile / across : 0; }
  __device__ __forceinline__ int first(int tile) const { return (Launch::BATCHED ? tile % across : tile) * 8 * ROWS; }

  // Begins to request the pieces of a tile.
  __device__ __forceinline__ void enter() {
    LaneRows<ROWS> rows(first(tile), p.n);
    long long row = Tiles::PACKED ? p.k / 16 * Tiles::BITS : p.b_col;
    step = threadIdx.x / 32;
    ahead = p.b_at(batch(tile), 0, 0) + rows.first * row + (Tiles::WIDE ? step * STEP + threadIdx.x % 4 * 8 : 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) distance[i] = rows.distance(i, row);
  }

  // Requests the pieces of the next step in place of those read last.
  __device__ __forceinline__ void request() {
    if constexpr (Tiles::WIDE) {
      unsigned to = ring + (slot ? slot : RING) - SLOT;
      bool inside = tile < tiles && (Tiles::PACKED ? step < steps : k_of(step) < p.k);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) ptx::cp_async<16>(to + i * 512, ahead + distance[i], inside);
      ptx::cp_async_commit_group();
      ahead += Tiles::WARPS * STEP;
    }
    step += Tiles::WARPS;
    if (step >= steps) {
      tile += gridDim.x;
      enter();
    }
  }
  static __device__ __forceinline__ int k_of(int step) { return step * Tiles::DEEP + threadIdx.x % 4 * Tiles::EACH; }

  // Reads the pieces of a step, of which the last STEPS - 1 requested need not have come.
  __device__ __forceinline__ void read(unsigned (&words)[ROWS][4]) {
    ptx::cp_async_wait_group<Tiles::STEPS - 1>();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) ptx::ld_shared_v4(words[i], ring + slot + i * 512);
    slot = slot + SLOT < RING ? slot + SLOT : 0;
  }

  // Prefetches the lines of the first steps; one of four lanes does.
  __device__ __forceinline__ void prefetch() const {
#pragma unroll
    for (int i = 0; i < ROWS * (Tiles::STEPS - 1); ++i) {
      int after = i / ROWS * Tiles::WARPS;
      if (threadIdx.x % 4 || step + after >= steps) continue;
      ptx::prefetch_global_L2(ahead + after * STEP + distance[i % ROWS]);
    }
  }
};

// The factors of a tile's rows.
template <class T, class Tiles> struct Factors {
  static constexpr int ROWS = 2 * Tiles::TILES;
  const T* all;
  unsigned first[ROWS];  // the places of the rows' first factors

  template <class Out> __device__ __forceinline__ Factors(const Product<T, Out>& p, int of_tile) {
    LaneRows<ROWS> rows(of_tile, p.n);
    int groups = p.k / Tiles::GROUP;
    all = static_cast<const T*>(p.workspace);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) first[i] = rows.first * groups + int(rows.distance(i, groups));
  }
  __device__ __forceinline__ float of(int i, int step) const {
    if constexpr (!Tiles::PACKED) return 1;
    return widen<float>(all[first[i] + step * Tiles::DEEP / Tiles::GROUP]);
  }
};

// What a lane reads of x: the k of its pieces of W.
template <class T, class Tiles> struct RowsOfX {
  const T* row;
  long long distance[Tiles::EIGHTS], k_step;
  int k;

  template <class Out>
  __device__ __forceinline__ RowsOfX(const Product<T, Out>& p, int batch) : k_step(p.a_col), k(p.k) {
    LaneRows<Tiles::EIGHTS> rows(blockIdx.y * 8 * Tiles::EIGHTS, p.m);
    int from = threadIdx.x / 32 * Tiles::DEEP + threadIdx.x % 4 * Tiles::EACH;
    row = p.a_at(batch, rows.first, from);
    k -= from;
#pragma unroll
    for (int e = 0; e < Tiles::EIGHTS; ++e) distance[e] = rows.distance(e, p.a_row);
  }

  // The chunk-th 8 elements of the lane's.
  __device__ __forceinline__ void read(unsigned (&words)[Tiles::EIGHTS][4], int chunk) const {
#pragma unroll
    for (int e = 0; e < Tiles::EIGHTS; ++e) {
      eight<Tiles::WIDE, Tiles::PACKED>(words[e], row + distance[e], k_step, 8 * chunk, k);
    }
  }
  __device__ __forceinline__ void next() {
    row += Tiles::WARPS * Tiles::DEEP * (Tiles::WIDE ? 1 : k_step);
    k -= Tiles::WARPS * Tiles::DEEP;
  }
};

// The products of 8 elements of each lane's pieces of W: 4 pairs from `first` on.
template <class T, class Tiles>
__device__ __forceinline__ void add_chunk(float (&parts)[Tiles::TILES][Tiles::EIGHTS][4],
                                          const unsigned (&w)[2 * Tiles::TILES][4],
                                          const unsigned (&x)[Tiles::EIGHTS][4], int first, unsigned twice) {
  constexpr int BITS = Tiles::BITS, PAIRS = 16 / BITS;
#pragma unroll
  for (int pair = 0; pair < 4; pair += 2) {
    unsigned b[Tiles::EIGHTS][2];
#pragma unroll
    for (int i = 0; i < 2 * Tiles::EIGHTS; ++i) {
      int of = pair + i % 2;
      b[i / 2][i % 2] = pair_of_x<BITS>(x[i / 2] + of / PAIRS * PAIRS, of % PAIRS);
    }
#pragma unroll
    for (int t = 0; t < Tiles::TILES; ++t) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int of = first + pair + i / 2;
        a[i] = pair_of_w<T, BITS>(w[2 * t + i % 2][of / PAIRS], of % PAIRS, twice);
      }
#pragma unroll
      for (int e = 0; e < Tiles::EIGHTS; ++e) mma(T(), parts[t][e], a, b[e][0], b[e][1]);
    }
  }
}

// Adds the sums of all warps for a tile, and stores them.
template <int EPILOGUE, class Tiles, class T, class Out>
__device__ __forceinline__ void finish(const Product<T, Out>& p, int batch, int first, const float* of_warp) {
  constexpr int EIGHTS = Tiles::EIGHTS, SUMS = Tiles::SUMS;
#pragma unroll 1
  for (int e = threadIdx.x; e < SUMS; e += 32 * Tiles::WARPS) {
    int row = first + e / (EIGHTS * 128) * 16 + e / 64 % 2 * 8 + e % 64 / 8;
    int i = blockIdx.y * 8 * EIGHTS + e / 128 % EIGHTS * 8 + e % 8;
    if (row >= p.n || i >= p.m) continue;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < Tiles::WARPS; ++warp) sum += of_warp[warp * SUMS + e];
    store<EPILOGUE>(p, batch, i, row, sum);
  }
}

template <class T, class Out, int EPILOGUE, class Launch, class Tiles>
__global__ __launch_bounds__(32 * Tiles::WARPS, Tiles::BLOCKS) void gemv_quantized(const Product<T, Out> p) {
  constexpr int TILES = Tiles::TILES, EIGHTS = Tiles::EIGHTS, STEPS = Tiles::STEPS, WARPS = Tiles::WARPS;
  constexpr int CHUNKS = Tiles::EACH / 8;
  using Rows = PackedRows<T, Out, Launch, Tiles>;
  extern __shared__ __align__(16) char ring[];
  float* of_warp = reinterpret_cast<float*>(ring + (Tiles::WIDE ? WARPS * Rows::RING : 0));
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // blockDim.y is 1, which the compiler does not know: it would make a mask that is a constant anew for each use.
  unsigned twice = 0x00010001 * blockDim.y;
  Rows w(p, ring);
  if constexpr (Launch::OVERLAP) {
    ptx::griddepcontrol_launch_dependents();
    if constexpr (Tiles::WIDE) w.prefetch();
    ptx::griddepcontrol_wait();
  }
#pragma unroll
  for (int s = 1; s < STEPS && Tiles::WIDE; ++s) {
    w.slot = s * Rows::SLOT;
    w.request();
  }
  w.slot = 0;
  int buffer = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
    RowsOfX<T, Tiles> x(p, w.batch(tile));
    Factors<T, Tiles> factors_of_tile(p, w.first(tile));
    float sums[TILES][EIGHTS][4] = {};
#pragma unroll 1
    for (int step = warp; step < w.steps; step += WARPS) {
      float parts[TILES][EIGHTS][4] = {}, factors[2 * TILES];
      unsigned words[2 * TILES][4], chunks[CHUNKS][EIGHTS][4];
      if constexpr (Tiles::WIDE) {
        w.request();
      } else {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
          eight<false, false>(words[i], w.ahead + w.distance[i], p.b_row, Rows::k_of(step), p.k);
        }
        w.request();
      }
#pragma unroll
      for (int i = 0; i < 2 * TILES; ++i) factors[i] = factors_of_tile.of(i, step);
      if constexpr (EIGHTS == 1) {  // with more, there are too few registers to wait for W and x at once
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) x.read(chunks[c], c);
      }
      if constexpr (Tiles::WIDE) w.read(words);
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        if constexpr (EIGHTS > 1) x.read(chunks[c], c);
        add_chunk<T, Tiles>(parts, words, chunks[c], 4 * c, twice);
      }
#pragma unroll
      for (int i = 0; i < TILES * EIGHTS * 4; ++i) {
        float& sum = sums[i / 4 / EIGHTS][i / 4 % EIGHTS][i % 4];
        sum = multiply_add(parts[i / 4 / EIGHTS][i / 4 % EIGHTS][i % 4], factors[i / 4 / EIGHTS * 2 + i % 4 / 2], sum);
      }
      x.next();
    }
    float* sums_of_tile = of_warp + buffer * WARPS * Tiles::SUMS;
#pragma unroll
    for (int i = 0; i < TILES * EIGHTS * 2; ++i) {
      const float* two = sums[i / 2 / EIGHTS][i / 2 % EIGHTS] + i % 2 * 2;
      *reinterpret_cast<Chunk<float, 2>*>(sums_of_tile + warp * Tiles::SUMS + i * 64 + 2 * lane) = {two[0], two[1]};
    }
    __syncthreads();
    finish<EPILOGUE, Tiles>(p, w.batch(tile), w.first(tile), sums_of_tile);
    buffer ^= 1;  // the sums of this tile are read until the next barrier
  }
}
