// Idea: one image for every product of its element types. Layouts, alignments, edges, alpha, beta and bias are values
// that a block reads once, before its loop, instead of arguments of the template: no shape waits for a compiler.
// Parent: mma_pipelined. Half of the threads copy tiles of A and half of B, by cp.async in pieces of 16 or of 4 bytes,
// or, where rows begin at odd elements or no elements are adjacent, through registers. Sums are added in the parent's
// order, so the bits are the parent's.
#include "general.cuh"
#include "mma.cuh"

// Whether tiles follow k, as they must unless only the sides are adjacent.
template <class T> __device__ __forceinline__ bool is_k_adjacent(const Panel<T>& panel) {
  return panel.k_step == 1 || panel.side_step != 1;
}

// One of two panels; selected by field, because the compiler puts structures that it selects in memory.
template <class T> __device__ __forceinline__ Panel<T> either(bool first, const Panel<T>& a, const Panel<T>& b) {
  return {first ? a.origin : b.origin, first ? a.side_step : b.side_step, first ? a.k_step : b.k_step,
          first ? a.sides : b.sides, first ? a.depth : b.depth};
}

// A thread's share of an operand's tiles of SIDES by 64 in shared memory: SIDES rows of 128 bytes, whose 16-byte chunks
// are permuted. A row is one side by 64 of k if elements are adjacent in k; else a block of 64 rows has one of k by 64
// sides in each.
template <class T, int SIDES, int THREADS, bool ANY> struct GeneralCopy {
  static constexpr int EACH = SIDES * 8 / THREADS, DOWN = THREADS / 8;  // rows from one chunk of a thread to its next
  static_assert(sizeof(T) == 2 && DOWN % 8 == 0 && 64 % DOWN == 0, "a thread's chunks have one key");

  const T* origin;               // this thread's first element
  long long down, along, ahead;  // to its next chunk, along a row, and to its first one in the next tile
  int rows, columns;             // what is left from there on
  unsigned first;                // position of the thread's first chunk
  bool k_adjacent;
  int piece;                     // bytes of a copy, 16 or 4, which divide rows and their distance; 2: through registers
  unsigned staged[EACH][4];        // chunks on their way through registers

  __device__ __forceinline__ GeneralCopy(const Panel<T>& panel, unsigned tile) {
    k_adjacent = is_k_adjacent(panel);
    long long row_step = k_adjacent ? panel.side_step : panel.k_step;
    along = k_adjacent ? panel.k_step : panel.side_step;
    rows = k_adjacent ? panel.sides : panel.depth;
    columns = k_adjacent ? panel.depth : panel.sides;
    unsigned odd = unsigned(reinterpret_cast<unsigned long long>(panel.origin)) | unsigned(row_step * 2) | columns * 2;
    piece = along != 1 || odd % 4 ? 2 : odd % 16 ? 4 : 16;
    int row = threadIdx.x % THREADS / 8, chunk = threadIdx.x % 8;
    rows -= row;
    columns -= chunk * 8;
    origin = panel.origin + row * row_step + chunk * 8 * along;
    down = DOWN * row_step;
    ahead = 64 * panel.k_step;
    first = tile + (row * 8 + (chunk ^ row % 8)) * 16;
  }

  __device__ __forceinline__ void advance() {
    origin += ahead;
    (k_adjacent ? columns : rows) -= 64;
  }

  __device__ __forceinline__ void start(unsigned stage) const {
    const T* from = origin;
    unsigned to = first + stage;
    int left = rows, across = columns;
    if (!ANY || piece == 16) {
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        if (e && e * DOWN % 64 == 0 && !k_adjacent) {  // the next 64 sides
          from += 64 - 64 / DOWN * down;
          left += 64;
          across -= 64;
        }
        ptx::cp_async<16>(to + e * DOWN * 128, from, left > e * DOWN && across > 0);
        from += down;
      }
    } else {
#pragma unroll 1
      for (int e = 0; e < EACH; ++e) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          ptx::cp_async<4>(to + 4 * word, from + 2 * word, left > 0 && across > 2 * word);
        }
        from += down;
        to += DOWN * 128;
        left -= DOWN;
      }
    }
  }

  __device__ __forceinline__ void fetch() {
    const T* row = origin;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const T* from = row;
      int count = rows > e * DOWN ? columns : 0;
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        unsigned low = 2 * word < count ? from->bits : 0;
        from += along;
        unsigned high = 2 * word + 1 < count ? from->bits : 0;
        from += along;
        staged[e][word] = low | high << 16;
      }
      row += down;
    }
  }
  __device__ __forceinline__ void put(unsigned stage) const {
#pragma unroll
    for (int e = 0; e < EACH; ++e) ptx::st_shared_v4(first + stage + e * DOWN * 128, staged[e]);
  }
};

// A warp's reads of a tile for 16 of k.
template <bool IS_A, int SIDES> struct GeneralFragments {
  unsigned of[SIDES / 16][4];

  // This lane's first byte, as an offset in the tile.
  static __device__ __forceinline__ unsigned start(int first_side, bool k_adjacent) {
    int lane = threadIdx.x % 32;
    bool by_16 = IS_A == k_adjacent;  // true if the second matrix is 8 rows further, else one chunk
    int row = by_16 ? lane % 16 : lane % 8 + lane / 16 * 8, chunk = by_16 ? lane / 16 : lane / 8 % 2;
    row += k_adjacent ? first_side : first_side / 64 * 64;
    chunk += k_adjacent ? 0 : first_side % 64 / 8;
    return (row * 8 + (chunk ^ row % 8)) * 16;
  }

  __device__ __forceinline__ void read(unsigned start, unsigned stage, bool k_adjacent, int group) {
    if (k_adjacent) {
#pragma unroll
      for (int i = 0; i < SIDES / 16; ++i) ptx::ldmatrix_x4(of[i], (start ^ group * 32) + stage + i * 2048);
    } else {
#pragma unroll
      for (int i = 0; i < SIDES / 16; ++i) ptx::ldmatrix_x4_trans(of[i], (start ^ i * 32) + stage + group * 2048);
    }
  }
};

template <class T, class Out, int EPILOGUE, class Tiles, int STAGES, bool ANY>
__global__ void __launch_bounds__(Tiles::THREADS) mma_general(const Traced<Product<T, Out>> p) {
  constexpr int BM = Tiles::BM, BN = Tiles::BN, BK = Tiles::BK, WM = Tiles::WM, WN = Tiles::WN;
  constexpr int THREADS = Tiles::THREADS, B_TILE = BM * 128, STAGE = B_TILE + BN * 128;
  static_assert(BM == BN && BK == 64, "A and B have as many threads each, and rows of 128 bytes");
  extern __shared__ __align__(1024) char ring[];
  unsigned shared = ptx::shared_address(ring);
  Tile tile = tile_of_block<BM, BN>(p);
  Panel<T> a_panel = panel_of_a(p, tile), b_panel = panel_of_b(p, tile);
  bool of_a = threadIdx.x < THREADS / 2;
  GeneralCopy<T, BM, THREADS / 2, ANY> copy(either(of_a, a_panel, b_panel), shared + (of_a ? 0 : B_TILE));
  bool a_adjacent = is_k_adjacent(a_panel), b_adjacent = is_k_adjacent(b_panel);

  int row = Tiles::row(), column = Tiles::column();
  unsigned a_start = GeneralFragments<true, WM>::start(row, a_adjacent);
  unsigned b_start = GeneralFragments<false, WN>::start(column, b_adjacent) + B_TILE;
  WarpSums<T, WM, WN> sums;
  auto multiply = [&](unsigned stage, bool a_rows, bool b_rows) {
    GeneralFragments<true, WM> a[2];
    GeneralFragments<false, WN> b[2];
    a[0].read(a_start, stage, a_rows, 0);
    b[0].read(b_start, stage, b_rows, 0);
#pragma unroll
    for (int group = 0; group < BK / 16; ++group) {
      if (group < BK / 16 - 1) {
        a[(group + 1) % 2].read(a_start, stage, a_rows, group + 1);
        b[(group + 1) % 2].read(b_start, stage, b_rows, group + 1);
      }
      sums.multiply(a[group % 2], b[group % 2]);
    }
  };
  // Warps beyond the edges of C rest. The largest tile has few, and its registers suffice only without the test.
  bool busy = !ANY || (tile.row + row < p.m && tile.col + column < p.n);
  unsigned now = STAGE, free = 0;  // the stage being multiplied, and the one being filled
#pragma unroll 1
  for (int k = (1 - STAGES) * BK; k < p.k; k += BK) {  // nothing is multiplied until all stages but one are filled
    if (k >= 0) {
      ptx::cp_async_wait_group<STAGES - 2>();
      __syncthreads();  // the tile has arrived, and every warp has finished reading the one before it
    }
    bool more = k + (STAGES - 1) * BK < p.k;
    if (more) {
      if (ANY && copy.piece == 2) copy.fetch(); else copy.start(free);
      copy.advance();
    }
    ptx::cp_async_commit_group();
    if (k >= 0 && busy) {
      unsigned stage = shared + now;
      if constexpr (ANY) {
        multiply(stage, a_adjacent, b_adjacent);
      } else if (a_adjacent) {
        if (b_adjacent) multiply(stage, true, true); else multiply(stage, true, false);
      } else {
        if (b_adjacent) multiply(stage, false, true); else multiply(stage, false, false);
      }
    }
    if (ANY && more && copy.piece == 2) copy.put(free);
    free = now;
    now = now + STAGE == STAGES * STAGE ? 0 : now + STAGE;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  constexpr int PITCH = BN + 8;
  float* parts = reinterpret_cast<float*>(ring);
  int lane = threadIdx.x % 32;
  float* to = parts + (row + lane / 4) * PITCH + column + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < WM / 8; ++i) {
#pragma unroll
    for (int j = 0; j < WN / 8; ++j) {
      const float(&sum)[4] = sums.of[i / 2][j];
      *reinterpret_cast<Chunk<float, 2>*>(to + i * 8 * PITCH + j * 8) = {sum[i % 2 * 2], sum[i % 2 * 2 + 1]};
    }
  }
  __syncthreads();
  store_general<EPILOGUE, BM, BN, PITCH, THREADS>(p, tile, parts);
}
