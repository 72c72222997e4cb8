// Idea: groups follow each other along k, as in the gradients of experts' weights: C has a matrix for each. Blocks take
// the tiles of all, those of the longest groups first, and read on the device where groups end. The last step of a
// tile also brings what the next group begins with; the warpgroups that multiply clear it, a barrier each tile. Steps
// begin where the group does, or, if k is adjacent in memory, at multiples of their own length: at lines of L2, and at
// multiples of 128 of k, of which each has factors, or none.
// Parent: wgmma_grouped, whose groups follow each other along m, and have the same k.
// Measured on an H200: docs/findings/grouped.md.
#include "wgmma_blockscaled.cu"

// Where groups end, each at least where the one before does, and their order: in the place of a bias.
struct Ends {
  static constexpr int MOST = BIAS_BYTES / 8;
  int* of;     // groups
  int* turns;  // groups in the order in which they are taken

  __device__ __forceinline__ Ends(char* place) : of(reinterpret_cast<int*>(place)), turns(of + MOST) {}

  // By all threads.
  template <class P> __device__ __forceinline__ void read(const P& p) const {
    const int groups = p.product.batch, group = threadIdx.x;
    if (!p.offsets) return;
    if (group < groups) turns[group] = min(p.offsets[group], p.product.k);
    __syncthreads();
    int end = 0, turn = 0;
    for (int i = 0; i < groups; ++i) {
      if (i <= group) end = max(end, turns[i]);
    }
    if (group < groups) of[group] = end;
    __syncthreads();
    for (int i = 0, own = group < groups ? length(group) : 0; i < groups; ++i) {
      turn += length(i) > own || (length(i) == own && i < group);
    }
    if (group < groups) turns[turn] = group;
    __syncthreads();
  }

  __device__ __forceinline__ int begin(int group) const { return group ? of[group - 1] : 0; }
  __device__ __forceinline__ int length(int group) const { return of[group] - begin(group); }
};

// The tiles of a block, and of each what part of k it has: from `low` to `high` of what `first` and the next steps
// bring. Every other round of blocks is taken from the end, so that none has the longest tile of each.
template <class Tiles, bool ALIGNED> struct Depths : Bands<Tiles> {
  const Ends& ends;
  const int* offsets;
  const int k;
  bool turned = false;
  int first, low, high, steps;

  template <class P, class Place>
  __device__ __forceinline__ Depths(const P& p, const Place& place, const Ends& ends)
      : Bands<Tiles>(p, place), ends(ends), offsets(p.offsets), k(p.product.k) {
    locate();
  }
  __device__ __forceinline__ void next() {
    this->index += turned ? 2 * blockIdx.x + 1 : 2 * (gridDim.x - blockIdx.x) - 1;
    turned = !turned;
    if (!this->more()) return;
    this->find();
    locate();
  }
  __device__ __forceinline__ void locate() {
    int begin = 0, end = k;
    if (offsets) {
      this->tile.batch = ends.turns[this->tile.batch];
      begin = ends.begin(this->tile.batch);
      end = ends.of[this->tile.batch];
    }
    first = ALIGNED ? begin / Tiles::BK * Tiles::BK : begin;
    low = begin - first;
    high = end - first;
    steps = end > begin ? (high + Tiles::BK - 1) / Tiles::BK : 0;
  }
};

// Brings `steps` of a tile at least; those that it has not are zeros, from beyond the end of A and B.
template <class Tiles> struct DepthProducer : Producer<Tiles> {
  using Producer<Tiles>::Producer;

  template <class P, class Order>
  __device__ __forceinline__ void bring_depth(const P& p, const Order& order, int steps) {
    const Tile tile = order.tile;
    const int beyond = (p.product.k / Tiles::BK + 2) * Tiles::BK;  // where k is adjacent, boxes begin at whole 16 bytes
#pragma unroll 1
    for (int step = 0; step < max(order.steps, steps); ++step) {
      const unsigned to = this->ring + this->now.stage * Tiles::STAGE, barrier = this->full + 8 * this->now.stage;
      const int k = step < order.steps ? order.first + step * Tiles::BK : beyond;
      ptx::mbarrier_try_wait_parity(this->empty + 8 * this->now.stage, this->now.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(barrier, stage_bytes<Tiles>(p));
      bring<Tiles::A_K_MAJOR, Tiles::BM, 1>(to, p.a, k, tile.row, p.product.a_batch ? tile.batch : 0, barrier);
      bring<Tiles::B_K_MAJOR, Tiles::BN, 1>(to + Tiles::A_BYTES, p.b, k, tile.col, p.product.b_batch ? tile.batch : 0,
                                            barrier);
      this->now.next();
    }
  }
};

template <class T, class Out, int EPILOGUE, class WholeTiles, bool SCALED>
__global__ void __launch_bounds__(Pipeline<WholeTiles>::THREADS, 1)
    wgmma_grouped_k(const __grid_constant__ TmaProduct<T, Out> p) {
  using Tiles = RaggedTiles<WholeTiles>;
  using P = Pieces<Tiles, Out>;
  using Order = Depths<Tiles, SCALED || Tiles::A_K_MAJOR || Tiles::B_K_MAJOR>;
  static_assert(Ends::MOST <= Pipeline<Tiles>::THREADS && !(EPILOGUE & (BIAS | FACTORS)), "their place is taken");
  extern __shared__ __align__(1024) char shared[];
  Pipeline<Tiles, P::BYTES> pipe(shared, p);
  pipe.wait_for_launches_before();  // they may write the offsets
  const Ends ends(shared + Tiles::RING + P::STAGING);
  ends.read(p);
  Order order(p, pipe.place, ends);
  if (pipe.warpgroup == 0) {
    pipe.begin_producer();
    if (threadIdx.x == 0) {
      DepthProducer<Tiles> producer(pipe);
      for (; order.more(); order.next()) producer.bring_depth(p, order, SCALED ? 0 : P::STEPS);
    }
  } else {
    pipe.begin_consumer(p);
    if constexpr (SCALED) {
      ScaledConsumer<Tiles> consumer(pipe);
      const int warp = threadIdx.x / 32 - 4;
      Staging<P> staging(pipe.ring + Tiles::RING, warp);
      for (; order.more(); order.next()) {
        const Where at = {order.tile.batch, order.tile.row + warp * 16, order.tile.col};
        consumer.low = order.low;
        consumer.high = order.high;
        const int alone = order.low > 0 ? order.steps : order.high % Tiles::BK > 0;
        consumer.multiply_tile(BlockScales(p, at, order.steps, order.first / Tiles::BK), order.steps, alone);
        store_pieces<EPILOGUE>(staging, consumer, p, at, shared, pipe.ring);
      }
      if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    } else {
      consume<EPILOGUE, Tiles>(p, pipe, order, 0, shared);
    }
  }
}
