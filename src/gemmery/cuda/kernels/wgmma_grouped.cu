// Idea: one launch for groups of rows, each times a matrix of its own, as layers of experts need them. Where groups end
// is read on the device, so a graph can be replayed with others: every thread walks along the groups and counts their
// tiles until it comes to the next of its block. Of a tile only blocks of 64 rows that the group has are brought and
// multiplied, so that a group of few rows moves little beside its matrix.
// Parent: wgmma_epilogue, which needs a launch for each group, and to know its rows.
// Measured on an H200, bf16: 0.89 to 1.6 of torch._grouped_mm, 1.2 on average.
#include "wgmma_epilogue.cu"

// The tiles of a block, every gridDim.x-th of those of all groups, one group after the other. Without offsets the
// groups are the products of a batch, m rows each.
template <class Tiles, class P> struct Groups {
  static constexpr bool GROUPED = true;
  // Rows of tiles of a group that are taken column by column. Each band reads the group's matrix again: with 8, groups
  // of 9 rows of tiles read it twice. 16 x 8 tiles, a round, need about as much of A as of B.
  static constexpr int BAND = 16;
  const P& p;  // what it holds of the argument is no register
  int index, group = -1, begin = 0, end = 0, first = 0, next_first = 0;  // of a group: its rows, its first tile
  Tile tile;

  template <class Place>
  __device__ __forceinline__ Groups(const P& p, const Place&) : p(p), index(blockIdx.x) {
    ptx::griddepcontrol_wait();  // the launches before may write the offsets
    find();
  }

  __device__ __forceinline__ bool more() const { return group < p.product.batch; }
  __device__ __forceinline__ bool passes(int warpgroup) const {
    return tile.row + warpgroup * Tiles::BLOCKS * 64 >= end;
  }
  __device__ __forceinline__ void next() {
    index += gridDim.x;
    find();
  }

  __device__ __forceinline__ void find() {
    const int columns = (p.product.n + Tiles::BN - 1) / Tiles::BN;
    while (index >= next_first) {
      if (++group == p.product.batch) return;
      first = next_first;
      begin = p.offsets ? end : 0;
      end = max(end_of<true>(p, group), begin);  // of any offsets: nothing outside is touched
      next_first += (end - begin + Tiles::BM - 1) / Tiles::BM * columns;
    }
    int within = index - first, above = within / (BAND * columns) * BAND;
    int height = min((end - begin + Tiles::BM - 1) / Tiles::BM - above, BAND);
    within -= above * columns;
    tile = {group, begin + (above + within % height) * Tiles::BM, within / height * Tiles::BN};
  }
};

// Brings the blocks of 64 rows of A that a tile has.
template <class Tiles> struct GroupProducer : Producer<Tiles> {
  using Producer<Tiles>::Producer;

  template <class P> __device__ __forceinline__ void bring_tile(const P& p, Tile tile, int first, int steps) {
    const int blocks = min((end_of<true>(p, tile.batch) - tile.row + 63) / 64, Tiles::BM / 64);
#pragma unroll 1
    for (int step = first; step < first + steps; ++step) {
      unsigned to = this->ring + this->now.stage * Tiles::STAGE, barrier = this->full + 8 * this->now.stage;
      ptx::mbarrier_try_wait_parity(this->empty + 8 * this->now.stage, this->now.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, blocks * 8192 + Tiles::B_BYTES);
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
        bring<Tiles::A_K_MAJOR, 64, 1>(to + block * 8192, p.a, step * Tiles::BK, tile.row + block * 64,
                                       p.product.a_batch ? tile.batch : 0, barrier, 0);
      }
      bring_b<Tiles>(p, to, tile, step, barrier);
      this->now.next();
    }
  }
};

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_grouped(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  product<EPILOGUE, Tiles, Groups<Tiles, TmaProduct<T, Out>>, GroupProducer<Tiles>>(p, shared);
}
