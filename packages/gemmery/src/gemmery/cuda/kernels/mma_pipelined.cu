// Idea: nothing waits. A ring of STAGES tiles is filled by cp.async while earlier tiles are multiplied, and within a
// tile the fragments of the next group of k are read while those of the current one are multiplied: global -> shared,
// shared -> registers and mma overlap, with one barrier per tile. This is the main loop of CUTLASS on Ampere.
// Parent: mma_ldmatrix, which does these one after the other.
// Measured on an H200, f16: twice as fast as the parent. The limits are the rate of mma.sync, then loading tiles, and
// at n = 8192 power. One set of fragments instead of two is slower. Rows of odd length are packed first; n = 4097 takes
// half of cuBLAS's time.
#include "mma_ldmatrix.cu"
#include "packed.cuh"

// The first launch, if operands need packing: the blocks of A and of B of each matrix.
template <class T, class Out, int EPILOGUE, Layout A, Layout B, int PACKED>
__global__ void __launch_bounds__(256) mma_pipelined_pack(const Product<T, Out> p) {
  unsigned of_a = PACKED & 1 ? pack_blocks<A != COL, T>(p.m, p.k) : 0;
  unsigned of_b = PACKED & 2 ? pack_blocks<B == COL, T>(p.n, p.k) : 0;
  unsigned index = blockIdx.x % (of_a + of_b);
  Tile whole = {int(blockIdx.x / (of_a + of_b)), 0, 0};
  if (index < of_a) {
    pack<A != COL>(panel_of_a(p, whole), a_panel<A, PACKED>(p, whole), index);
  } else {
    pack<B == COL>(panel_of_b(p, whole), b_panel<A, B, PACKED>(p, whole), index - of_a);
  }
}

template <class T, class Out, int EPILOGUE, class Access, int PACKED, int SPLITS, class Tiles, int STAGES>
__global__ void __launch_bounds__(Tiles::THREADS) mma_pipelined(const Product<T, Out> p) {
  using Block = MmaBlock<T, Access, Tiles>;
  constexpr Layout A = Access::A, B = Access::B;
  constexpr int BK = Tiles::BK, GROUPS = Block::GROUPS;
  constexpr int B_TILE = Block::TileA::BYTES, STAGE = B_TILE + Block::TileB::BYTES;
  static_assert(GROUPS % 2 == 0, "the two sets of fragments take turns");
  extern __shared__ __align__(1024) char ring[];
  unsigned start = ptx::shared_address(ring);

  Tile tile = tile_of_block<Tiles::BM, Tiles::BN>(p);
  int split = tile.batch % SPLITS, batch = tile.batch / SPLITS;  // part of k, in whole tiles
  int length = SPLITS > 1 ? ((p.k + BK - 1) / BK + SPLITS - 1) / SPLITS * BK : p.k;
  int depth = min(length, p.k - split * length);
  Tile whole = {batch, tile.row, tile.col};
  typename Block::CopyA a_copy(along_k(a_panel<A, PACKED>(p, whole), split * length, depth));
  typename Block::CopyB b_copy(along_k(b_panel<A, B, PACKED>(p, whole), split * length, depth));
  // Part of the next tile; beyond the last one these are zeros that are not read.
  auto fetch = [&](unsigned stage, int part, int parts) {
    a_copy.start(start + stage, part, parts);
    b_copy.start(start + stage + B_TILE, part, parts);
    if (part < parts - 1) return;
    ptx::cp_async_commit_group();
    a_copy.advance(BK);
    b_copy.advance(BK);
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage * STAGE, 0, 1);

  typename Block::FragmentsA a[2];
  typename Block::FragmentsB b[2];
  typename Block::Sums sums;
  unsigned a_start = start + a->start(Tiles::row()), b_start = start + B_TILE + b->start(Tiles::column());
  ptx::cp_async_wait_group<STAGES - 2>();
  __syncthreads();
  a[0].read(a_start, 0, 0);
  b[0].read(b_start, 0, 0);
  unsigned now = 0, free = (STAGES - 1) * STAGE;  // the stage being multiplied, and the one being filled
#pragma unroll 1
  for (int k = 0; k < depth; k += BK) {
    unsigned next = now + STAGE == STAGES * STAGE ? 0 : now + STAGE;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      bool last = group == GROUPS - 1;
      if (last) {  // the next tile has arrived, and every warp has finished reading this one
        ptx::cp_async_wait_group<STAGES - 2>();
        __syncthreads();
      }
      a[(group + 1) % 2].read(a_start, last ? next : now, (group + 1) % GROUPS);
      b[(group + 1) % 2].read(b_start, last ? next : now, (group + 1) % GROUPS);
      if (!last) fetch(free, group, GROUPS - 1);
      sums.multiply(a[group % 2], b[group % 2]);
    }
    free = now;
    now = next;
  }
  int row = tile.row + Tiles::row(), column = tile.col + Tiles::column();
  if constexpr (SPLITS == 1) {
    sums.template store<EPILOGUE, Access::C_VEC>(p, batch, row, column);
  } else {
    sums.template store<PLAIN, (Access::C_VEC > 1 ? 2 : 1)>(partial_sums<A, B, PACKED>(p), tile.batch, row, column);
  }
}

// The last launch, if k was split: adds up the parts, always in the same order.
template <class T, class Out, int EPILOGUE, Layout A, Layout B, int PACKED, int SPLITS>
__global__ void __launch_bounds__(256) mma_pipelined_finish(const Product<T, Out> p) {
  const Product<T, float> parts = partial_sums<A, B, PACKED>(p);
  unsigned across = (p.n + 255) / 256, row = blockIdx.x / across % p.m, batch = blockIdx.x / across / p.m;
  int column = blockIdx.x % across * 256 + threadIdx.x;
  if (column >= p.n) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < SPLITS; ++i) sum += *parts.c_at(batch * SPLITS + i, row, column);
  store<EPILOGUE>(p, batch, row, column, sum);
}
