// The idea: tensor cores in double by mma.sync, from a ring of tiles that cp.async fills. The fragments are plain
// registers, so the tiles can be swizzled, and sm_90 has an instruction of 16 x 8 x 8 with twice the rate of 8 x 8 x 4.
// Its parent: wmma_f64, which has the small instruction alone, and padded tiles.
#include "epilogue.cuh"
#include "load.cuh"

// A tile of SIDE by BK, along k in ROW, along the sides in COL. 16 lanes read 4 sides by 4 k at once: the XOR gives each
// four of neighbours banks of its own.
template <int SIDE, int BK, Layout LAYOUT> struct Fours {
  static constexpr int SIZE = SIDE * BK;
  static constexpr Layout ADJACENT = LAYOUT == COL ? COL : ROW;
  static __device__ __forceinline__ int at(int side, int k) {
    if constexpr (ADJACENT == ROW) return (side * BK + k) ^ (side % 4 * 4);
    return (k * SIDE + side) ^ (k % 4 * 4);
  }
};

// 16 rows of A by 8 of k: row g and row g + 8 at k = t, then at t + 4, of the lane 4 g + t.
struct FragmentA { double at[4]; };
struct FragmentB { double at[2]; };

template <class Arrangement> __device__ __forceinline__ FragmentA fragment_a(const double* tile, int row, int k) {
  FragmentA a;
#pragma unroll
  for (int i = 0; i < 4; ++i) a.at[i] = tile[Arrangement::at(row + i % 2 * 8, k + i / 2 * 4)];
  return a;
}

template <class Arrangement> __device__ __forceinline__ FragmentB fragment_b(const double* tile, int column, int k) {
  FragmentB b;
#pragma unroll
  for (int i = 0; i < 2; ++i) b.at[i] = tile[Arrangement::at(column, k + i * 4)];
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
  constexpr int THREADS = BM / WM * (BN / WN) * 32, LINE = 128, AHEAD = STAGES - 1;
  using TileA = Fours<BM, BK, A>;
  using TileB = Fours<BN, BK, transposed(B)>;
  constexpr int STAGE = TileA::SIZE + TileB::SIZE;
  extern __shared__ double ring[];

  Tile tile = tile_of_block<BM, BN>(p);
  auto a_panel = panel_of_a(p, tile);
  auto b_panel = panel_of_b(p, tile);
  auto begin = [&](int k0, double* stage) {
    Load<T, A, A_VEC, BM, BK, THREADS, LINE>::template copy<TileA>(a_panel, k0, stage);
    Load<T, transposed(B), B_VEC, BN, BK, THREADS, LINE>::template copy<TileB>(b_panel, k0, stage + TileA::SIZE);
    ptx::cp_async_commit_group();
  };

  int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  int row = warp / (BN / WN) * WM + g, column = warp % (BN / WN) * WN;
  Sums sums[WM / 16][WN / 8] = {};
#pragma unroll
  for (int s = 0; s < AHEAD; ++s) begin(s * BK, ring + s * STAGE);
  int now = 0, last = AHEAD;  // stages of the ring: the one that is read, and the one that is filled
  for (int k0 = 0; k0 < p.k; k0 += BK) {
    ptx::cp_async_wait_group<AHEAD - 1>();
    __syncthreads();
    begin(k0 + AHEAD * BK, ring + last * STAGE);
    const double* stage = ring + now * STAGE;
#pragma unroll
    for (int k = 0; k < BK; k += 8) {
      FragmentA a[WM / 16];
      FragmentB b[WN / 8];
#pragma unroll
      for (int i = 0; i < WM / 16; ++i) a[i] = fragment_a<TileA>(stage, row + 16 * i, k + t);
#pragma unroll
      for (int j = 0; j < WN / 8; ++j) b[j] = fragment_b<TileB>(stage + TileA::SIZE, column + 8 * j + g, k + t);
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
