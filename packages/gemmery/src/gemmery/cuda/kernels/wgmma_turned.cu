// Idea: wgmma reads elements of 32 bits from shared memory only where those of k are adjacent, but registers have no
// layout. So a B by rows is not copied to columns first: the product is C' = B' A', and warps load B' from its tile in
// shared memory. A lane's two columns of B are adjacent, and so are its sums of a row of C: it stores pairs.
// Parent: wgmma_persistent; wgmma_epilogue packs such a B first.
// Measured on an H200, tf32: n = 4096 takes 362 us, 397 with the copy, and 2048 46.0, 54.8.
#include "wgmma_cluster.cu"

// Each warp that loads hands a stage back.
template <class Given> struct TurnedTiles : Given {
  static constexpr int TOGETHER = 32, RELEASES = Given::WARPGROUPS * 4;
  static_assert(Given::BLOCKS == 1 && sizeof(typename Given::T) == 4 && !Given::A_K_MAJOR && Given::B_K_MAJOR, "B' A'");
};

// A lane has the columns 2 (l / 4) and the next of 16 that its warp has, in two sectors of 32 bytes, of k = l % 4, and
// of k + 4. Rows g and g + 8 of wgmma are these two columns. With the two sectors 64 bytes apart, the 16 lanes whose
// words leave shared memory at a time are on different banks: the swizzle has rows of k change chunks in fours.
template <class Tiles> struct FromRegisters : Consumer<Tiles> {
  using Types = RegisterTypes<typename Tiles::T, true>;
  unsigned words;  // in the first stage
  unsigned rows[Tiles::PRODUCTS][4];

  // The first column of this lane, in those of a warpgroup.
  static __device__ __forceinline__ int column() {
    const int warp = threadIdx.x % 128 / 32, group = threadIdx.x % 32 / 4;
    return warp * 8 + warp / 2 * 16 + group / 4 * 4 + group / 2 % 2 * 16 + group % 2 * 2;
  }

  template <class Pipe> __device__ __forceinline__ FromRegisters(const Pipe& pipe) : Consumer<Tiles>(pipe) {
    const int k = threadIdx.x % 4, at = Tiles::row_of(pipe.warpgroup - 1) + column();
    words = pipe.ring + at / 32 * 4096 + k * 128 + (at % 32 / 4 ^ k) * 16 + at % 4 * 4;
  }

  // One of a stage's products. While it is loaded, the three before are under way: that of its place in the stage
  // before has ended, whose registers it takes.
  template <bool BEGINS> __device__ __forceinline__ void multiply_part(int part) {
    const unsigned at = words + this->now.stage * Tiles::STAGE + part * 1024;
    if (!BEGINS) ptx::wgmma_wait_group<Tiles::PRODUCTS - 1>();
    ptx::ld_shared_v2(rows[part][0], rows[part][1], at);
    ptx::ld_shared_v2(rows[part][2], rows[part][3], (at ^ 64) + 512);
    ptx::wgmma_fence();
    ptx::wgmma_mma_async<Types>(this->sums[0], rows[part],
                                whole_descriptor(this->b + this->now.stage * (Tiles::STAGE >> 4) + part * NEXT_K<true>),
                                !(BEGINS && part == 0));
    ptx::wgmma_commit_group();
  }

  template <bool BEGINS> __device__ __forceinline__ void multiply_stage() {
    ptx::mbarrier_try_wait_parity(this->full + 8 * this->now.stage, this->now.parity);
#pragma unroll
    for (int part = 0; part < Tiles::PRODUCTS; ++part) multiply_part<BEGINS>(part);
    if (!BEGINS) this->release(this->before);
    this->next_stage();
  }

  __device__ __forceinline__ void multiply_tile(int steps) {
    multiply_stage<true>();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) multiply_stage<false>();
    this->finish();
  }

  // `row` and `column` are of C', the warpgroup's first ones.
  template <int EPILOGUE, class T, class Out>
  __device__ __forceinline__ void store(const Product<T, Out>& p, int batch, int row, int column) const {
    static_assert(EPILOGUE == 0, "plain products");
    row += FromRegisters::column();
    column += threadIdx.x % 4 * 2;
    if (row >= p.m) return;
    const bool pairs = row + 1 < p.m && p.c_row == 1 &&
                       (reinterpret_cast<unsigned long long>(p.c) | p.c_col * 4 | p.c_batch * 4) % 8 == 0;
#pragma unroll
    for (int eight = 0; eight < Tiles::WN / 8; ++eight) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        if (column + eight * 8 + x >= p.n) continue;
        Out* c = p.c_at(batch, row, column + eight * 8 + x);
        const float first = this->sums[0][4 * eight + x], second = this->sums[0][4 * eight + 2 + x];
        if (pairs) {
          *reinterpret_cast<Chunk<Out, 2>*>(c) = {first, second};
        } else {
          c[0] = first;
          if (row + 1 < p.m) c[p.c_row] = second;
        }
      }
    }
  }
};

template <class T, class Out, class Given>
__global__ void __launch_bounds__(Pipeline<Given>::THREADS, 1)
    wgmma_turned(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  using Tiles = TurnedTiles<Given>;
  specialized<0, Tiles, Bands<Tiles>, FromRegisters>(p, shared, Pipeline<Tiles>::lets_next_begin(p));
}
