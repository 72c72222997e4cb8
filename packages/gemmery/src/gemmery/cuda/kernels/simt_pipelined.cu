// Idea: loading later tiles overlaps with computing the current one. With two stages the next tile waits in registers
// and is stored after the current one is read; with more, cp.async fills a ring of STAGES tiles without registers. In
// both cases the operands of the next step of k are read while those of the current step are multiplied.
// Parent: simt_warptile, where a block waits for memory, then for its own threads, at every tile.
// Measured on an H200 at n = 4096: in f32 faster by cp.async than through registers, and faster still with 16 x 8 sums
// per thread instead of 8 x 8: then it is close to cuBLAS, and 2048 of the loop's 2233 instructions are multiply-adds.
// In f64, 512 of 627, it does not come as close to its peak.
#include "shared_k.cuh"
#include "simt_warptile.cu"

// A product whose B a launch before has copied to rows of n, as wgmma_pack.cu lays them, if it is PACKED.
template <bool PACKED, class T, class Out>
__device__ __forceinline__ Product<T, Out> given_or_packed(Product<T, Out> p) {
  if (!PACKED) return p;
  p.b = static_cast<decltype(p.b)>(p.workspace);
  p.b_row = (p.n + 31LL) / 32 * 32;
  p.b_col = 1;
  if (p.b_batch) p.b_batch = p.b_row * p.k;
  return p;
}

template <int EPILOGUE, class Access, class Tiles, int WM, int WN, int STAGES, int SPLITS = 1, bool CLUSTER = false,
          class T, class Out>
__device__ __forceinline__ void pipelined_product(const Product<T, Out>& p) {
  using S = Sum<T, Out>;
  using TileA = PaddedTile<Tiles::BM, Tiles::BK, Access::A>;
  using TileB = PaddedTile<Tiles::BN, Tiles::BK, transposed(Access::B)>;
  using Tiling = WarpTiling<Tiles, WM, WN, S>;
  constexpr int BK = Tiles::BK, ROWS_APART = Tiling::ROWS_APART, COLUMNS_APART = Tiling::COLUMNS_APART;
  constexpr int STAGE = TileA::SIZE + TileB::SIZE;
  constexpr bool ASYNC = STAGES > 2;
  // The step of k from which a tile in registers goes to the stage that nobody reads: warps then wait for each other,
  // but not for stores.
  constexpr int PUT = BK / 4 * 3 - 1;
  extern __shared__ unsigned char memory[];
  S* ring = reinterpret_cast<S*>(memory);

  if constexpr (CLUSTER) ptx::barrier_cluster_arrive();
  Tile tile = tile_of_block<Tiles::BM, Tiles::BN, 8, SPLITS>(p);
  const PartOfK<SPLITS, BK> part(p.k);
  auto a_panel = part.of(panel_of_a(p, tile));
  auto b_panel = part.of(panel_of_b(p, tile));
  LoadA<T, Access, Tiles> a_load(a_panel);
  LoadB<T, Access, Tiles> b_load(b_panel);
  auto begin = [&](S* stage) {
    if constexpr (ASYNC) {
      a_load.template copy<TileA>(a_panel, stage);
      b_load.template copy<TileB>(b_panel, stage + TileA::SIZE);
      ptx::cp_async_commit_group();
    } else {
      a_load.fetch(a_panel);
      b_load.fetch(b_panel);
    }
  };
  auto put = [&](S* stage) {
    a_load.template put<TileA>(stage);
    b_load.template put<TileB>(stage + TileA::SIZE);
  };
  auto finish = [&] {
    if constexpr (ASYNC) ptx::cp_async_wait_group<STAGES - 2>();
    __syncthreads();
  };

#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) begin(ring + s * STAGE);
  if constexpr (!ASYNC) put(ring);
  finish();
  Tiling at;
  const S *a_tile = ring + at.row, *b_tile = ring + TileA::SIZE + at.column;  // the thread's part of the current tile
  S a[2][Tiles::TM], b[2][Tiles::TN], sums[Tiles::TM][Tiles::TN];
  clear(sums);
  fragment<TileA, ROWS_APART>(a[0], a_tile, 0, 0);
  fragment<TileB, COLUMNS_APART>(b[0], b_tile, 0, 0);
  int now = 0, free = STAGES - 1;  // stages of the ring: the one being read, and the one to fill
  for (int k0 = 0; k0 < part.depth; k0 += BK) {
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      if (k == BK - 1) {
        int step = now == STAGES - 1 ? 1 - STAGES : 1;
        now += step;
        a_tile += step * STAGE;
        b_tile += step * STAGE;
        finish();
      }
      fragment<TileA, ROWS_APART>(a[(k + 1) % 2], a_tile, 0, (k + 1) % BK);
      fragment<TileB, COLUMNS_APART>(b[(k + 1) % 2], b_tile, 0, (k + 1) % BK);
      if (!ASYNC && k == PUT) put(ring + (1 - now) * STAGE);
      if (k == 0) {
        begin(ring + free * STAGE);
        free = free == STAGES - 1 ? 0 : free + 1;
      }
      if (PadsWithZeros<S>::value || k0 + k < part.depth) outer_product(a[k % 2], b[k % 2], sums);
    }
  }
  store_shared<EPILOGUE, ROWS_APART, COLUMNS_APART, Access::C_VEC, false, SPLITS, CLUSTER, Tiles::THREADS>(
      p, part.index, tile, tile.row + at.row, tile.col + at.column, sums,
      ptx::shared_address(ring + STAGES * STAGE));
}

template <class T, class Out, int EPILOGUE, class Access, class Tiles, int WM, int WN, int STAGES, int BLOCKS,
          bool PACKED = false, int SPLITS = 1>
__global__ void __launch_bounds__(Tiles::THREADS, BLOCKS) simt_pipelined(const Product<T, Out> given) {
  const Product<T, Out> p = given_or_packed<PACKED>(given);
  pipelined_product<EPILOGUE, Access, Tiles, WM, WN, STAGES, SPLITS>(p);
}

#if __CUDA_ARCH__ >= 900
// The same by clusters of SPLITS blocks, which share k.
template <class T, class Out, int EPILOGUE, class Access, class Tiles, int WM, int WN, int STAGES, int BLOCKS,
          int SPLITS, bool PACKED = false>
__global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(Tiles::THREADS, BLOCKS)
    simt_pipelined_cluster(const Product<T, Out> given) {
  const Product<T, Out> p = given_or_packed<PACKED>(given);
  pipelined_product<EPILOGUE, Access, Tiles, WM, WN, STAGES, SPLITS, true>(p);
}
#endif
