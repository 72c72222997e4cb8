// Idea: one launch for groups of rows, each times a matrix of its own, as layers of experts need them. Where groups end
// is read on the device, so a graph can be replayed with others: every thread walks along the groups and counts their
// tiles until it comes to the next of its block. Of a tile only blocks of 64 rows that the group has are brought and
// multiplied, so that a group of few rows moves little beside its matrix.
// Parent: wgmma_persistent, which needs a launch for each group, and to know its rows.
// Measured: not yet.
#include "wgmma_persistent.cu"

// The tiles of a block, every gridDim.x-th of those of all groups, one group after the other. Without offsets the
// groups are the products of a batch, m rows each.
template <class Tiles> struct Groups {
  static constexpr int BAND = 8;  // rows of tiles of a group that are taken column by column
  const int* offsets;
  int m, columns, count, index, stride;
  int group = -1, begin = 0, end = 0, first = 0, tiles = 0;  // of a group: its rows, its first tile
  Tile tile;

  template <class P, class Place>
  __device__ __forceinline__ Groups(const P& p, const Place&)
      : offsets(p.offsets), m(p.product.m), columns((p.product.n + Tiles::BN - 1) / Tiles::BN), count(p.product.batch),
        index(blockIdx.x), stride(gridDim.x) {
    find();
  }

  __device__ __forceinline__ bool more() const { return group < count; }
  __device__ __forceinline__ void next() {
    index += stride;
    find();
  }

  __device__ __forceinline__ void find() {
    while (index >= first + tiles) {
      if (++group == count) return;
      first += tiles;
      begin = offsets ? end : 0;
      end = offsets ? min(max(offsets[group], begin), m) : m;  // of any offsets: nothing outside is touched
      tiles = (end - begin + Tiles::BM - 1) / Tiles::BM * columns;
    }
    int within = index - first, above = within / (BAND * columns) * BAND;
    int height = min(tiles / columns - above, BAND);
    within -= above * columns;
    tile = {group, begin + (above + within % height) * Tiles::BM, within / height * Tiles::BN};
  }
};

// Brings the blocks of 64 rows of A that a tile has.
template <class Tiles> struct GroupProducer : Producer<Tiles> {
  using Producer<Tiles>::Producer;

  template <class P> __device__ __forceinline__ void bring_rows(const P& p, Tile tile, int end, Steps k) {
    const int blocks = min((end - tile.row + 63) / 64, Tiles::BM / 64);
#pragma unroll 1
    for (int step = k.first; step < k.first + k.steps; ++step) {
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

// A consumer whose rows of a tile are all beyond the group only hands stages back.
template <class Tiles> __device__ __forceinline__ void pass_tile(Consumer<Tiles>& consumer, int steps) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::mbarrier_try_wait_parity(consumer.full + 8 * consumer.now.stage, consumer.now.parity);
    consumer.release(consumer.now.stage);
    consumer.next_stage();
  }
}

// The product of one group as the epilogue sees it: its rows end at `end`, and its bias is one of many.
template <class T, class Out>
__device__ __forceinline__ Product<T, Out> product_of(const TmaProduct<T, Out>& p, int group, int end) {
  Product<T, Out> product = p.product;
  product.m = end;
  if (p.offsets) {
    product.bias += group * product.bias_row;
    product.bias_row = 0;
  }
  return product;
}

template <class T, class Out, int EPILOGUE, class Tiles>
__global__ void __launch_bounds__(Pipeline<Tiles>::THREADS, 1)
    wgmma_grouped(const __grid_constant__ TmaProduct<T, Out> p) {
  extern __shared__ __align__(1024) char shared[];
  Pipeline<Tiles> pipe(shared, p);
  const Steps k = steps_of<Tiles>(p.product.k);
  if (pipe.warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) {
      GroupProducer<Tiles> producer(pipe);
      Groups<Tiles> order(p, pipe.place);
      for (; order.more(); order.next()) producer.bring_rows(p, order.tile, order.end, k);
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer<Tiles> consumer(pipe);
    Groups<Tiles> order(p, pipe.place);
    for (; order.more(); order.next()) {
      const int row = order.tile.row + (pipe.warpgroup - 1) * 64;
      if (row < order.end) {
        consumer.multiply_tile(k.steps);
        consumer.template store<EPILOGUE>(product_of(p, order.group, order.end), order.tile.batch, row, order.tile.col);
      } else {
        pass_tile(consumer, k.steps);
      }
    }
  }
}
