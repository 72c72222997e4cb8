// Idea: one image for every product of its element types. Layouts, edges, alpha, beta and bias are values that a block
// reads once, before its loop, instead of arguments of the template: no shape waits for a compiler.
// Parent: simt_pipelined. cp.async copies single elements, so tiles can follow k whatever is adjacent in memory, and
// lanes follow what is. Sums are added in the parent's order, so the bits are the parent's.
#include "general.cuh"
#include "simt_warptile.cu"

// A thread's share of an operand's tiles of SIDES by BK in shared memory, stored k by k in rows of PITCH elements. The
// threads follow k if elements are adjacent in k, else the sides, in whole chunks where these are aligned.
template <class T, int SIDES, int BK, int PITCH, int THREADS> struct ElementCopy {
  static constexpr int EACH = SIDES * BK / THREADS, VEC = 16 / int(sizeof(T)), ACROSS = SIDES / VEC;
  static_assert(SIDES * BK % (THREADS * VEC) == 0 && THREADS % BK == 0, "all threads copy as much");

  const T* origin;        // this thread's first element
  long long next, step;   // to its next one in a tile, and to its first one in the next tile
  int side, depth;        // what is left from there on: sides, and of k
  int down;               // from one to the next, of the one or the other
  unsigned first, pitch;  // position of the first in a tile, and the distance to the next, in bytes
  bool k_adjacent, chunks;

  __device__ __forceinline__ explicit ElementCopy(const Panel<T>& panel) {
    k_adjacent = panel.k_step == 1;
    unsigned odd = unsigned(reinterpret_cast<unsigned long long>(panel.origin)) |
                   unsigned(panel.k_step * sizeof(T)) | panel.sides * unsigned(sizeof(T));
    chunks = !k_adjacent && panel.side_step == 1 && odd % 16 == 0;
    int across = k_adjacent ? BK : chunks ? ACROSS : SIDES;
    int x = threadIdx.x % across, y = threadIdx.x / across;
    int i = k_adjacent ? y : chunks ? x * VEC : x, k = k_adjacent ? x : y;
    down = THREADS / across;
    origin = panel.origin + i * panel.side_step + k * panel.k_step;
    next = down * (k_adjacent ? panel.side_step : panel.k_step);
    step = BK * panel.k_step;
    side = panel.sides - i;
    depth = panel.depth - k;
    first = (k * PITCH + i) * sizeof(T);
    pitch = (k_adjacent ? down : down * PITCH) * sizeof(T);
  }

  __device__ __forceinline__ void start(unsigned tile) {
    int left = (k_adjacent ? depth : side) > 0 ? (k_adjacent ? side : depth) : 0;
    if (chunks) {
      copy<VEC>(tile + first, left);
    } else {
      copy<1>(tile + first, left);
    }
    origin += step;
    depth -= BK;
  }

 private:
  template <int WIDTH> __device__ __forceinline__ void copy(unsigned to, int left) const {
    const T* from = origin;
#pragma unroll
    for (int e = 0; e < EACH / WIDTH; ++e) {
      ptx::cp_async<WIDTH * int(sizeof(T))>(to, from, left > 0);
      from += next;
      left -= down;
      to += pitch;
    }
  }
};

template <int EPILOGUE, class Tiles, int WM, int WN, int STAGES, class T, class Out>
__device__ __forceinline__ void general_product(const Product<T, Out>& p, unsigned char* memory) {
  constexpr int BM = Tiles::BM, BN = Tiles::BN, BK = Tiles::BK, TM = Tiles::TM, TN = Tiles::TN;
  using TileA = KMajor<BM + 4, BK>;
  using TileB = KMajor<BN + 4, BK>;
  using S = Sum<T, Out>;  // of T's size: elements are copied as they are, and whole numbers read without their sign
  using Tiling = WarpTiling<Tiles, WM, WN, S>;
  constexpr int ROWS_APART = Tiling::ROWS_APART, COLUMNS_APART = Tiling::COLUMNS_APART;
  constexpr int STAGE = TileA::SIZE + TileB::SIZE;
  S* ring = reinterpret_cast<S*>(memory);
  unsigned shared = ptx::shared_address(memory);
  Tile tile = tile_of_block<BM, BN>(p);
  ElementCopy<T, BM, BK, BM + 4, Tiles::THREADS> a_copy(panel_of_a(p, tile));
  ElementCopy<T, BN, BK, BN + 4, Tiles::THREADS> b_copy(panel_of_b(p, tile));
  Tiling at;
  S a[2][TM], b[2][TN], sums[TM][TN] = {};
  int warp = threadIdx.x / 32;
  bool busy = BM > 32 || (tile.row + warp / (BN / WN) * WM < p.m && tile.col + warp % (BN / WN) * WN < p.n);
  int now = 1, free = 0;  // stages of the ring: the one being read, and the one to fill
#pragma unroll 1
  for (int k0 = (1 - STAGES) * BK; k0 < p.k; k0 += BK) {  // nothing is multiplied until all stages but one are filled
    int next = now == STAGES - 1 ? 0 : now + 1;
    if (k0 + (STAGES - 1) * BK < p.k) {
      a_copy.start(shared + free * STAGE * sizeof(T));
      b_copy.start(shared + (free * STAGE + TileA::SIZE) * sizeof(T));
    }
    ptx::cp_async_commit_group();
    if (k0 >= 0 && busy) {
      const S *a_tile = ring + now * STAGE + at.row, *b_tile = ring + now * STAGE + TileA::SIZE + at.column;
#pragma unroll
      for (int k = 0; k < BK - 1; ++k) {
        fragment<TileA, ROWS_APART>(a[(k + 1) % 2], a_tile, 0, k + 1);
        fragment<TileB, COLUMNS_APART>(b[(k + 1) % 2], b_tile, 0, k + 1);
        outer_product(a[k % 2], b[k % 2], sums);
      }
    }
    if (k0 + BK >= 0 && k0 + BK < p.k) {
      ptx::cp_async_wait_group<STAGES - 2>();
      __syncthreads();  // the next tile has arrived, and all threads have read this one
      fragment<TileA, ROWS_APART>(a[0], ring + next * STAGE + at.row, 0, 0);
      fragment<TileB, COLUMNS_APART>(b[0], ring + next * STAGE + TileA::SIZE + at.column, 0, 0);
    }
    if (k0 >= 0 && busy) outer_product(a[1], b[1], sums);
    free = now;
    now = next;
  }
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  constexpr int TALL = Tiling::TALL, WIDE = Tiling::WIDE, PITCH = BN + 4;
#pragma unroll
  for (int y = 0; y < TM; ++y) {
#pragma unroll
    for (int x = 0; x < TN; x += WIDE) {
      Chunk<S, WIDE> piece;
#pragma unroll
      for (int v = 0; v < WIDE; ++v) piece.of[v] = sums[y][x + v];
      int row = at.row + y / TALL * ROWS_APART + y % TALL, column = at.column + x / WIDE * COLUMNS_APART;
      *reinterpret_cast<Chunk<S, WIDE>*>(ring + row * PITCH + column) = piece;
    }
  }
  __syncthreads();
  store_general<EPILOGUE, BM, BN, PITCH, Tiles::THREADS>(p, tile, ring);
}

template <class T, class Out, int EPILOGUE, class Tiles, int WM, int WN, int STAGES>
__global__ void __launch_bounds__(Tiles::THREADS) simt_general(const Traced<Product<T, Out>> p) {
  extern __shared__ __align__(16) unsigned char memory[];
  general_product<EPILOGUE, Tiles, WM, WN, STAGES, T, Out>(p, memory);
}
