// Idea: where k is adjacent in A and in B, nothing is transposed: cp.async brings 16 bytes of k of a row or column, and
// threads read them so, four steps of k of a side at once. A thread's rows and columns lie apart, each lane's beside
// its neighbor's, so that eight of them are on different banks.
// Parent: simt_pipelined, whose tiles lie along the sides, so that such operands go there element by element.
// Measured on an H200, f32: n = 512 takes 11.8 us, 14.6 element by element; 1024 57.3, 67.2 through registers. At 4096
// it takes 3048, and 2928 through registers: twice the operands in registers leave a multiprocessor 8 warps.
#include "shared_k.cuh"
#include "simt_warptile.cu"

// A tile in pieces of four adjacent k, where neither cp.async nor reads transpose: the eight pieces that one of them
// moves at a time, of eight sides or of two whole ones, are on different banks.
template <int SIDE, int BK> struct KPieces {
  static constexpr int SIZE = SIDE * BK, SPAN = 8;
  static constexpr Layout ORDER = ROW;
  static_assert(BK == 16, "four pieces to a side");
  static __device__ constexpr int distance(int sides, int ks) { return sides * BK + ks; }
  static __device__ __forceinline__ int at(int side, int k) { return side * BK + (k / 4 ^ side / 2 % 4) * 4 + k % 4; }
};

// Where COUNT sides have their pieces, APART sides from one to the next: those of the first, by piece; a further one
// has them at a constant distance from these, in an order that its number tells.
template <int SIDE, int BK, int APART, int COUNT, class S> struct PiecesOf {
  const S* first[BK / 4];
  __device__ __forceinline__ PiecesOf(const S* tile, int side) {
#pragma unroll
    for (int piece = 0; piece < BK / 4; ++piece) first[piece] = tile + KPieces<SIDE, BK>::at(side, piece * 4);
  }
  __device__ __forceinline__ void read(Chunk<S, 4> (&x)[COUNT], int piece) const {
    static_assert(APART % 4 == 0, "sides differ in the second bit of their pair or in none");
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      x[i] = *reinterpret_cast<const Chunk<S, 4>*>(first[piece ^ i * APART / 2 % 4] + i * APART * BK);
    }
  }
  __device__ __forceinline__ void move(int elements) {
#pragma unroll
    for (int piece = 0; piece < BK / 4; ++piece) first[piece] += elements;
  }
};

template <int EPILOGUE, class Tiles, int WM, int WN, int STAGES, int SPLITS = 1, bool CLUSTER = false, class T,
          class Out>
__device__ __forceinline__ void product_along_k(const Product<T, Out>& p) {
  using S = Sum<T, Out>;
  constexpr int BK = Tiles::BK, TM = Tiles::TM, TN = Tiles::TN, PIECES = BK / 4;
  using TileA = KPieces<Tiles::BM, BK>;
  using TileB = KPieces<Tiles::BN, BK>;
  using Tiling = WarpTiling<Tiles, WM, WN, S, true>;
  constexpr int STAGE = TileA::SIZE + TileB::SIZE;
  extern __shared__ unsigned char memory[];
  S* ring = reinterpret_cast<S*>(memory);

  if constexpr (CLUSTER) ptx::barrier_cluster_arrive();
  Tile tile = tile_of_block<Tiles::BM, Tiles::BN, 8, SPLITS>(p);
  const PartOfK<SPLITS, BK> part(p.k);
  auto a_panel = part.of(panel_of_a(p, tile));
  auto b_panel = part.of(panel_of_b(p, tile));
  Load<T, ROW, 4, Tiles::BM, BK, Tiles::THREADS, BK * int(sizeof(T))> a_load(a_panel);
  Load<T, ROW, 4, Tiles::BN, BK, Tiles::THREADS, BK * int(sizeof(T))> b_load(b_panel);
  auto begin = [&](S* stage) {
    a_load.template copy<TileA>(a_panel, stage);
    b_load.template copy<TileB>(b_panel, stage + TileA::SIZE);
    ptx::cp_async_commit_group();
  };
  auto finish = [&] {
    ptx::cp_async_wait_group<STAGES - 2>();
    __syncthreads();
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) begin(ring + s * STAGE);
  finish();
  const Tiling at;
  PiecesOf<Tiles::BM, BK, Tiling::ROWS_APART, TM, S> a_at(ring, at.row);
  PiecesOf<Tiles::BN, BK, Tiling::COLUMNS_APART, TN, S> b_at(ring + TileA::SIZE, at.column);
  Chunk<S, 4> a[2][TM], b[2][TN];
  S sums[TM][TN];
  clear(sums);
  auto read = [&](int to, int piece) {
    a_at.read(a[to], piece);
    b_at.read(b[to], piece);
  };
  read(0, 0);
  int now = 0, free = STAGES - 1;  // stages of the ring: the one being read, and the one to fill
  for (int k0 = 0; k0 < part.depth; k0 += BK) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      if (piece == PIECES - 1) {
        int step = now == STAGES - 1 ? 1 - STAGES : 1;
        now += step;
        a_at.move(step * STAGE);
        b_at.move(step * STAGE);
        finish();
      }
      read((piece + 1) % 2, (piece + 1) % PIECES);
      if (piece == 0) {
        begin(ring + free * STAGE);
        free = free == STAGES - 1 ? 0 : free + 1;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        S left[TM], right[TN];
#pragma unroll
        for (int i = 0; i < TM; ++i) left[i] = a[piece % 2][i].of[k];
#pragma unroll
        for (int j = 0; j < TN; ++j) right[j] = b[piece % 2][j].of[k];
        outer_product(left, right, sums);
      }
    }
  }
  store_shared<EPILOGUE, Tiling::ROWS_APART, Tiling::COLUMNS_APART, 1, true, SPLITS, CLUSTER, Tiles::THREADS>(
      p, part.index, tile, tile.row + at.row, tile.col + at.column, sums,
      ptx::shared_address(ring + STAGES * STAGE));
}

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int WM, int WN, int STAGES, int BLOCKS,
          bool PACKED = false, int SPLITS = 1>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) simt_along_k(const Product<T, Out> p) {
  product_along_k<EPILOGUE, Tiles, WM, WN, STAGES, SPLITS>(p);
}

#if __CUDA_ARCH__ >= 900
// The same by clusters of SPLITS blocks, which share k.
template <class T, class Out, int EPILOGUE, class Access, class Tiles, int WM, int WN, int STAGES, int BLOCKS,
          int SPLITS>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(Tiles::THREADS, BLOCKS)
    simt_along_k_cluster(const Product<T, Out> p) {
  product_along_k<EPILOGUE, Tiles, WM, WN, STAGES, SPLITS, true>(p);
}
#endif
