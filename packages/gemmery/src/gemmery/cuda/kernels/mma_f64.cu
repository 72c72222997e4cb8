// Idea: tensor cores in f64 by mma.sync, from a ring of tiles filled by cp.async. Fragments are plain registers, so
// tiles can be swizzled and the instruction chosen: 16 x 8 x 4 on sm_90, with twice the rate of 8 x 8 x 4. The
// fragments of the next step are read while those of the current step are multiplied.
// Parent: wmma_f64, which has only the small instruction, and padded tiles.
// Measured on an H200: close to cuBLAS from n = 2048 on. Shared loads take 33,734,656 wavefronts, the fewest possible.
// Reading fragments only when they are needed leaves the tensor cores waiting 384 of 1408 cycles.
#include "epilogue.cuh"
#include "swizzle.cuh"
#include "tiling.cuh"

// A tile of SIDES by BK in 16-byte chunks, with a row per side if ALONG_K, else per k. 16 lanes read two chunks of each
// of four rows at once: the XOR puts every two of them on different banks.
template <int SIDES, int BK, bool ALONG_K> struct TileF64 {
  static constexpr bool K_ADJACENT = ALONG_K;
  static constexpr int ROWS = ALONG_K ? SIDES : BK, WIDTH = ALONG_K ? BK : SIDES;
  static constexpr int PER_CHUNK = 2, CHUNKS = WIDTH / 2, BYTES = ROWS * WIDTH * 8;
  static __device__ __forceinline__ unsigned at(int row, int chunk) {
    return (row * CHUNKS + (chunk ^ row % 4 * 2)) * 16;
  }
  static __device__ __forceinline__ double read(const char* tile, int side, int k) {
    int row = ALONG_K ? side : k, column = ALONG_K ? k : side;
    return *reinterpret_cast<const double*>(tile + at(row, column / 2) + column % 2 * 8);
  }
};

// A lane's reads of a tile for one step of 4 along k: two of 16 rows of A, one of 8 columns of B.
template <int TALL, int WIDE> struct FragmentsF64 { double a[TALL][2], b[WIDE]; };

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int STAGES, int BLOCKS, bool SM_90>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) mma_f64(const Product<T, Out> p) {
  constexpr int BK = Tiles::BK, WM = Tiles::WM, WN = Tiles::WN, C_VEC = Access::C_VEC;
  constexpr int AHEAD = STAGES - 1, STEPS = BK / 4, TALL = WM / 16, WIDE = WN / 8;
  using TileA = TileF64<Tiles::BM, BK, Access::A != COL>;
  using TileB = TileF64<Tiles::BN, BK, Access::B == COL>;
  constexpr int STAGE = TileA::BYTES + TileB::BYTES;
  extern __shared__ __align__(128) char ring[];

  Tile tile = tile_of_block<Tiles::BM, Tiles::BN>(p);
  TileCopy<T, TileA, Access::A_VEC, false, Tiles::THREADS> a_copy(panel_of_a(p, tile));
  TileCopy<T, TileB, Access::B_VEC, false, Tiles::THREADS> b_copy(panel_of_b(p, tile));
  auto begin = [&](int stage) {
    unsigned start = ptx::shared_address(ring) + stage * STAGE;
    a_copy.start(start);
    b_copy.start(start + TileA::BYTES);
    ptx::cp_async_commit_group();
    a_copy.advance(BK);
    b_copy.advance(BK);
  };
  auto arrive = [] {
    ptx::cp_async_wait_group<AHEAD - 1>();
    __syncthreads();
  };

  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int row = Tiles::row() + g, column = Tiles::column();
  FragmentsF64<TALL, WIDE> read[2];
  auto fetch = [&](int stage, int step) {
    const char *a_tile = ring + stage * STAGE, *b_tile = a_tile + TileA::BYTES;
#pragma unroll
    for (int i = 0; i < 2 * TALL; ++i) read[step % 2].a[i / 2][i % 2] = TileA::read(a_tile, row + 8 * i, 4 * step + t);
#pragma unroll
    for (int j = 0; j < WIDE; ++j) read[step % 2].b[j] = TileB::read(b_tile, column + 8 * j + g, 4 * step + t);
  };

  double sums[TALL][WIDE][4] = {};  // columns 2 t and 2 t + 1 of row g, then of row g + 8
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) begin(s);
  arrive();
  fetch(0, 0);
  int now = 0, free = AHEAD;  // stages of the ring: the one being read, and the one being filled
  for (int k0 = 0; k0 < p.k; k0 += BK) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step == STEPS - 1) {
        free = now;
        now = now == AHEAD ? 0 : now + 1;
        arrive();
      }
      fetch(now, (step + 1) % STEPS);
      if (step == 0) begin(free);
#pragma unroll
      for (int i = 0; i < TALL; ++i) {
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
          auto& c = sums[i][j];
          auto& [a, b] = read[step % 2];
          if constexpr (SM_90) {
            ptx::mma_m16n8k4_f64(c, a[i], b[j]);
          } else {
            ptx::mma_m8n8k4_f64(c[0], c[1], a[i][0], b[j]);
            ptx::mma_m8n8k4_f64(c[2], c[3], a[i][1], b[j]);
          }
        }
      }
    }
  }

#pragma unroll
  for (int y = 0; y < WM / 8; ++y) {
    int i = tile.row + row + 8 * y;
    if (i >= p.m) continue;
#pragma unroll
    for (int x = 0; x < WN / 4; x += C_VEC) {
      int j = tile.col + column + x / 2 * 8 + 2 * t + x % 2;
      if (j >= p.n) continue;
      Out* c = p.c_at(tile.batch, i, j);
      Chunk<Out, C_VEC> out;
#pragma unroll
      for (int v = 0; v < C_VEC; ++v) {
        out.of[v] = finished<EPILOGUE>(p, c + v, i, j + v, sums[y / 2][x / 2][y % 2 * 2 + (x + v) % 2]);
      }
      *reinterpret_cast<Chunk<Out, C_VEC>*>(c) = out;
    }
  }
}
