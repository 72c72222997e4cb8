// The idea: tensor cores in double by mma.sync, from a ring of tiles that cp.async fills. The fragments are plain
// registers, so the tiles can be swizzled, and sm_90 has an instruction of 16 x 8 x 8 with twice the rate of 8 x 8 x 4.
// Its parent: wmma_f64, which has the small instruction alone, and padded tiles.
#include "epilogue.cuh"
#include "swizzle.cuh"

// A tile of SIDES by BK in 16-byte chunks, with a row for each side where ALONG_K, else for each k. 16 lanes read two
// chunks of each of four rows at once: the XOR gives every two of them banks of their own.
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

// 16 rows of A by 8 of k: row g and row g + 8 at k = t, then at t + 4, of the lane 4 g + t.
struct FragmentA { double at[4]; };
struct FragmentB { double at[2]; };

template <class Tile> __device__ __forceinline__ FragmentA fragment_a(const char* tile, int row, int k) {
  FragmentA a;
#pragma unroll
  for (int i = 0; i < 4; ++i) a.at[i] = Tile::read(tile, row + i % 2 * 8, k + i / 2 * 4);
  return a;
}

template <class Tile> __device__ __forceinline__ FragmentB fragment_b(const char* tile, int column, int k) {
  FragmentB b;
#pragma unroll
  for (int i = 0; i < 2; ++i) b.at[i] = Tile::read(tile, column, k + i * 4);
  return b;
}

// 16 x 8 sums: columns 2 t and 2 t + 1 of row g, then of row g + 8.
struct Sums {
  double at[4];

  template <bool SM_90> __device__ __forceinline__ void add_product(const FragmentA& a, const FragmentB& b) {
    if constexpr (SM_90) {
      ptx::mma_m16n8k8_f64(at, a.at, b.at);
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        ptx::mma_m8n8k4_f64(at[0], at[1], a.at[2 * k], b.at[k]);
        ptx::mma_m8n8k4_f64(at[2], at[3], a.at[2 * k + 1], b.at[k]);
      }
    }
  }
};

template <class T, class Out, int EPILOGUE, Layout A, Layout B, int A_VEC, int B_VEC, int C_VEC, int BM, int BN, int BK,
          int WM, int WN, int STAGES, int BLOCKS, bool SM_90>
__global__ void __launch_bounds__(BM / WM * (BN / WN) * 32, BLOCKS) mma_f64(const Product<T, Out> p) {
  constexpr int THREADS = BM / WM * (BN / WN) * 32, AHEAD = STAGES - 1;
  using TileA = TileF64<BM, BK, A != COL>;
  using TileB = TileF64<BN, BK, B == COL>;
  constexpr int STAGE = TileA::BYTES + TileB::BYTES;
  extern __shared__ __align__(128) char ring[];

  Tile tile = tile_of_block<BM, BN>(p);
  TileCopy<T, TileA, A_VEC, false, THREADS> a_copy(panel_of_a(p, tile));
  TileCopy<T, TileB, B_VEC, false, THREADS> b_copy(panel_of_b(p, tile));
  auto begin = [&](int stage) {
    unsigned start = ptx::shared_address(ring) + stage * STAGE;
    a_copy.start(start);
    b_copy.start(start + TileA::BYTES);
    ptx::cp_async_commit_group();
    a_copy.advance(BK);
    b_copy.advance(BK);
  };

  int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int row = warp / (BN / WN) * WM + g, column = warp % (BN / WN) * WN;
  Sums sums[WM / 16][WN / 8] = {};
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) begin(s);
  int now = 0, last = AHEAD;  // stages of the ring: the one that is read, and the one that is filled
  for (int k0 = 0; k0 < p.k; k0 += BK) {
    ptx::cp_async_wait_group<AHEAD - 1>();
    __syncthreads();
    begin(last);
    const char* stage = ring + now * STAGE;
#pragma unroll
    for (int k = 0; k < BK; k += 8) {
      FragmentA a[WM / 16];
      FragmentB b[WN / 8];
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) a[i] = fragment_a<TileA>(stage, row + 16 * i, k + t);
#pragma unroll
      for (int j = 0; j < WN / 8; ++j) b[j] = fragment_b<TileB>(stage + TileA::BYTES, column + 8 * j + g, k + t);
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) {
#pragma unroll
        for (int j = 0; j < WN / 8; ++j) sums[i][j].template add_product<SM_90>(a[i], b[j]);
      }
    }
    now = now == AHEAD ? 0 : now + 1;
    last = last == AHEAD ? 0 : last + 1;
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
        out.of[v] = finished<EPILOGUE>(p, c + v, i, j + v, sums[y / 2][x / 2].at[y % 2 * 2 + (x + v) % 2]);
      }
      *reinterpret_cast<Chunk<Out, C_VEC>*>(c) = out;
    }
  }
}
